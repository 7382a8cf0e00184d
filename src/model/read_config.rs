//! Reads a Hugging Face `config.json`.
//!
//! Rejects settings that this library would compute differently from transformers, and names the
//! key. Defaults are those of transformers' configuration classes.

use std::path::Path;

use serde_json::{Map, Value};

use super::config::LABELS;
use super::keys::{Keys, read_object};
use super::read_rope::rope;
use super::{Dtype, Family, Head, ModelConfig, ModelError};

/// Largest sizes accepted: far above any model's, and small enough that no product overflows.
const WIDEST: usize = 1 << 20;
const MOST_HEADS: usize = 1 << 16;
const MOST_LAYERS: usize = 1 << 12;
const MOST_POSITIONS: usize = 1 << 30;
const LARGEST_VOCABULARY: usize = 1 << 24;

impl ModelConfig {
    /// Reads `config.json` of `dir`. Token ids in `generation_config.json` take precedence, as in
    /// transformers.
    pub fn from_dir(dir: &Path) -> Result<Self, ModelError> {
        let path = dir.join("config.json");
        let mut config = Self::from_json(&path, &read_object(&path)?)?;
        let path = dir.join("generation_config.json");
        if path.exists() {
            let map = read_object(&path)?;
            let keys = Keys { path: &path, map: &map, family: config.family.model_type() };
            let eos = keys.token_ids("eos_token_id")?;
            if !eos.is_empty() {
                config.eos_token_ids = eos;
            }
            config.pad_token_id = keys.token_ids("pad_token_id")?.first().copied().or(config.pad_token_id);
        }
        Ok(config)
    }

    /// Reads the object of a `config.json`; `path` is named in errors. Pure.
    pub fn from_json(path: &Path, map: &Map<String, Value>) -> Result<Self, ModelError> {
        let keys = Keys { path, map, family: "language" };
        let model_type: String = keys.required("model_type", "a string")?;
        let known = || Family::ALL.map(Family::model_type).join(", ");
        let family = Family::named(&model_type).ok_or_else(|| keys.unsupported("model_type", &known()))?;
        let keys = Keys { family: family.model_type(), ..keys };
        refuse_unsupported(&keys)?;
        super::family::check_windows(&keys)?;
        let config = (family.definition().read)(&keys, read_as_llama(&keys, family)?)?;
        config.check(path)?;
        let known = config.to_json();
        let is_label = |key: &String| LABELS.contains(&key.as_str());
        let is_other = |key: &String| is_label(key) || !known.contains_key(key) && key != "rope_scaling" && key != "rope_theta";
        let other = map.iter().filter(|(key, _)| is_other(key)).map(|(key, value)| (key.clone(), value.clone())).collect();
        Ok(ModelConfig { other, ..config })
    }
}

/// Reads the keys that all families share, with the family's defaults and Llama's biases.
fn read_as_llama(keys: &Keys, family: Family) -> Result<ModelConfig, ModelError> {
    let defaults = family.definition();
    let hidden_size = keys.size("hidden_size", WIDEST)?;
    let heads = keys.size("num_attention_heads", MOST_HEADS)?;
    let kv_heads = match keys.map.get("num_key_value_heads") {
        None if !defaults.kv_heads_optional => return Err(keys.missing("num_key_value_heads")),
        None | Some(Value::Null) => heads,
        Some(_) => keys.size("num_key_value_heads", MOST_HEADS)?,
    };
    let absent_head_dim = defaults.head_dim.filter(|_| !keys.map.contains_key("head_dim"));
    let head_dim = keys.optional("head_dim", "a positive integer")?.or(absent_head_dim).unwrap_or(hidden_size / heads);
    let attention_bias = keys.flag("attention_bias")?.unwrap_or(false);
    let mlp_bias = keys.flag("mlp_bias")?.unwrap_or(false);
    let layers = keys.size("num_hidden_layers", MOST_LAYERS)?;
    let max_positions = keys.size("max_position_embeddings", MOST_POSITIONS)?;
    let (rope_theta, rope_scaling) = rope(keys, defaults, max_positions)?;
    Ok(ModelConfig {
        family,
        head: head(keys)?,
        vocab_size: keys.size("vocab_size", LARGEST_VOCABULARY)?,
        hidden_size,
        intermediate_size: keys.size("intermediate_size", WIDEST)?,
        heads,
        kv_heads,
        head_dim,
        max_positions,
        rms_norm_eps: keys.optional("rms_norm_eps", "a number")?.unwrap_or(defaults.rms_norm_eps),
        rope_theta,
        rope_scaling,
        windows: vec![None; layers],
        unrotated: Vec::new(),
        embedding_multiplier: 1.0,
        residual_multiplier: 1.0,
        attention_multiplier: None,
        logits_scaling: 1.0,
        qkv_bias: attention_bias,
        output_bias: attention_bias,
        mlp_bias,
        tied: keys.flag("tie_word_embeddings")?.unwrap_or(defaults.tied),
        initializer_range: keys.optional("initializer_range", "a number")?.unwrap_or(0.02),
        dtype: dtype(keys)?,
        eos_token_ids: keys.token_ids("eos_token_id")?,
        pad_token_id: keys.token_ids("pad_token_id")?.first().copied(),
        other: Map::new(),
    })
}

/// Rejects keys that change the computation in ways that are not implemented.
fn refuse_unsupported(keys: &Keys) -> Result<(), ModelError> {
    if keys.optional::<String>("hidden_act", "a string")?.is_some_and(|name| name != "silu") {
        return Err(keys.unsupported("hidden_act", "silu"));
    }
    for key in ["attention_dropout", "resid_pdrop", "embd_pdrop"] {
        if keys.optional::<f64>(key, "a number")?.is_some_and(|rate| rate != 0.0) {
            return Err(keys.unsupported(key, "0.0"));
        }
    }
    if keys.map.get("clip_qkv").is_some_and(|value| !value.is_null()) {
        return Err(keys.unsupported("clip_qkv", "null"));
    }
    match keys.map.get("quantization_config") {
        None | Some(Value::Null) => Ok(()),
        Some(_) => Err(keys.unsupported("quantization_config", "unquantised weights (f32, f16, bf16)")),
    }
}

/// Head of the model: a language model's, unless the architecture is a classifier with one label.
fn head(keys: &Keys) -> Result<Head, ModelError> {
    let architectures = keys.optional::<Vec<String>>("architectures", "a list of strings")?.unwrap_or_default();
    if !architectures.iter().any(|name| name.ends_with(Head::Score.architecture())) {
        return Ok(Head::LanguageModel);
    }
    let labels = keys.optional::<Map<String, Value>>("id2label", "an object")?.map(|labels| labels.len());
    let (key, labels) = match (labels, keys.optional::<usize>("num_labels", "a positive integer")?) {
        (None, Some(labels)) => ("num_labels", Some(labels)),
        (labels, _) => ("id2label", labels),
    };
    match labels {
        Some(1) => Ok(Head::Score),
        Some(_) => Err(keys.unsupported(key, "one label, whose score is the answer's")),
        // Left out, it means two labels to transformers.
        None => Err(keys.missing(key)),
    }
}

/// Format named by the configuration. [`load_hf`](super::load_hf) takes it from the tensors
/// instead.
fn dtype(keys: &Keys) -> Result<Dtype, ModelError> {
    let said = keys.optional::<String>("dtype", "a string")?.or(keys.optional("torch_dtype", "a string")?);
    Ok(said.and_then(|name| Dtype::named(&name)).unwrap_or_default())
}
