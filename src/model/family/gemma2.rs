//! Gemma 2: norms before and after each branch, capped scores and logits, and a window in every other
//! layer.

use serde_json::{Map, Value, json};

use super::{Definition, Norms, gemma, llama, mistral, windows};
use crate::model::keys::Keys;
use crate::model::{Activation, ModelConfig, ModelError};

pub(super) const DEFINITION: Definition = Definition {
    model_type: "gemma2",
    class: "Gemma2",
    norms: [
        Norms { before: Some("input_layernorm"), after: Some("post_attention_layernorm") },
        Norms { before: Some("pre_feedforward_layernorm"), after: Some("post_feedforward_layernorm") },
    ],
    activation: ("hidden_activation", Activation::GeluTanh),
    read: |keys, config| {
        let window = windows::sliding_window(keys, mistral::WINDOW)?;
        let windows = windows::by_layer(keys, config.layers(), window, |layer| layer % 2 == 0)?;
        capped(keys, ModelConfig { windows, ..gemma::scaled(keys, config)? }, [Some(50.0), Some(30.0)])
    },
    write,
    ..gemma::DEFINITION
};

/// With the factor of query-key products and the caps of scores and logits; `caps` are those of
/// configurations without the keys.
pub(super) fn capped(keys: &Keys, config: ModelConfig, caps: [Option<f64>; 2]) -> Result<ModelConfig, ModelError> {
    let positive = |key: &str, absent: Option<f64>| match keys.map.contains_key(key) {
        true => keys.positive(key, "a finite number > 0"),
        false => Ok(absent),
    };
    let scalar = positive("query_pre_attn_scalar", Some(256.0))?.unwrap_or(256.0);
    Ok(ModelConfig {
        attention_multiplier: Some(1.0 / scalar.sqrt()),
        attention_cap: positive("attn_logit_softcapping", caps[0])?,
        logits_cap: positive("final_logit_softcapping", caps[1])?,
        ..config
    })
}

/// Adds the keys of windows, biases, caps and the factor of query-key products.
pub(super) fn write(config: &ModelConfig, keys: &mut Map<String, Value>) {
    windows::write_by_layer(config, keys);
    llama::write_attention_bias(config, keys);
    let scalar = config.attention_scale().powi(-2);
    // The configuration's class wants a whole number where it is one.
    let whole = (scalar - scalar.round()).abs() < 1e-9 * scalar;
    keys.insert("query_pre_attn_scalar".into(), if whole { json!(scalar.round() as u64) } else { json!(scalar) });
    keys.insert("attn_logit_softcapping".into(), json!(config.attention_cap));
    keys.insert("final_logit_softcapping".into(), json!(config.logits_cap));
}
