//! Qwen3.5 with experts, text only: its layers, each with a mixture and with one expert of every token.

use super::qwen3_moe::{experts, write_experts};
use super::{Definition, qwen3_5};
use crate::model::{Experts, ModelConfig};

/// Largest width of an expert.
const WIDEST: usize = 1 << 20;

pub(super) const DEFINITION: Definition = Definition {
    model_type: "qwen3_5_moe_text",
    class: "Qwen3_5Moe",
    // Layers have no other width than that of experts.
    absent: &[
        ("intermediate_size", 512),
        ("moe_intermediate_size", 512),
        ("shared_expert_intermediate_size", 512),
        ("num_experts", 256),
        ("num_experts_per_tok", 8),
    ],
    read: |keys, config| {
        let (width, shared) =
            (keys.size("moe_intermediate_size", WIDEST)?, keys.size("shared_expert_intermediate_size", WIDEST)?);
        let of = Experts { normalized: true, shared: Some(shared), ..experts(keys, "num_experts", width)? };
        let config = (qwen3_5::DEFINITION.read)(keys, config)?;
        Ok(ModelConfig { experts: Some(of), ..config })
    },
    write: |config, keys| {
        (qwen3_5::DEFINITION.write)(config, keys);
        if let Some(of) = &config.experts {
            write_experts(of, keys);
            keys.remove("norm_topk_prob");
            keys.insert("moe_intermediate_size".into(), of.width.into());
            keys.insert("shared_expert_intermediate_size".into(), of.shared.into());
        }
    },
    ..qwen3_5::DEFINITION
};
