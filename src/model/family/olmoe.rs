//! OLMoE: a mixture of experts in every layer, and norms of all query and key heads of a token.

use super::{Definition, QkNorm, llama, qwen3_moe};
use crate::model::ModelConfig;

pub(super) const DEFINITION: Definition = Definition {
    model_type: "olmoe",
    class: "Olmoe",
    rms_norm_eps: 1e-5,
    qk_norm: QkNorm::Tokens,
    read: |keys, config| {
        let experts = Some(qwen3_moe::experts(keys, "num_experts", config.intermediate_size)?);
        Ok(ModelConfig { experts, mlp_bias: false, ..config })
    },
    write: |config, keys| {
        llama::write_attention_bias(config, keys);
        config.experts.iter().for_each(|of| qwen3_moe::write_experts(of, keys));
    },
    ..llama::DEFINITION
};
