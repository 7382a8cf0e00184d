//! Reading how a Hugging Face `config.json` turns positions into angles.

use serde_json::{Map, Value};

use super::keys::Keys;
use super::{Family, ModelError, RopeScaling};

/// Theta and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).
pub(super) fn rope(keys: &Keys, family: Family, max_positions: usize) -> Result<(f64, RopeScaling), ModelError> {
    let default_theta = match family {
        Family::SmolLm3 => 2_000_000.0,
        Family::Olmo3 => 500_000.0,
        _ => 10_000.0,
    };
    let outer_theta = keys.optional::<f64>("rope_theta", "a number")?;
    if keys.optional::<f64>("partial_rotary_factor", "a number")?.is_some_and(|part| part != 1.0) {
        return Err(keys.unsupported("partial_rotary_factor", "1.0"));
    }
    let given = |name: &&str| keys.map.get(*name).is_some_and(|value| !value.is_null());
    let Some(name) = ["rope_parameters", "rope_scaling"].into_iter().find(given) else {
        return Ok((outer_theta.unwrap_or(default_theta), RopeScaling::Default));
    };
    let map = keys.map[name].as_object().ok_or_else(|| keys.bad(name, "an object"))?;
    let map = match by_layer_type(keys, family, name, map)? {
        Some(full) => full,
        None => map,
    };
    let rope = Keys { map, ..*keys };
    let theta = rope.optional("rope_theta", "a number")?.or(outer_theta).unwrap_or(default_theta);
    if rope.optional::<f64>("partial_rotary_factor", "a number")?.is_some_and(|part| part != 1.0) {
        return Err(rope.unsupported("partial_rotary_factor", "1.0"));
    }
    Ok((theta, scaling(keys, &rope, family, max_positions)?))
}

/// OLMo 3 says it for each kind of layer; windowed layers are never stretched.
fn by_layer_type<'a>(
    keys: &Keys,
    family: Family,
    name: &str,
    map: &'a Map<String, Value>,
) -> Result<Option<&'a Map<String, Value>>, ModelError> {
    let Some(full) = map.get("full_attention").and_then(Value::as_object).filter(|_| family == Family::Olmo3) else {
        return Ok(None);
    };
    let windowed = map.get("sliding_attention").and_then(Value::as_object);
    let same = |key: &str| windowed.and_then(|map| map.get(key)).is_none_or(|theirs| full.get(key) == Some(theirs));
    let plain = windowed.and_then(|map| map.get("rope_type")).is_none_or(|kind| kind == "default");
    if plain && same("rope_theta") {
        Ok(Some(full))
    } else {
        Err(keys.bad(name, "sliding_attention with rope_type default and the rope_theta of full_attention"))
    }
}

fn scaling(keys: &Keys, rope: &Keys, family: Family, max_positions: usize) -> Result<RopeScaling, ModelError> {
    let number = |key: &str| rope.required::<f64>(key, "a number");
    let given = |key: &str| rope.optional::<f64>(key, "a number");
    // Phi-3's configurations say it outside.
    let original = match keys.optional("original_max_position_embeddings", "a number")? {
        Some(outside) => outside,
        None => given("original_max_position_embeddings")?.unwrap_or(max_positions as f64),
    };
    let type_key = if rope.map.contains_key("rope_type") { "rope_type" } else { "type" };
    Ok(match rope.optional::<String>(type_key, "a string")?.as_deref() {
        None | Some("default") => RopeScaling::Default,
        Some(_) if family == Family::Phi3 => return Err(rope.unsupported(type_key, "default, in a phi3 model")),
        Some("linear") => RopeScaling::Linear { factor: number("factor")? },
        Some("dynamic") => RopeScaling::Dynamic { factor: number("factor")? },
        Some("llama3") => RopeScaling::Llama3 {
            factor: number("factor")?,
            low: number("low_freq_factor")?,
            high: number("high_freq_factor")?,
            original,
        },
        Some("yarn") => {
            let factor = given("factor")?.unwrap_or(max_positions as f64 / original);
            let longer = |weight: f64| if factor <= 1.0 { 1.0 } else { 0.1 * weight * factor.ln() + 1.0 };
            let nonzero = |key: &str| Ok::<_, ModelError>(given(key)?.filter(|number| *number != 0.0));
            let amplitude = match (given("attention_factor")?, nonzero("mscale")?, nonzero("mscale_all_dim")?) {
                (Some(amplitude), ..) => amplitude,
                (None, Some(scale), Some(all)) => longer(scale) / longer(all),
                _ => longer(1.0),
            };
            RopeScaling::Yarn {
                factor,
                original,
                fast: nonzero("beta_fast")?.unwrap_or(32.0),
                slow: nonzero("beta_slow")?.unwrap_or(1.0),
                amplitude,
                truncate: rope.optional("truncate", "true or false")?.unwrap_or(true),
            }
        }
        Some(_) => return Err(rope.unsupported(type_key, "default, linear, dynamic, llama3, yarn")),
    })
}
