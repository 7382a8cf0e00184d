//! Mistral: a window in all layers, and no biases.

use super::{Definition, llama, windows};
use crate::model::ModelConfig;

/// `sliding_window` of configurations without the key.
pub(super) const WINDOW: Option<usize> = Some(4096);

pub(super) const DEFINITION: Definition = Definition {
    model_type: "mistral",
    class: "Mistral",
    kv_heads_optional: false,
    read: |keys, config| {
        let windows = vec![windows::sliding_window(keys, WINDOW)?; config.layers()];
        Ok(ModelConfig { windows, qkv_bias: false, output_bias: false, mlp_bias: false, ..config })
    },
    write: windows::write,
    ..llama::DEFINITION
};
