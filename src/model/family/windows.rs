//! Keys of sliding windows, as families share them.

use serde_json::{Map, Value, json};

use crate::model::keys::Keys;
use crate::model::{ModelConfig, ModelError};

/// `sliding_window`, or `absent` if the configuration lacks the key.
pub(super) fn sliding_window(keys: &Keys, absent: Option<usize>) -> Result<Option<usize>, ModelError> {
    match keys.optional::<usize>("sliding_window", "a positive integer or null")? {
        Some(0) => Err(keys.bad("sliding_window", "a positive integer or null")),
        None if !keys.map.contains_key("sliding_window") => Ok(absent),
        window => Ok(window),
    }
}

/// `sliding_window` if `use_sliding_window` is true.
pub(super) fn used_sliding_window(keys: &Keys) -> Result<Option<usize>, ModelError> {
    let (window, used) = (sliding_window(keys, None)?, keys.flag("use_sliding_window")?);
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
