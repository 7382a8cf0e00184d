//! Keys of sliding windows, and of rotations that are others in layers with a window, as families share them.

use serde_json::{Map, Value, json};

use crate::model::keys::Keys;
use crate::model::read_rope::{self, rope_key};
use crate::model::{ModelConfig, ModelError, RopeScaling};

/// `sliding_window`, or `absent` if the configuration lacks the key.
pub(super) fn sliding_window(keys: &Keys, absent: Option<usize>) -> Result<Option<usize>, ModelError> {
    match keys.positive("sliding_window", "a positive integer or null")? {
        None if !keys.map.contains_key("sliding_window") => Ok(absent),
        window => Ok(window),
    }
}

/// `sliding_window`, or `absent` without the key, if `use_sliding_window` is true.
pub(super) fn used_sliding_window(keys: &Keys, absent: Option<usize>) -> Result<Option<usize>, ModelError> {
    let (window, used) = (sliding_window(keys, absent)?, keys.flag("use_sliding_window")?);
    Ok(window.filter(|_| used == Some(true)))
}

/// One entry per layer: `window` where `layer_types` says `sliding_attention`, or, in a configuration
/// without that key, where `sees_window` holds.
pub(super) fn by_layer(
    keys: &Keys,
    layers: usize,
    window: Option<usize>,
    sees_window: impl Fn(usize) -> bool,
) -> Result<Vec<Option<usize>>, ModelError> {
    let Some(types) = keys.optional::<Vec<String>>("layer_types", "a list of strings")? else {
        return Ok((0..layers).map(|layer| window.filter(|_| sees_window(layer))).collect());
    };
    if types.len() != layers {
        return Err(keys.bad("layer_types", "one entry for each of num_hidden_layers"));
    }
    let of = |kind: &String| match (kind.as_str(), window) {
        ("full_attention", _) => Ok(None),
        ("sliding_attention", Some(window)) => Ok(Some(window)),
        ("sliding_attention", None) => Err(keys.bad(
            "layer_types",
            "no sliding_attention without sliding_window, and without use_sliding_window in families that have it",
        )),
        _ => Err(keys.unsupported("layer_types", "full_attention, sliding_attention")),
    };
    types.iter().map(of).collect()
}

/// Adds `sliding_window`.
pub(super) fn write(config: &ModelConfig, keys: &mut Map<String, Value>) {
    keys.insert("sliding_window".into(), json!(config.windows.iter().flatten().next()));
}

/// Adds `layer_types` and `sliding_window`.
pub(super) fn write_by_layer(config: &ModelConfig, keys: &mut Map<String, Value>) {
    let kind = |window: &Option<usize>| if window.is_some() { "sliding_attention" } else { "full_attention" };
    keys.insert("layer_types".into(), config.windows.iter().map(kind).collect());
    write(config, keys);
}

/// Adds `layer_types`, `sliding_window` and `use_sliding_window`.
pub(super) fn write_used(config: &ModelConfig, keys: &mut Map<String, Value>) {
    write_by_layer(config, keys);
    keys.insert("use_sliding_window".into(), config.windows.iter().any(Option::is_some).into());
}

/// The rotary keys of layers with full attention.
pub(super) fn full_rope_keys<'a>(keys: &Keys<'a>) -> Result<Option<Keys<'a>>, ModelError> {
    let Some(rope) = read_rope::rope_keys(keys)? else { return Ok(None) };
    let full = rope.map.get("full_attention").and_then(Value::as_object);
    Ok(Some(full.map_or(rope, |map| Keys { map, ..rope })))
}

/// Base and stretching of the rotary frequencies in layers with a window. `base` is the one of a
/// configuration without.
pub(super) fn window_rope(keys: &Keys, base: f64, max_positions: usize) -> Result<Option<(f64, RopeScaling)>, ModelError> {
    let plain = Some((base, RopeScaling::Default));
    let Some(rope) = read_rope::rope_keys(keys)? else { return Ok(plain) };
    let Some(map) = rope.map.get("sliding_attention").and_then(Value::as_object) else { return Ok(plain) };
    let windowed = Keys { map, ..rope };
    match read_rope::scaling(keys, &windowed, max_positions)? {
        // It would shorten the context of the layers with full attention.
        RopeScaling::LongRope { .. } => {
            Err(keys.bad(rope_key(keys).unwrap_or_default(), "sliding_attention with another rope_type than longrope"))
        }
        scaling => Ok(Some((windowed.optional("rope_theta", "a number")?.unwrap_or(base), scaling))),
    }
}

/// Makes the rotary keys those of each type of layer.
pub(super) fn write_ropes(config: &ModelConfig, keys: &mut Map<String, Value>) {
    let (theta, scaling) = config.window_rope.clone().unwrap_or((config.rope_theta, config.rope_scaling.clone()));
    let mut windowed = json!(scaling);
    windowed["rope_theta"] = theta.into();
    if let Some(rope) = keys.get_mut("rope_parameters") {
        *rope = json!({"full_attention": rope.take(), "sliding_attention": windowed});
    }
}
