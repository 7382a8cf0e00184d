//! OLMo 3: OLMo 2 with windows in three of four layers, whose rotary frequencies are not stretched.

use serde_json::{Map, Value};

use super::{Definition, llama, mistral, olmo2, windows};
use crate::model::ModelConfig;

/// Base of the rotary frequencies, if the configuration has none.
const BASE: f64 = 500_000.0;

pub(super) const DEFINITION: Definition = Definition {
    model_type: "olmo3",
    class: "Olmo3",
    rope_theta: BASE,
    rope_keys: windows::full_rope_keys,
    read: |keys, config| {
        let window = windows::sliding_window(keys, mistral::WINDOW)?;
        let windows = windows::by_layer(keys, config.layers(), window, |layer| (layer + 1) % 4 != 0)?;
        // transformers gives an outer `rope_theta` to full attention alone.
        let window_rope = windows::window_rope(keys, BASE, config.max_positions)?;
        Ok(ModelConfig { windows, window_rope, mlp_bias: false, ..config })
    },
    write,
    ..olmo2::DEFINITION
};

fn write(config: &ModelConfig, keys: &mut Map<String, Value>) {
    windows::write_by_layer(config, keys);
    llama::write_attention_bias(config, keys);
    windows::write_ropes(config, keys);
}
