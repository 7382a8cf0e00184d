//! OLMo 3: OLMo 2 with windows in three of four layers, whose rotary frequencies are not stretched.

use serde_json::{Map, Value, json};

use super::{Definition, llama, mistral, olmo2, windows};
use crate::model::keys::Keys;
use crate::model::read_rope::{self, rope_key};
use crate::model::{ModelConfig, ModelError};

pub(super) const DEFINITION: Definition = Definition {
    model_type: "olmo3",
    class: "Olmo3",
    rope_theta: 500_000.0,
    rope_keys,
    plain_rope_in_windows: true,
    read: |keys, config| {
        let window = windows::sliding_window(keys, mistral::WINDOW)?;
        let windows = windows::by_layer(keys, config.layers(), window, |layer| (layer + 1) % 4 != 0)?;
        Ok(ModelConfig { windows, mlp_bias: false, ..config })
    },
    write,
    ..olmo2::DEFINITION
};

/// The rotary keys of layers with full attention. Those of layers with a window must be plain.
fn rope_keys<'a>(keys: &Keys<'a>) -> Result<Option<Keys<'a>>, ModelError> {
    let Some(rope) = read_rope::rope_keys(keys)? else { return Ok(None) };
    let Some(full) = rope.map.get("full_attention").and_then(Value::as_object) else { return Ok(Some(rope)) };
    let windowed = rope.map.get("sliding_attention").and_then(Value::as_object);
    let same = |key: &str| windowed.and_then(|map| map.get(key)).is_none_or(|theirs| full.get(key) == Some(theirs));
    let plain = windowed.and_then(|map| map.get("rope_type")).is_none_or(|kind| kind == "default");
    if plain && same("rope_theta") {
        return Ok(Some(Keys { map: full, ..rope }));
    }
    let expected = "sliding_attention with rope_type default and the rope_theta of full_attention";
    Err(keys.bad(rope_key(keys).unwrap_or_default(), expected))
}

fn write(config: &ModelConfig, keys: &mut Map<String, Value>) {
    windows::write_by_layer(config, keys);
    llama::write_attention_bias(config, keys);
    let plain = json!({"rope_type": "default", "rope_theta": config.rope_theta});
    if let Some(rope) = keys.get_mut("rope_parameters") {
        *rope = json!({"full_attention": rope.take(), "sliding_attention": plain});
    }
}
