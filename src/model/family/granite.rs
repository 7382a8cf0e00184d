//! Granite 3 and later, dense: four constant factors.

use super::{Definition, llama};
use crate::model::keys::Keys;
use crate::model::{Factors, ModelConfig, ModelError};

pub(super) const DEFINITION: Definition = Definition {
    model_type: "granite",
    class: "Granite",
    read: |keys, config| Ok(ModelConfig { factors: factors(keys)?, ..config }),
    write: |config, keys| {
        llama::write_biases(config, keys);
        keys.insert("embedding_multiplier".into(), config.factors.embedding.into());
        keys.insert("residual_multiplier".into(), config.factors.residual.into());
        keys.insert("attention_multiplier".into(), config.attention_scale().into());
        keys.insert("logits_scaling".into(), config.factors.logits.into());
    },
    ..llama::DEFINITION
};

fn factors(keys: &Keys) -> Result<Factors, ModelError> {
    let factor = |key: &str| match keys.optional::<f64>(key, "a number")?.unwrap_or(1.0) {
        factor if factor > 0.0 && factor.is_finite() => Ok(factor),
        _ => Err(keys.bad(key, "a finite number > 0")),
    };
    Ok(Factors {
        embedding: factor("embedding_multiplier")?,
        residual: factor("residual_multiplier")?,
        attention: Some(factor("attention_multiplier")?),
        logits: factor("logits_scaling")?,
    })
}
