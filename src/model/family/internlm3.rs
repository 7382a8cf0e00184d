//! InternLM3: its own keys for biases, alongside Llama's.

use super::{Definition, llama};
use crate::model::ModelConfig;

pub(super) const DEFINITION: Definition = Definition {
    model_type: "internlm3",
    // transformers computes InternLM3 with Llama's classes.
    kv_heads_optional: false,
    head_dim: Some(128),
    rms_norm_eps: 1e-5,
    read: |keys, config| {
        let attention_bias = keys.flag("attention_bias")?.or(keys.flag("qkv_bias")?).unwrap_or(false);
        let mlp_bias = keys.flag("mlp_bias")?.or(keys.flag("bias")?).unwrap_or(false);
        Ok(ModelConfig { qkv_bias: attention_bias, output_bias: attention_bias, mlp_bias, ..config })
    },
    write: |config, keys| {
        keys.insert("qkv_bias".into(), config.qkv_bias.into());
        keys.insert("bias".into(), config.mlp_bias.into());
        llama::write_biases(config, keys);
    },
    ..llama::DEFINITION
};
