//! SmolLM3: no rotary embeddings in every fourth layer, and a tied head.

use super::{Definition, llama, windows};
use crate::model::keys::Keys;
use crate::model::{ModelConfig, ModelError};

pub(super) const DEFINITION: Definition = Definition {
    model_type: "smollm3",
    class: "SmolLM3",
    kv_heads_optional: false,
    rope_theta: 2_000_000.0,
    tied: true,
    pad: Some(128_004),
    read: |keys, config| {
        let (layers, window) = (config.layers(), windows::used_sliding_window(keys, None)?);
        let unrotated = unrotated(keys, layers)?;
        let windows = windows::by_layer(keys, layers, window, |layer| unrotated.contains(&layer))?;
        Ok(ModelConfig { windows, unrotated, ..config })
    },
    write: |config, keys| {
        windows::write_used(config, keys);
        llama::write_biases(config, keys);
        let rotated = (0..config.layers()).map(|layer| u8::from(!config.unrotated.contains(&layer)));
        keys.insert("no_rope_layers".into(), rotated.collect());
    },
    ..llama::DEFINITION
};

/// Layers without rotary embeddings: zeros of `no_rope_layers`, or one per `no_rope_layer_interval`.
fn unrotated(keys: &Keys, layers: usize) -> Result<Vec<usize>, ModelError> {
    let Some(list) = keys.optional::<Vec<u8>>("no_rope_layers", "a list of zeros and ones")? else {
        let interval = keys.positive("no_rope_layer_interval", "a positive integer")?.unwrap_or(4);
        return Ok((0..layers).filter(|layer| (layer + 1) % interval == 0).collect());
    };
    if list.len() < layers {
        return Err(keys.bad("no_rope_layers", "an entry for each of num_hidden_layers"));
    }
    Ok((0..layers).filter(|&layer| list[layer] == 0).collect())
}
