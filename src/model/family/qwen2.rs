//! Qwen2 and Qwen2.5: biases on queries, keys and values, and windows in the upper layers.

use super::{Definition, llama, mistral, windows};
use crate::model::keys::Keys;
use crate::model::{ModelConfig, ModelError};

pub(super) const DEFINITION: Definition = Definition {
    model_type: "qwen2",
    class: "Qwen2",
    kv_heads_optional: false,
    read: |keys, config| {
        let windows = upper_windows(keys, config.layers())?;
        Ok(ModelConfig { windows, qkv_bias: true, output_bias: false, mlp_bias: false, ..config })
    },
    write: windows::write_used,
    ..llama::DEFINITION
};

/// Windows of Qwen: the first `max_window_layers` layers have full attention.
pub(super) fn upper_windows(keys: &Keys, layers: usize) -> Result<Vec<Option<usize>>, ModelError> {
    let window = windows::used_sliding_window(keys, mistral::WINDOW)?;
    let full = keys.optional("max_window_layers", "an integer")?.unwrap_or(28);
    windows::by_layer(keys, layers, window, |layer| layer >= full)
}
