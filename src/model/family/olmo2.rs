//! OLMo 2: norms of each branch's output, and of all query and key heads of a token.

use super::{Definition, Norms, QkNorm, llama};
use crate::model::ModelConfig;

pub(super) const DEFINITION: Definition = Definition {
    model_type: "olmo2",
    class: "Olmo2",
    pad: Some(1),
    rms_norm_eps: 1e-5,
    norms: [Norms::after("post_attention_layernorm"), Norms::after("post_feedforward_layernorm")],
    qk_norm: QkNorm::Tokens,
    read: |_, config| Ok(ModelConfig { mlp_bias: false, ..config }),
    write: llama::write_attention_bias,
    ..llama::DEFINITION
};
