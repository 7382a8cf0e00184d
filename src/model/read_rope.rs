//! Rotary keys of a Hugging Face `config.json`.

use serde_json::{Map, Value};

use super::family::{Definition, Family};
use super::keys::Keys;
use super::{ModelError, RopeScaling};

/// `original_max_position_embeddings` of Phi-3, whose configurations have that key outside of the object.
const PHI3_POSITIONS: f64 = 4096.0;

/// Reads the base of the rotary frequencies and their stretching from `rope_parameters`
/// (transformers 5), or `rope_theta` and `rope_scaling` (before), and the share of a head that is rotated.
pub(super) fn rope(keys: &Keys, defaults: &Definition, max_positions: usize) -> Result<(f64, RopeScaling, f64), ModelError> {
    let outer_theta = keys.optional::<f64>("rope_theta", "a number")?;
    let outer_share = share(keys, defaults)?;
    let absent = defaults.partial_rotation.unwrap_or(1.0);
    let Some(rope) = (defaults.rope_keys)(keys)? else {
        return Ok((outer_theta.unwrap_or(defaults.rope_theta), RopeScaling::Default, outer_share.unwrap_or(absent)));
    };
    let theta = rope.optional("rope_theta", "a number")?.or(outer_theta).unwrap_or(defaults.rope_theta);
    let share = share(&rope, defaults)?.or(outer_share).unwrap_or(absent);
    Ok((theta, scaling(keys, &rope, max_positions)?, share))
}

/// The configuration with one object of rotary keys, if it has two. As in transformers, `rope_scaling`
/// replaces `rope_parameters`, and where those are of types of layers, it changes the keys of full
/// attention.
pub(super) fn with_one_rope(keys: &Keys) -> Result<Option<Map<String, Value>>, ModelError> {
    let object = |key: &str| keys.map.get(key).and_then(Value::as_object).filter(|object| !object.is_empty());
    let (Some(parameters), Some(scaling)) = (object("rope_parameters"), object("rope_scaling")) else { return Ok(None) };
    let mut map = keys.map.clone();
    if let Some(full) = parameters.get("full_attention").and_then(Value::as_object) {
        let full: Map<String, Value> = full.clone().into_iter().chain(scaling.clone()).collect();
        map["rope_parameters"]["full_attention"] = full.into();
        map.remove("rope_scaling");
        return Ok(Some(map));
    }
    // transformers takes the family's default, which is seldom meant.
    if parameters.contains_key("rope_theta") && !scaling.contains_key("rope_theta") && !keys.map.contains_key("rope_theta") {
        return Err(keys.bad("rope_scaling", "an object with rope_theta: it replaces rope_parameters, and their base"));
    }
    map.remove("rope_parameters");
    Ok(Some(map))
}

/// Name of the key that holds the rotary keys, if the configuration has one.
pub(super) fn rope_key(keys: &Keys) -> Option<&'static str> {
    let given = |name: &&str| keys.map.get(*name).is_some_and(|value| !value.is_null());
    ["rope_parameters", "rope_scaling"].into_iter().find(given)
}

/// The object with the rotary keys, the same for all layers.
pub(super) fn rope_keys<'a>(keys: &Keys<'a>) -> Result<Option<Keys<'a>>, ModelError> {
    let Some(name) = rope_key(keys) else { return Ok(None) };
    let map = keys.map[name].as_object().ok_or_else(|| keys.bad(name, "an object"))?;
    Ok(Some(Keys { map, ..*keys }))
}

/// Key of the type of stretching.
pub(super) fn type_key(rope: &Keys) -> &'static str {
    if rope.map.contains_key("rope_type") { "rope_type" } else { "type" }
}

/// Share of a head's columns that is rotated, in families that may rotate some only.
fn share(keys: &Keys, defaults: &Definition) -> Result<Option<f64>, ModelError> {
    match keys.optional::<f64>("partial_rotary_factor", "a number")? {
        Some(part) if part != 1.0 && defaults.partial_rotation.is_none() => {
            Err(keys.unsupported("partial_rotary_factor", "1.0, in this family"))
        }
        share => Ok(share),
    }
}

/// LongRoPE's factor of attention that transformers derives from the factor of the context.
pub(super) fn longrope_attention(factor: f64, original: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / original.ln()).sqrt() }
}

/// Stretching of the rotary frequencies by the keys of `rope`, an object of `keys`.
pub(super) fn scaling(keys: &Keys, rope: &Keys, max_positions: usize) -> Result<RopeScaling, ModelError> {
    let number = |key: &str| rope.required::<f64>(key, "a number");
    let given = |key: &str| rope.optional::<f64>(key, "a number");
    let original = match keys.family == Family::Phi3.model_type() {
        true => keys.optional("original_max_position_embeddings", "a number")?.unwrap_or(PHI3_POSITIONS),
        false => given("original_max_position_embeddings")?.unwrap_or(max_positions as f64),
    };
    let type_key = type_key(rope);
    Ok(match rope.optional::<String>(type_key, "a string")?.as_deref() {
        None | Some("default") => RopeScaling::Default,
        Some("linear") => RopeScaling::Linear { factor: number("factor")? },
        Some("dynamic") => RopeScaling::Dynamic { factor: number("factor")? },
        // An older name of the same.
        Some("longrope" | "su") => {
            let factors = |key: &str| rope.required::<Vec<f64>>(key, "a list of numbers");
            let factor = given("factor")?.unwrap_or(max_positions as f64 / original);
            RopeScaling::LongRope {
                short_factor: factors("short_factor")?,
                long_factor: factors("long_factor")?,
                attention_factor: given("attention_factor")?.unwrap_or_else(|| longrope_attention(factor, original)),
                original_max_position_embeddings: original,
                stretched: max_positions,
            }
        }
        Some("llama3") => RopeScaling::Llama3 {
            factor: number("factor")?,
            low_freq_factor: number("low_freq_factor")?,
            high_freq_factor: number("high_freq_factor")?,
            original_max_position_embeddings: original,
        },
        Some("yarn") => {
            let factor = given("factor")?.unwrap_or(max_positions as f64 / original);
            let longer = |weight: f64| if factor <= 1.0 { 1.0 } else { 0.1 * weight * factor.ln() + 1.0 };
            let nonzero = |key: &str| Ok::<_, ModelError>(given(key)?.filter(|number| *number != 0.0));
            let attention_factor = match (given("attention_factor")?, nonzero("mscale")?, nonzero("mscale_all_dim")?) {
                (Some(factor), ..) => factor,
                (None, Some(scale), Some(all)) => longer(scale) / longer(all),
                _ => longer(1.0),
            };
            RopeScaling::Yarn {
                factor,
                original_max_position_embeddings: original,
                beta_fast: nonzero("beta_fast")?.unwrap_or(32.0),
                beta_slow: nonzero("beta_slow")?.unwrap_or(1.0),
                attention_factor,
                truncate: rope.optional("truncate", "true or false")?.unwrap_or(true),
            }
        }
        Some(_) => return Err(rope.unsupported(type_key, "default, linear, dynamic, llama3, longrope, yarn")),
    })
}
