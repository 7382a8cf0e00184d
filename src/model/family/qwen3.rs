//! Qwen3, dense: a norm of each query and key head, and Qwen2's windows.

use super::{Definition, QkNorm, llama, qwen2, windows};
use crate::model::ModelConfig;

pub(super) const DEFINITION: Definition = Definition {
    model_type: "qwen3",
    class: "Qwen3",
    kv_heads_optional: false,
    head_dim: Some(128),
    qk_norm: QkNorm::Heads,
    read: |keys, config| {
        let windows = qwen2::upper_windows(keys, config.layers())?;
        Ok(ModelConfig { windows, mlp_bias: false, ..config })
    },
    write: |config, keys| {
        windows::write_used(config, keys);
        llama::write_attention_bias(config, keys);
    },
    ..llama::DEFINITION
};
