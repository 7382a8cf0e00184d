//! OLMoE: a mixture of experts in every layer, and norms of all query and key heads of a token.

use serde_json::json;

use super::{Definition, QkNorm, llama, qwen3_moe};
use crate::model::ModelConfig;

pub(super) const DEFINITION: Definition = Definition {
    model_type: "olmoe",
    class: "Olmoe",
    pad: Some(1),
    rms_norm_eps: 1e-5,
    qk_norm: QkNorm::Tokens,
    read: |keys, config| {
        let experts = Some(qwen3_moe::experts(keys, "num_experts", config.intermediate_size)?);
        let qkv_bound = keys.positive("clip_qkv", "a finite number > 0, or null")?;
        Ok(ModelConfig { experts, qkv_bound, mlp_bias: false, ..config })
    },
    write: |config, keys| {
        llama::write_attention_bias(config, keys);
        keys.insert("clip_qkv".into(), json!(config.qkv_bound));
        config.experts.iter().for_each(|of| qwen3_moe::write_experts(of, keys));
    },
    ..llama::DEFINITION
};
