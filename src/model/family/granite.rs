//! Granite 3 and later, dense: four constant factors.

use super::{Definition, llama};
use crate::model::ModelConfig;

pub(super) const DEFINITION: Definition = Definition {
    model_type: "granite",
    class: "Granite",
    read: |keys, config| {
        let factor = |key: &str| keys.positive::<f64>(key, "a finite number > 0").map(|factor| factor.unwrap_or(1.0));
        Ok(ModelConfig {
            embedding_multiplier: factor("embedding_multiplier")?,
            residual_multiplier: factor("residual_multiplier")?,
            attention_multiplier: Some(factor("attention_multiplier")?),
            logits_scaling: factor("logits_scaling")?,
            ..config
        })
    },
    write: |config, keys| {
        llama::write_biases(config, keys);
        keys.insert("embedding_multiplier".into(), config.embedding_multiplier.into());
        keys.insert("residual_multiplier".into(), config.residual_multiplier.into());
        keys.insert("attention_multiplier".into(), config.attention_scale().into());
        keys.insert("logits_scaling".into(), config.logits_scaling.into());
    },
    ..llama::DEFINITION
};
