//! OLMo 2: norms of each branch's output, and of all query and key heads of a token.

use super::{Defaults, Definition, LayerDefinition, QkNorm, llama};
use crate::model::ModelConfig;

pub(super) const DEFINITION: Definition = Definition {
    model_type: "olmo2",
    class: "Olmo2",
    defaults: Defaults { rms_norm_eps: 1e-5, ..llama::DEFINITION.defaults },
    layer: LayerDefinition {
        norms: ["post_attention_layernorm", "post_feedforward_layernorm"],
        norms_output: true,
        qk_norm: QkNorm::Tokens,
        ..llama::DEFINITION.layer
    },
    read: |_, config| Ok(ModelConfig { mlp_bias: false, ..config }),
    write: llama::write_attention_bias,
};
