//! Reading a Hugging Face `config.json`.
//!
//! Refuses whatever this library would compute differently from transformers, and names the key. The defaults are those of
//! transformers' own configuration classes, for keys that a family's older folders leave out.

use std::path::Path;

use serde_json::{Map, Value};

use super::config::LABELS;
use super::keys::Keys;
use super::read_rope::rope;
use super::{Dtype, Factors, Family, Head, ModelConfig, ModelError};
use crate::util::reading;

/// The largest sizes that are read. They are far above any model's, and small enough that no product of them overflows.
const WIDEST: usize = 1 << 20;
const MOST_HEADS: usize = 1 << 16;
const MOST_LAYERS: usize = 1 << 12;
const MOST_POSITIONS: usize = 1 << 30;
const LARGEST_VOCABULARY: usize = 1 << 24;

/// `model_type` of every family.
const KNOWN: &str = "llama, qwen2, qwen3, mistral, ministral, phi3, granite, smollm3, internlm3, olmo2, olmo3";

impl ModelConfig {
    /// Reads `config.json` of `dir`, and the ids in its `generation_config.json`, which win, as they do in transformers.
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
        let family = Family::ALL.into_iter().find(|family| family.model_type() == model_type);
        let family = family.ok_or_else(|| keys.unsupported("model_type", KNOWN))?;
        let keys = Keys { family: family.model_type(), ..keys };
        refuse_unsupported(&keys)?;

        let hidden_size = keys.size("hidden_size", WIDEST)?;
        let heads = keys.size("num_attention_heads", MOST_HEADS)?;
        let one_each = matches!(family, Family::Llama | Family::Granite | Family::Phi3 | Family::Olmo2 | Family::Olmo3);
        let kv_heads = match map.get("num_key_value_heads") {
            None if !one_each => return Err(keys.missing("num_key_value_heads")),
            None | Some(Value::Null) => heads,
            Some(_) => keys.size("num_key_value_heads", MOST_HEADS)?,
        };
        let head_dim = match keys.optional::<usize>("head_dim", "a positive integer")? {
            Some(head_dim) => head_dim,
            None if matches!(family, Family::Qwen3 | Family::InternLm3) && !map.contains_key("head_dim") => 128,
            None => hidden_size / heads,
        };
        let flag = |key: &str| keys.optional::<bool>(key, "true or false");
        let (attention_bias, mlp_bias) = match family {
            // Its own names, and those of Llama's configuration.
            Family::InternLm3 => (flag("attention_bias")?.or(flag("qkv_bias")?), flag("mlp_bias")?.or(flag("bias")?)),
            _ => (flag("attention_bias")?, flag("mlp_bias")?),
        };
        let attention_bias = attention_bias.unwrap_or(false);
        let layers = keys.size("num_hidden_layers", MOST_LAYERS)?;
        let max_positions = keys.size("max_position_embeddings", MOST_POSITIONS)?;
        let (rope_theta, rope_scaling) = rope(&keys, family, max_positions)?;
        let unrotated = unrotated(&keys, family, layers)?;
        let config = ModelConfig {
            family,
            head: head(&keys)?,
            vocab_size: keys.size("vocab_size", LARGEST_VOCABULARY)?,
            hidden_size,
            intermediate_size: keys.size("intermediate_size", WIDEST)?,
            heads,
            kv_heads,
            head_dim,
            max_positions,
            rms_norm_eps: keys.optional("rms_norm_eps", "a number")?.unwrap_or(match family {
                Family::Phi3 | Family::InternLm3 | Family::Olmo2 | Family::Olmo3 => 1e-5,
                _ => 1e-6,
            }),
            rope_theta,
            rope_scaling,
            windows: windows(&keys, family, layers, &unrotated)?,
            unrotated,
            factors: factors(&keys, family)?,
            qkv_bias: family == Family::Qwen2 || family.biases_output() && attention_bias,
            output_bias: family.biases_output() && attention_bias,
            mlp_bias: family.may_bias_mlp() && mlp_bias.unwrap_or(false),
            tied: flag("tie_word_embeddings")?.unwrap_or(family == Family::SmolLm3),
            initializer_range: keys.optional("initializer_range", "a number")?.unwrap_or(0.02),
            dtype: dtype(&keys)?,
            eos_token_ids: keys.token_ids("eos_token_id")?,
            pad_token_id: keys.token_ids("pad_token_id")?.first().copied(),
            other: Map::new(),
        };
        config.check(path)?;
        let known = config.to_json();
        let is_label = |key: &String| LABELS.contains(&key.as_str());
        let is_other = |key: &String| is_label(key) || !known.contains_key(key) && key != "rope_scaling" && key != "rope_theta";
        let other = map.iter().filter(|(key, _)| is_other(key)).map(|(key, value)| (key.clone(), value.clone())).collect();
        Ok(ModelConfig { other, ..config })
    }
}

/// Reads a JSON object.
fn read_object(path: &Path) -> Result<Map<String, Value>, ModelError> {
    let text = reading::read_text(path).map_err(|source| ModelError::Io { path: path.into(), source })?;
    serde_json::from_str(&text).map_err(|error| ModelError::Json { path: path.into(), reason: error.to_string() })
}

/// Keys that change what transformers computes, in ways that nothing here follows.
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

/// Words, unless the architecture is a classifier's, which must have one label.
fn head(keys: &Keys) -> Result<Head, ModelError> {
    let architectures = keys.optional::<Vec<String>>("architectures", "a list of strings")?.unwrap_or_default();
    if !architectures.iter().any(|name| name.ends_with(Head::Score.architecture())) {
        return Ok(Head::Words);
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

/// What the tensors are said to be. A folder that is loaded says it by its tensors.
fn dtype(keys: &Keys) -> Result<Dtype, ModelError> {
    let said = keys.optional::<String>("dtype", "a string")?.or(keys.optional("torch_dtype", "a string")?);
    Ok(said.and_then(|name| Dtype::named(&name)).unwrap_or_default())
}

/// Granite's factors; 1 where transformers' configuration has it so.
fn factors(keys: &Keys, family: Family) -> Result<Factors, ModelError> {
    if family != Family::Granite {
        return Ok(Factors::ONE);
    }
    let factor = |key: &str| match keys.optional::<f64>(key, "a number")?.unwrap_or(1.0) {
        factor if factor > 0.0 && factor.is_finite() => Ok(factor),
        _ => Err(keys.bad(key, "a finite number > 0")),
    };
    Ok(Factors {
        embedding: factor("embedding_multiplier")?,
        residual: factor("residual_multiplier")?,
        attention: Some(factor("attention_multiplier")?),
        logits: factor("logits_scaling")?,
    })
}

/// SmolLM3's layers without rotation: a list of zeros and ones, or every so many.
fn unrotated(keys: &Keys, family: Family, layers: usize) -> Result<Vec<usize>, ModelError> {
    if family != Family::SmolLm3 {
        return Ok(Vec::new());
    }
    let Some(list) = keys.optional::<Vec<u8>>("no_rope_layers", "a list of zeros and ones")? else {
        return match keys.optional("no_rope_layer_interval", "a positive integer")?.unwrap_or(4) {
            0 => Err(keys.bad("no_rope_layer_interval", "a positive integer")),
            interval => Ok((0..layers).filter(|layer| (layer + 1) % interval == 0).collect()),
        };
    };
    if list.len() < layers {
        return Err(keys.bad("no_rope_layers", "an entry for each of num_hidden_layers"));
    }
    Ok((0..layers).filter(|&layer| list[layer] == 0).collect())
}

/// How far back each layer sees.
fn windows(keys: &Keys, family: Family, layers: usize, unrotated: &[usize]) -> Result<Vec<Option<usize>>, ModelError> {
    let window = match keys.optional::<usize>("sliding_window", "a positive integer or null")? {
        Some(0) => return Err(keys.bad("sliding_window", "a positive integer or null")),
        // transformers' default for these families' configurations that don't say.
        None if matches!(family, Family::Mistral | Family::Ministral | Family::Olmo3)
            && !keys.map.contains_key("sliding_window") =>
        {
            Some(4096)
        }
        window => window,
    };
    let by_use = matches!(family, Family::Qwen2 | Family::Qwen3 | Family::SmolLm3);
    let used = !by_use || keys.optional("use_sliding_window", "true or false")?.unwrap_or(false);
    let window = if used { window } else { None };
    let types = keys.optional::<Vec<String>>("layer_types", "a list of strings")?.filter(|_| family.has_layer_types());
    if let Some(types) = types {
        if types.len() != layers {
            return Err(keys.bad("layer_types", "one entry for each of num_hidden_layers"));
        }
        let of = |kind: &String| match (kind.as_str(), window) {
            ("full_attention", _) => Ok(None),
            ("sliding_attention", Some(window)) => Ok(Some(window)),
            ("sliding_attention", None) if by_use => {
                Err(keys.bad("layer_types", "no sliding_attention without use_sliding_window and sliding_window"))
            }
            ("sliding_attention", None) => Err(keys.bad("layer_types", "no sliding_attention without sliding_window")),
            _ => Err(keys.unsupported("layer_types", "full_attention, sliding_attention")),
        };
        return types.iter().map(of).collect();
    }
    let sees_window: Box<dyn Fn(usize) -> bool> = match family {
        Family::Llama | Family::Granite | Family::InternLm3 | Family::Olmo2 => Box::new(|_| false),
        Family::Mistral | Family::Ministral | Family::Phi3 => Box::new(|_| true),
        Family::Qwen2 | Family::Qwen3 => {
            let full = keys.optional("max_window_layers", "an integer")?.unwrap_or(28);
            Box::new(move |layer| layer >= full)
        }
        Family::SmolLm3 => Box::new(|layer| unrotated.contains(&layer)),
        Family::Olmo3 => Box::new(|layer| (layer + 1) % 4 != 0),
    };
    Ok((0..layers).map(|layer| window.filter(|_| sees_window(layer))).collect())
}
