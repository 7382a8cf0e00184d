//! Gemma: embeddings times the root of their width, norm weights around 0, and GELU.

use super::{Definition, llama};
use crate::model::keys::Keys;
use crate::model::{Activation, ModelConfig, ModelError};

pub(super) const DEFINITION: Definition = Definition {
    model_type: "gemma",
    class: "Gemma",
    kv_heads_optional: false,
    head_dim: Some(256),
    tied: true,
    pad: Some(0),
    norms_add_one: true,
    activation: ("hidden_act", Activation::GeluTanh),
    read: |keys, config| {
        // Of the first releases, which were computed so.
        let activation = if config.activation == Activation::Gelu { Activation::GeluTanh } else { config.activation };
        scaled(keys, ModelConfig { activation, ..config })
    },
    write: llama::write_attention_bias,
    ..llama::DEFINITION
};

/// With the factor of the embeddings. Rejects attention to later tokens.
pub(super) fn scaled(keys: &Keys, config: ModelConfig) -> Result<ModelConfig, ModelError> {
    if keys.flag("use_bidirectional_attention")?.unwrap_or(false) {
        return Err(keys.unsupported("use_bidirectional_attention", "false"));
    }
    Ok(ModelConfig { embedding_multiplier: (config.hidden_size as f64).sqrt(), mlp_bias: false, ..config })
}
