//! Phi-3: joint projections, a window in all layers, and rotary frequencies that are plain or LongRoPE's.

use serde_json::{Map, Value, json};

use super::{Definition, llama, windows};
use crate::model::keys::Keys;
use crate::model::read_rope::{self, longrope_attention, type_key};
use crate::model::{ModelConfig, ModelError, RopeScaling};

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
    write,
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

/// Adds `sliding_window`, and LongRoPE's keys in the form that transformers 4 and 5 load.
fn write(config: &ModelConfig, keys: &mut Map<String, Value>) {
    windows::write(config, keys);
    let RopeScaling::LongRope { short_factor, long_factor, attention_factor, original_max_position_embeddings, stretched } =
        &config.rope_scaling
    else {
        return;
    };
    let original = *original_max_position_embeddings;
    keys.insert("original_max_position_embeddings".into(), json!(original as u64));
    // transformers 4 rejects other keys than these three, and both versions derive the factor of attention.
    if *attention_factor == longrope_attention(*stretched as f64 / original, original) {
        let scaling = json!({"type": "longrope", "short_factor": short_factor, "long_factor": long_factor});
        keys.insert("rope_scaling".into(), scaling);
    }
}
