//! Qwen3.5, dense, text only: gated delta nets, and attention with gated outputs in every fourth layer.

use serde_json::{Map, Value};

use super::{Definition, QkNorm, llama};
use crate::model::keys::Keys;
use crate::model::{GatedDelta, ModelConfig, ModelError};

/// Largest sizes of the delta nets.
const WIDEST: usize = 1 << 16;

pub(super) const DEFINITION: Definition = Definition {
    model_type: "qwen3_5_text",
    class: "Qwen3_5",
    kv_heads_optional: false,
    head_dim: Some(256),
    norms_add_one: true,
    qk_norm: QkNorm::Heads,
    gates_attention: true,
    partial_rotation: Some(0.25),
    read: |keys, config| {
        let delta = Some(delta(keys, config.layers())?);
        Ok(ModelConfig { delta, mlp_bias: false, ..config })
    },
    write: |config, keys| {
        llama::write_attention_bias(config, keys);
        config.delta.iter().for_each(|of| write_delta(config, of, keys));
    },
    ..llama::DEFINITION
};

fn delta(keys: &Keys, layers: usize) -> Result<GatedDelta, ModelError> {
    let size = |key: &str, absent: usize| if keys.map.contains_key(key) { keys.size(key, WIDEST) } else { Ok(absent) };
    let (key_heads, value_heads) = (size("linear_num_key_heads", 16)?, size("linear_num_value_heads", 32)?);
    if !value_heads.is_multiple_of(key_heads) {
        return Err(keys.bad("linear_num_key_heads", "a divisor of linear_num_value_heads"));
    }
    let kernel = size("linear_conv_kernel_dim", 4)?;
    if kernel < 2 {
        return Err(keys.bad("linear_conv_kernel_dim", "2 or more"));
    }
    Ok(GatedDelta {
        layers: linear_layers(keys, layers)?,
        key_heads,
        value_heads,
        key_dim: size("linear_key_head_dim", 128)?,
        value_dim: size("linear_value_head_dim", 128)?,
        kernel,
    })
}

/// Layers of `layer_types` that are delta nets, or all but every `full_attention_interval`-th.
fn linear_layers(keys: &Keys, layers: usize) -> Result<Vec<usize>, ModelError> {
    let Some(types) = keys.optional::<Vec<String>>("layer_types", "a list of strings")? else {
        let interval = keys.positive("full_attention_interval", "a positive integer")?.unwrap_or(4);
        return Ok((0..layers).filter(|layer| (layer + 1) % interval != 0).collect());
    };
    if types.len() != layers {
        return Err(keys.bad("layer_types", "one entry for each of num_hidden_layers"));
    }
    if !types.iter().all(|kind| ["linear_attention", "full_attention"].contains(&kind.as_str())) {
        return Err(keys.unsupported("layer_types", "linear_attention, full_attention"));
    }
    Ok((0..layers).filter(|&layer| types[layer] == "linear_attention").collect())
}

fn write_delta(config: &ModelConfig, of: &GatedDelta, keys: &mut Map<String, Value>) {
    let kind = |layer| if of.layers.contains(&layer) { "linear_attention" } else { "full_attention" };
    let numbers = [
        ("linear_num_key_heads", of.key_heads),
        ("linear_num_value_heads", of.value_heads),
        ("linear_key_head_dim", of.key_dim),
        ("linear_value_head_dim", of.value_dim),
        ("linear_conv_kernel_dim", of.kernel),
    ];
    numbers.into_iter().for_each(|(key, number)| drop(keys.insert(key.into(), number.into())));
    keys.insert("layer_types".into(), (0..config.layers()).map(kind).collect());
}
