//! Qwen3, dense: a norm of each query and key head, and Qwen2's windows.

use super::{Defaults, Definition, LayerDefinition, QkNorm, llama, qwen2, windows};
use crate::model::ModelConfig;

pub(super) const DEFINITION: Definition = Definition {
    model_type: "qwen3",
    class: "Qwen3",
    defaults: Defaults { kv_heads_optional: false, head_dim: Some(128), ..llama::DEFINITION.defaults },
    layer: LayerDefinition { qk_norm: QkNorm::Heads, ..llama::DEFINITION.layer },
    read: |keys, config| {
        let windows = qwen2::upper_windows(keys, config.layers())?;
        Ok(ModelConfig { windows, mlp_bias: false, ..config })
    },
    write: |config, keys| {
        windows::write_used(config, keys);
        llama::write_attention_bias(config, keys);
    },
};
