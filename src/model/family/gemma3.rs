//! Gemma 3, text only: norms of queries and keys, and other rotary frequencies in layers with a window.

use serde_json::{Map, Value};

use super::{Definition, QkNorm, gemma, gemma2, mistral, windows};
use crate::model::ModelConfig;

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
    rope_keys: windows::full_rope_keys,
    qk_norm: QkNorm::Heads,
    read: |keys, config| {
        let window = windows::sliding_window(keys, mistral::WINDOW)?;
        let pattern = keys.positive("sliding_window_pattern", "a positive integer")?.unwrap_or(6);
        let windows = windows::by_layer(keys, config.layers(), window, |layer| (layer + 1) % pattern != 0)?;
        let base = keys.optional("rope_local_base_freq", "a number")?.unwrap_or(WINDOWED);
        let window_rope = windows::window_rope(keys, base, config.max_positions)?;
        let config = gemma2::capped(keys, ModelConfig { windows, window_rope, ..gemma::scaled(keys, config)? }, [None; 2])?;
        // transformers reads the cap of scores and does not apply it.
        Ok(ModelConfig { attention_cap: None, ..config })
    },
    write,
    ..gemma2::DEFINITION
};

fn write(config: &ModelConfig, keys: &mut Map<String, Value>) {
    gemma2::write(config, keys);
    // Read, and of no effect.
    keys.remove("attn_logit_softcapping");
    let base = config.window_rope.as_ref().map_or(WINDOWED, |(base, _)| *base);
    keys.insert("rope_local_base_freq".into(), base.into());
    windows::write_ropes(config, keys);
}
