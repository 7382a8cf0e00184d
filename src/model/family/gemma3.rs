//! Gemma 3, text only: norms of queries and keys, and other rotary frequencies in layers with a window.

use serde_json::{Map, Value, json};

use super::{Definition, QkNorm, gemma, gemma2, mistral, windows};
use crate::model::keys::Keys;
use crate::model::read_rope::{self, rope_key};
use crate::model::{ModelConfig, ModelError};

/// Base of the rotary frequencies in layers with a window, if the configuration has none.
const WINDOWED: f64 = 10_000.0;

pub(super) const DEFINITION: Definition = Definition {
    model_type: "gemma3_text",
    class: "Gemma3",
    absent: &[
        ("vocab_size", 262_208),
        ("num_attention_heads", 8),
        ("num_key_value_heads", 4),
        ("max_position_embeddings", 131_072),
    ],
    rope_theta: 1_000_000.0,
    rope_keys,
    plain_rope_in_windows: true,
    qk_norm: QkNorm::Heads,
    read: |keys, config| {
        let window = windows::sliding_window(keys, mistral::WINDOW)?;
        let pattern = match keys.optional("sliding_window_pattern", "a positive integer")? {
            Some(0) => return Err(keys.bad("sliding_window_pattern", "a positive integer")),
            pattern => pattern.unwrap_or(6),
        };
        let windows = windows::by_layer(keys, config.layers(), window, |layer| (layer + 1) % pattern != 0)?;
        let window_rope_theta = Some(windowed_theta(keys)?);
        gemma2::capped(keys, ModelConfig { windows, window_rope_theta, ..gemma::scaled(keys, config)? }, [None; 2])
    },
    write,
    ..gemma2::DEFINITION
};

/// The rotary keys of layers with full attention.
fn rope_keys<'a>(keys: &Keys<'a>) -> Result<Option<Keys<'a>>, ModelError> {
    let Some(rope) = read_rope::rope_keys(keys)? else { return Ok(None) };
    let full = rope.map.get("full_attention").and_then(Value::as_object);
    Ok(Some(full.map_or(rope, |map| Keys { map, ..rope })))
}

/// Base of the rotary frequencies in layers with a window, which must not be stretched.
fn windowed_theta(keys: &Keys) -> Result<f64, ModelError> {
    let outside = keys.optional::<f64>("rope_local_base_freq", "a number")?.unwrap_or(WINDOWED);
    let Some(rope) = read_rope::rope_keys(keys)? else { return Ok(outside) };
    let Some(windowed) = rope.map.get("sliding_attention").and_then(Value::as_object) else { return Ok(outside) };
    if windowed.get("rope_type").is_some_and(|kind| kind != "default") {
        return Err(keys.bad(rope_key(keys).unwrap_or_default(), "sliding_attention with rope_type default"));
    }
    Ok(Keys { map: windowed, ..rope }.optional("rope_theta", "a number")?.unwrap_or(outside))
}

fn write(config: &ModelConfig, keys: &mut Map<String, Value>) {
    gemma2::write(config, keys);
    let theta = config.window_rope_theta.unwrap_or(WINDOWED);
    keys.insert("rope_local_base_freq".into(), theta.into());
    if let Some(rope) = keys.get_mut("rope_parameters") {
        *rope = json!({"full_attention": rope.take(), "sliding_attention": {"rope_type": "default", "rope_theta": theta}});
    }
}
