//! Reads and writes a Hugging Face `config.json`.
//!
//! Rejects settings that this library would compute differently from transformers, and names the
//! key. Defaults are those of transformers' configuration classes.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::config::LABELS;
use super::family::{CLASSIFIER, Definition};
use super::keys::{Keys, read_object};
use super::read_rope::{rope, with_one_rope};
use super::{Activation, Dtype, Family, ModelConfig, ModelError, RopeScaling};

/// Largest sizes accepted: far above any model's, and small enough that no product overflows.
const WIDEST: usize = 1 << 20;
const MOST_HEADS: usize = 1 << 16;
const MOST_LAYERS: usize = 1 << 12;
const MOST_POSITIONS: usize = 1 << 30;
const LARGEST_VOCABULARY: usize = 1 << 24;

/// Key of the tokens that end a text.
const EOS: &str = "eos_token_id";
/// Keys of tokens that both files may have.
const SPECIAL_TOKENS: [&str; 3] = ["bos_token_id", EOS, "pad_token_id"];

impl ModelConfig {
    /// Reads `config.json` of `dir`. Tokens that end a text are those of `generation_config.json`, if it has
    /// some, as in transformers.
    pub fn from_dir(dir: &Path) -> Result<Self, ModelError> {
        let path = dir.join("config.json");
        let mut config = Self::from_json(&path, &read_object(&path)?)?;
        let path = dir.join("generation_config.json");
        if path.exists() {
            let mut map = read_object(&path)?;
            let keys = Keys { path: &path, map: &map, family: config.family.model_type() };
            let eos = keys.token_ids(EOS)?;
            if !eos.is_empty() {
                config.eos_token_ids = eos;
            }
            let json = config.to_json();
            map.retain(|key, value| key != EOS && !(SPECIAL_TOKENS.contains(&key.as_str()) && json.get(key) == Some(value)));
            config.generation = map;
        }
        Ok(config)
    }

    /// Reads the object of a `config.json`; `path` is named in errors. Pure.
    ///
    /// Of a model that also takes images, it is the configuration of the language model.
    pub fn from_json(path: &Path, map: &Map<String, Value>) -> Result<Self, ModelError> {
        let text = language_model(map);
        let map = text.as_ref().unwrap_or(map);
        let keys = Keys { path, map, family: "language" };
        let model_type: String = keys.required("model_type", "a string")?;
        let known = || Family::ALL.map(Family::model_type).join(", ");
        let family = Family::named(&model_type).ok_or_else(|| keys.unsupported("model_type", &known()))?;
        let whole = with_absent(map, family.definition());
        let map = whole.as_ref().unwrap_or(map);
        let keys = Keys { family: family.model_type(), map, ..keys };
        let joined = with_one_rope(&keys)?;
        let map = joined.as_ref().unwrap_or(map);
        let keys = Keys { map, ..keys };
        refuse_unsupported(&keys)?;
        super::family::check_windows(&keys)?;
        let config = (family.definition().read)(&keys, read_as_llama(&keys, family)?)?;
        config.check(path)?;
        let known = config.to_json();
        let is_label = |key: &String| LABELS.contains(&key.as_str());
        let is_stored =
            |key: &String| key == QUANTISATION || known.contains_key(key) || key == "rope_scaling" || key == "rope_theta";
        let is_other = |key: &String| is_label(key) || !is_stored(key);
        let other = map.iter().filter(|(key, _)| is_other(key)).map(|(key, value)| (key.clone(), value.clone())).collect();
        Ok(ModelConfig { other, ..config })
    }

    /// The key and the rate of a dropout that its folder asks for in training, where nothing is dropped out.
    pub(crate) fn dropout(&self) -> Option<(&'static str, f64)> {
        DROPOUT.into_iter().find_map(|key| Some((key, self.other.get(key)?.as_f64().filter(|rate| *rate != 0.0)?)))
    }

    /// The object of a `generation_config.json`: the maker's, with the ids that `config.json` has.
    pub(super) fn to_generation_json(&self) -> Map<String, Value> {
        let (mut generation, json) = (self.generation.clone(), self.to_json());
        for key in SPECIAL_TOKENS {
            if let (false, Some(id)) = (generation.contains_key(key), json.get(key).filter(|id| !id.is_null())) {
                generation.insert(key.to_owned(), id.clone());
            }
        }
        generation
    }

    /// The object of a `config.json` that transformers 4 and 5 load.
    pub fn to_json(&self) -> Map<String, Value> {
        let mut rope = json!(self.rope_scaling);
        let rope_scaling = if self.rope_scaling == RopeScaling::Default { Value::Null } else { rope.clone() };
        rope["rope_theta"] = self.rope_theta.into();
        if self.family.definition().partial_rotation.is_some() {
            rope["partial_rotary_factor"] = self.rotated.into();
        }
        let eos = match self.eos_token_ids.as_slice() {
            [] => Value::Null,
            [id] => json!(id),
            ids => json!(ids),
        };
        let keys = json!({
            "architectures": [self.family.architecture(self.scores)],
            "model_type": self.family.model_type(),
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.layers(),
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": match &self.rope_scaling {
                RopeScaling::LongRope { stretched, .. } => *stretched,
                _ => self.max_positions,
            },
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": rope,
            "rope_theta": self.rope_theta,
            "rope_scaling": rope_scaling,
            "tie_word_embeddings": self.tied,
            "initializer_range": self.initializer_range,
            "eos_token_id": eos,
            "pad_token_id": self.pad_token_id,
            "dtype": self.dtype.name(),
            "torch_dtype": self.dtype.name(),
        });
        let Value::Object(mut keys) = keys else { unreachable!("json! of braces is an object") };
        keys.insert(self.family.definition().activation.0.into(), self.activation.name().into());
        if self.family.definition().partial_rotation.is_some() {
            // Also outside: transformers reads no `rope_parameters` where there is `rope_scaling`.
            keys.insert("partial_rotary_factor".into(), self.rotated.into());
        }
        (self.family.definition().write)(self, &mut keys);
        if self.scores {
            keys.insert("id2label".into(), json!({"0": "LABEL_0"}));
            keys.insert("label2id".into(), json!({"LABEL_0": 0}));
        }
        keys.extend(self.other.clone());
        keys
    }
}

/// The configuration of the language model inside that of a model that also takes images, with the keys that
/// stand outside for both.
fn language_model(map: &Map<String, Value>) -> Option<Map<String, Value>> {
    let mut text = map.get("text_config")?.as_object()?.clone();
    for key in ["tie_word_embeddings", "eos_token_id", "pad_token_id", "bos_token_id", "dtype", "torch_dtype"] {
        if let (false, Some(value)) = (text.contains_key(key), map.get(key)) {
            text.insert(key.to_owned(), value.clone());
        }
    }
    Some(text)
}

/// Adds the sizes that a configuration of the family may leave out; `None` if it has all.
fn with_absent(map: &Map<String, Value>, of: &Definition) -> Option<Map<String, Value>> {
    let absent = || of.absent.iter().filter(|(key, _)| !map.contains_key(*key));
    let added = absent().map(|(key, size)| ((*key).to_owned(), Value::from(*size)));
    absent().next().is_some().then(|| map.clone().into_iter().chain(added).collect())
}

/// Reads the keys that all families share, with the family's defaults and Llama's biases.
fn read_as_llama(keys: &Keys, family: Family) -> Result<ModelConfig, ModelError> {
    let defaults = family.definition();
    let (vocab_size, hidden_size) = (keys.size("vocab_size", LARGEST_VOCABULARY)?, keys.size("hidden_size", WIDEST)?);
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
    let (rope_theta, rope_scaling, rotated) = rope(keys, defaults, max_positions)?;
    let max_positions = match &rope_scaling {
        RopeScaling::LongRope { original_max_position_embeddings, .. } => *original_max_position_embeddings as usize,
        _ => max_positions,
    };
    Ok(ModelConfig {
        family,
        scores: scores(keys)?,
        activation: activation(keys, defaults)?,
        intermediate_size: keys.size("intermediate_size", WIDEST)?,
        heads,
        kv_heads,
        head_dim,
        max_positions,
        rms_norm_eps: keys.optional("rms_norm_eps", "a number")?.unwrap_or(defaults.rms_norm_eps),
        rope_theta,
        rope_scaling,
        rotated,
        qkv_bias: attention_bias,
        output_bias: attention_bias,
        mlp_bias,
        tied: keys.flag("tie_word_embeddings")?.unwrap_or(defaults.tied),
        initializer_range: keys.optional("initializer_range", "a number")?.unwrap_or(0.02),
        dtype: dtype(keys)?,
        eos_token_ids: keys.token_ids(EOS)?,
        pad_token_id: match keys.map.contains_key("pad_token_id") {
            true => keys.token_ids("pad_token_id")?.first().copied(),
            false => defaults.pad.filter(|id| (*id as usize) < vocab_size),
        },
        ..ModelConfig::small_of(vocab_size, hidden_size, layers)
    })
}

/// The feed-forward layer's activation. Only Gemma's are known with GELU.
fn activation(keys: &Keys, defaults: &Definition) -> Result<Activation, ModelError> {
    let (key, default) = defaults.activation;
    let Some(name) = keys.optional::<String>(key, "a string")? else { return Ok(default) };
    let (known, expected) = match default {
        Activation::Silu => ([Activation::Silu].as_slice(), "silu"),
        _ => ([Activation::GeluTanh, Activation::Gelu].as_slice(), "gelu_pytorch_tanh, gelu"),
    };
    Activation::named(&name).filter(|found| known.contains(found)).ok_or_else(|| keys.unsupported(key, expected))
}

/// How a folder's weights are stored, which files say, too; a model that is saved has whole numbers.
const QUANTISATION: &str = "quantization_config";

const BITSANDBYTES: &str = "bitsandbytes";

/// Returns true if a model's folder says that it is in bitsandbytes' 4 bits.
pub(super) fn says_4_bits(dir: &Path) -> bool {
    read_object(&dir.join("config.json"))
        .is_ok_and(|map| map.get(QUANTISATION).is_some_and(|of| of["quant_method"] == BITSANDBYTES))
}

/// Shares of numbers that training may drop, which no pass here does.
const DROPOUT: [&str; 3] = ["attention_dropout", "resid_pdrop", "embd_pdrop"];

/// Rejects keys that change the computation in ways that are not implemented.
fn refuse_unsupported(keys: &Keys) -> Result<(), ModelError> {
    for key in DROPOUT {
        keys.optional::<f64>(key, "a number")?;
    }
    // Only OLMoE's is known.
    if keys.map.get("clip_qkv").is_some_and(|value| !value.is_null()) && keys.family != Family::Olmoe.model_type() {
        return Err(keys.unsupported("clip_qkv", "null, in this family"));
    }
    match keys.map.get(QUANTISATION) {
        None | Some(Value::Null) => Ok(()),
        Some(of) if of["quant_method"] == BITSANDBYTES && of["load_in_4bit"] == true => Ok(()),
        Some(of) if of["quant_method"] == "mxfp4" && keys.family == Family::GptOss.model_type() => Ok(()),
        Some(_) => {
            let supported = "weights in f32, f16 or bf16, in 4 bits by bitsandbytes, or gpt-oss's in MXFP4";
            Err(keys.unsupported(QUANTISATION, supported))
        }
    }
}

/// Returns true if the architecture is a classifier with one label.
fn scores(keys: &Keys) -> Result<bool, ModelError> {
    let architectures = keys.optional::<Vec<String>>("architectures", "a list of strings")?.unwrap_or_default();
    if !architectures.iter().any(|name| name.ends_with(CLASSIFIER)) {
        return Ok(false);
    }
    let labels = keys.optional::<Map<String, Value>>("id2label", "an object")?.map(|labels| labels.len());
    let (key, labels) = match (labels, keys.optional::<usize>("num_labels", "a positive integer")?) {
        (None, Some(labels)) => ("num_labels", Some(labels)),
        (labels, _) => ("id2label", labels),
    };
    match labels {
        Some(1) => Ok(true),
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
