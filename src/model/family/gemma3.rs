//! Gemma 3, text only: norms of queries and keys, and other rotary frequencies in layers with a window.

use serde_json::{Map, Value, json};

use super::{Definition, QkNorm, gemma, gemma2, mistral, windows};
use crate::model::keys::Keys;
use crate::model::read_rope::{self, rope_key};
use crate::model::{ModelConfig, ModelError, RopeScaling};

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
        let window_rope = Some(windowed_rope(keys, config.max_positions)?);
        let config = gemma2::capped(keys, ModelConfig { windows, window_rope, ..gemma::scaled(keys, config)? }, [None; 2])?;
        // transformers reads the cap of scores and does not apply it.
        Ok(ModelConfig { attention_cap: None, ..config })
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

/// Base and stretching of the rotary frequencies in layers with a window.
fn windowed_rope(keys: &Keys, max_positions: usize) -> Result<(f64, RopeScaling), ModelError> {
    let outside = keys.optional::<f64>("rope_local_base_freq", "a number")?.unwrap_or(WINDOWED);
    let plain = (outside, RopeScaling::Default);
    let Some(rope) = read_rope::rope_keys(keys)? else { return Ok(plain) };
    let Some(map) = rope.map.get("sliding_attention").and_then(Value::as_object) else { return Ok(plain) };
    let windowed = Keys { map, ..rope };
    match read_rope::scaling(keys, &windowed, max_positions)? {
        // It would shorten the context of the layers with full attention.
        RopeScaling::LongRope { .. } => {
            Err(keys.bad(rope_key(keys).unwrap_or_default(), "sliding_attention with another rope_type than longrope"))
        }
        scaling => Ok((windowed.optional("rope_theta", "a number")?.unwrap_or(outside), scaling)),
    }
}

fn write(config: &ModelConfig, keys: &mut Map<String, Value>) {
    gemma2::write(config, keys);
    // Read, and of no effect.
    keys.remove("attn_logit_softcapping");
    let (theta, scaling) = config.window_rope.clone().unwrap_or((WINDOWED, RopeScaling::Default));
    keys.insert("rope_local_base_freq".into(), theta.into());
    let mut windowed = json!(scaling);
    windowed["rope_theta"] = theta.into();
    if let Some(rope) = keys.get_mut("rope_parameters") {
        *rope = json!({"full_attention": rope.take(), "sliding_attention": windowed});
    }
}
