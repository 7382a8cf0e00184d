//! Llama, the architecture that all families start from.

use serde_json::{Map, Value};

use super::{Definition, Norms, QkNorm};
use crate::model::{Activation, ModelConfig, read_rope};

pub(super) const DEFINITION: Definition = Definition {
    model_type: "llama",
    class: "Llama",
    kv_heads_optional: true,
    absent: &[],
    head_dim: None,
    rms_norm_eps: 1e-6,
    rope_theta: 10_000.0,
    tied: false,
    pad: None,
    rope_keys: read_rope::rope_keys,
    norms: [Norms::before("input_layernorm"), Norms::before("post_attention_layernorm")],
    norms_add_one: false,
    activation: ("hidden_act", Activation::Silu),
    qk_norm: QkNorm::None,
    qkv: &["q_proj", "k_proj", "v_proj"],
    gate_up: &["gate_proj", "up_proj"],
    sinks: false,
    gates_attention: false,
    partial_rotation: None,
    read: |_, config| Ok(config),
    write: write_biases,
};

/// Adds the keys of all biases.
pub(super) fn write_biases(config: &ModelConfig, keys: &mut Map<String, Value>) {
    write_attention_bias(config, keys);
    keys.insert("mlp_bias".into(), config.mlp_bias.into());
}

/// Adds the key of the attention's biases.
pub(super) fn write_attention_bias(config: &ModelConfig, keys: &mut Map<String, Value>) {
    keys.insert("attention_bias".into(), config.qkv_bias.into());
}
