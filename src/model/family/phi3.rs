//! Phi-3: joint projections, a window in all layers, and rotary frequencies that are plain or LongRoPE's.

use super::{Definition, llama, windows};
use crate::model::keys::Keys;
use crate::model::read_rope::{self, type_key};
use crate::model::{ModelConfig, ModelError};

pub(super) const DEFINITION: Definition = Definition {
    model_type: "phi3",
    class: "Phi3",
    rms_norm_eps: 1e-5,
    pad: Some(32_000),
    rope_keys,
    partial_rotation: Some(1.0),
    qkv: &["qkv_proj"],
    gate_up: &["gate_up_proj"],
    read: |keys, config| {
        let windows = vec![windows::sliding_window(keys, None)?; config.layers()];
        Ok(ModelConfig { windows, qkv_bias: false, output_bias: false, mlp_bias: false, ..config })
    },
    write: windows::write,
    ..llama::DEFINITION
};

/// Rejects stretched frequencies other than `longrope`.
fn rope_keys<'a>(keys: &Keys<'a>) -> Result<Option<Keys<'a>>, ModelError> {
    let Some(rope) = read_rope::rope_keys(keys)? else { return Ok(None) };
    let key = type_key(&rope);
    match rope.optional::<String>(key, "a string")?.as_deref() {
        None | Some("default" | "longrope" | "su") => Ok(Some(rope)),
        Some(_) => Err(rope.unsupported(key, "default, longrope, in a phi3 model")),
    }
}
