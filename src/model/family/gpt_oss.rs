//! gpt-oss: a mixture of experts with biases in every layer, sinks of attention, and a window in every other
//! layer.

use super::qwen3_moe::{experts, write_experts};
use super::{Definition, llama, windows};
use crate::model::read_rope::rope_key;
use crate::model::{ExpertLayer, Experts, ModelConfig, RopeScaling};

pub(super) const DEFINITION: Definition = Definition {
    model_type: "gpt_oss",
    class: "GptOss",
    head_dim: Some(64),
    rms_norm_eps: 1e-5,
    rope_theta: 150_000.0,
    sinks: true,
    read: |keys, config| {
        let window = windows::sliding_window(keys, Some(128))?;
        let windows = windows::by_layer(keys, config.layers(), window, |layer| layer % 2 == 0)?;
        let positive = |key: &str| keys.positive::<f64>(key, "a finite number > 0");
        let (alpha, limit) = (positive("swiglu_alpha")?.unwrap_or(1.702), positive("swiglu_limit")?.unwrap_or(7.0));
        let layer = ExpertLayer::Bounded { alpha, limit };
        // The weights of the chosen experts are a softmax of their logits alone.
        let experts = Experts { normalized: true, layer, ..experts(keys, "num_local_experts", config.intermediate_size)? };
        let bias = keys.flag("attention_bias")?.unwrap_or(true);
        let rope_scaling = if rope_key(keys).is_some() { config.rope_scaling.clone() } else { stretched() };
        let config = ModelConfig { windows, experts: Some(experts), rope_scaling, ..config };
        Ok(ModelConfig { qkv_bias: bias, output_bias: bias, mlp_bias: false, ..config })
    },
    write: |config, keys| {
        windows::write_by_layer(config, keys);
        llama::write_attention_bias(config, keys);
        if let Some(of) = &config.experts {
            write_experts(of, keys);
            keys.remove("norm_topk_prob");
            if let ExpertLayer::Bounded { alpha, limit } = of.layer {
                keys.insert("swiglu_alpha".into(), alpha.into());
                keys.insert("swiglu_limit".into(), limit.into());
            }
        }
    },
    ..llama::DEFINITION
};

/// The stretching of configurations without rotary keys.
fn stretched() -> RopeScaling {
    let factor: f64 = 32.0;
    RopeScaling::Yarn {
        factor,
        original_max_position_embeddings: 4096.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
        attention_factor: 0.1 * factor.ln() + 1.0,
        truncate: false,
    }
}
