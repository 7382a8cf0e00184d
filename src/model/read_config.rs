//! Reading a Hugging Face `config.json`.
//!
//! Refuses whatever this library would compute differently from transformers, and names the key. The defaults are those of
//! transformers' own configuration classes, for keys that a family's older folders leave out.

use std::path::Path;

use serde_json::{Map, Value};

use super::config::LABELS;
use super::keys::Keys;
use super::{Family, Head, ModelConfig, ModelError, RopeScaling};

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
        let family = family.ok_or_else(|| keys.unsupported("model_type", "llama, qwen2, qwen3, mistral"))?;
        let keys = Keys { family: family.model_type(), ..keys };
        refuse_unsupported(&keys)?;

        let hidden_size = keys.positive("hidden_size")?;
        let heads = keys.positive("num_attention_heads")?;
        let kv_heads = match map.get("num_key_value_heads") {
            None if family != Family::Llama => return Err(keys.missing("num_key_value_heads")),
            None | Some(Value::Null) => heads,
            Some(_) => keys.positive("num_key_value_heads")?,
        };
        let head_dim = match keys.optional::<usize>("head_dim", "a positive integer")? {
            Some(head_dim) => head_dim,
            None if family == Family::Qwen3 => 128,
            None => hidden_size / heads,
        };
        let attention_bias = keys.optional("attention_bias", "true or false")?.unwrap_or(false);
        let layers = keys.positive("num_hidden_layers")?;
        let max_positions = keys.positive("max_position_embeddings")?;
        let (rope_theta, rope_scaling) = rope(&keys, max_positions)?;
        let config = ModelConfig {
            family,
            head: head(&keys)?,
            vocab_size: keys.positive("vocab_size")?,
            hidden_size,
            intermediate_size: keys.positive("intermediate_size")?,
            heads,
            kv_heads,
            head_dim,
            max_positions,
            rms_norm_eps: keys.optional("rms_norm_eps", "a number")?.unwrap_or(1e-6),
            rope_theta,
            rope_scaling,
            windows: windows(&keys, family, layers)?,
            qkv_bias: match family {
                Family::Qwen2 => true,
                Family::Llama | Family::Qwen3 => attention_bias,
                Family::Mistral => false,
            },
            output_bias: matches!(family, Family::Llama | Family::Qwen3) && attention_bias,
            mlp_bias: family == Family::Llama && keys.optional("mlp_bias", "true or false")?.unwrap_or(false),
            tied: keys.optional("tie_word_embeddings", "true or false")?.unwrap_or(false),
            initializer_range: keys.optional("initializer_range", "a number")?.unwrap_or(0.02),
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
    let text = std::fs::read_to_string(path).map_err(|source| ModelError::Io { path: path.into(), source })?;
    serde_json::from_str(&text).map_err(|error| ModelError::Json { path: path.into(), reason: error.to_string() })
}

/// Keys that change what transformers computes, in ways that nothing here follows.
fn refuse_unsupported(keys: &Keys) -> Result<(), ModelError> {
    if keys.optional::<String>("hidden_act", "a string")?.is_some_and(|name| name != "silu") {
        return Err(keys.unsupported("hidden_act", "silu"));
    }
    if keys.optional::<f64>("attention_dropout", "a number")?.is_some_and(|rate| rate != 0.0) {
        return Err(keys.unsupported("attention_dropout", "0.0"));
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

/// Theta and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).
fn rope(keys: &Keys, max_positions: usize) -> Result<(f64, RopeScaling), ModelError> {
    let outer_theta = keys.optional::<f64>("rope_theta", "a number")?;
    let name = ["rope_parameters", "rope_scaling"].into_iter().find(|name| keys.map.get(*name).is_some_and(|v| !v.is_null()));
    let Some(name) = name else { return Ok((outer_theta.unwrap_or(10_000.0), RopeScaling::Default)) };
    let map = keys.map[name].as_object().ok_or_else(|| keys.bad(name, "an object"))?;
    let rope = Keys { map, ..*keys };
    let number = |key: &str| rope.required::<f64>(key, "a number");
    let theta = rope.optional("rope_theta", "a number")?.or(outer_theta).unwrap_or(10_000.0);
    if rope.optional::<f64>("partial_rotary_factor", "a number")?.is_some_and(|part| part != 1.0) {
        return Err(rope.unsupported("partial_rotary_factor", "1.0"));
    }
    let type_key = if map.contains_key("rope_type") { "rope_type" } else { "type" };
    let scaling = match rope.optional::<String>(type_key, "a string")?.as_deref() {
        None | Some("default") => RopeScaling::Default,
        Some("linear") => RopeScaling::Linear { factor: number("factor")? },
        Some("llama3") => RopeScaling::Llama3 {
            factor: number("factor")?,
            low: number("low_freq_factor")?,
            high: number("high_freq_factor")?,
            original: rope.optional("original_max_position_embeddings", "a number")?.unwrap_or(max_positions as f64),
        },
        Some(_) => return Err(rope.unsupported(type_key, "default, linear, llama3")),
    };
    Ok((theta, scaling))
}

/// How far back each layer sees.
fn windows(keys: &Keys, family: Family, layers: usize) -> Result<Vec<Option<usize>>, ModelError> {
    let window = match keys.optional::<usize>("sliding_window", "a positive integer or null")? {
        Some(0) => return Err(keys.bad("sliding_window", "a positive integer or null")),
        window => window,
    };
    match family {
        Family::Llama => Ok(vec![None; layers]),
        // transformers' default for a Mistral configuration that doesn't say.
        Family::Mistral if !keys.map.contains_key("sliding_window") => Ok(vec![Some(4096); layers]),
        Family::Mistral => Ok(vec![window; layers]),
        Family::Qwen2 | Family::Qwen3 => {
            let used = keys.optional("use_sliding_window", "true or false")?.unwrap_or(false);
            let window = if used { window } else { None };
            if let Some(types) = keys.optional::<Vec<String>>("layer_types", "a list of strings")? {
                if types.len() != layers {
                    return Err(keys.bad("layer_types", "one entry for each of num_hidden_layers"));
                }
                let of = |kind: &String| match (kind.as_str(), window) {
                    ("full_attention", _) => Ok(None),
                    ("sliding_attention", Some(window)) => Ok(Some(window)),
                    ("sliding_attention", None) => {
                        Err(keys.bad("layer_types", "no sliding_attention without use_sliding_window and sliding_window"))
                    }
                    _ => Err(keys.unsupported("layer_types", "full_attention, sliding_attention")),
                };
                return types.iter().map(of).collect();
            }
            let full = keys.optional("max_window_layers", "an integer")?.unwrap_or(28);
            Ok((0..layers).map(|layer| if layer >= full { window } else { None }).collect())
        }
    }
}
