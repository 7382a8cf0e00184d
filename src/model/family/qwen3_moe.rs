//! Qwen3-MoE: Qwen3 with a mixture of experts in most layers.

use serde_json::{Map, Value, json};

use super::{Definition, llama, mistral, qwen3, windows};
use crate::model::keys::Keys;
use crate::model::{ExpertLayer, Experts, ModelConfig, ModelError};

/// Largest number of experts.
const MOST: usize = 1 << 12;
const WIDEST: usize = 1 << 20;

pub(super) const DEFINITION: Definition = Definition {
    model_type: "qwen3_moe",
    class: "Qwen3Moe",
    head_dim: None,
    read: |keys, config| {
        let windows = vec![windows::used_sliding_window(keys, mistral::WINDOW)?; config.layers()];
        let width = keys.size("moe_intermediate_size", WIDEST)?;
        let dense_layers = dense_layers(keys, config.layers())?;
        let experts = Some(Experts { dense_layers, ..experts(keys, "num_experts", width)? });
        Ok(ModelConfig { windows, experts, mlp_bias: false, ..config })
    },
    write: |config, keys| {
        windows::write_used(config, keys);
        llama::write_attention_bias(config, keys);
        if let Some(of) = &config.experts {
            write_experts(of, keys);
            keys.insert("moe_intermediate_size".into(), of.width.into());
            keys.insert("mlp_only_layers".into(), json!(of.dense_layers));
            keys.insert("decoder_sparse_step".into(), 1.into());
        }
    },
    ..qwen3::DEFINITION
};

/// Experts of all layers, whose number has one of two names.
pub(super) fn experts(keys: &Keys, named: &str, width: usize) -> Result<Experts, ModelError> {
    let named = if keys.map.contains_key(named) { named } else { "num_local_experts" };
    let (count, per_token) = (keys.size(named, MOST)?, keys.size("num_experts_per_tok", MOST)?);
    if per_token > count {
        return Err(keys.bad("num_experts_per_tok", "at most the number of experts"));
    }
    let normalized = keys.flag("norm_topk_prob")?.unwrap_or(false);
    let layer = ExpertLayer::SwiGlu;
    Ok(Experts { count, per_token, width, normalized, dense_layers: Vec::new(), shared: None, layer })
}

/// Adds the keys of all mixtures.
pub(super) fn write_experts(of: &Experts, keys: &mut Map<String, Value>) {
    // The first is the name for readers of older versions.
    for key in ["num_experts", "num_local_experts"] {
        keys.insert(key.into(), of.count.into());
    }
    keys.insert("num_experts_per_tok".into(), of.per_token.into());
    keys.insert("norm_topk_prob".into(), of.normalized.into());
}

/// Layers without experts: those of `mlp_only_layers`, and all but every `decoder_sparse_step`-th.
fn dense_layers(keys: &Keys, layers: usize) -> Result<Vec<usize>, ModelError> {
    let listed = keys.optional::<Vec<usize>>("mlp_only_layers", "a list of layers")?.unwrap_or_default();
    let step = keys.positive("decoder_sparse_step", "a positive integer")?.unwrap_or(1);
    Ok((0..layers).filter(|layer| listed.contains(layer) || (layer + 1) % step != 0).collect())
}
