//! The shape of a decoder, and the Hugging Face `config.json` that tells it.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::ModelError;
use crate::data::packing;

/// The families of decoders that differ in biases, norms and windows only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// Llama 1 to 3.
    Llama,
    /// Qwen2 and Qwen2.5.
    Qwen2,
    /// Qwen3, dense.
    Qwen3,
    /// Mistral.
    Mistral,
}

impl Family {
    /// Every family.
    pub const ALL: [Family; 4] = [Family::Llama, Family::Qwen2, Family::Qwen3, Family::Mistral];

    /// `model_type` of its configurations.
    pub fn model_type(self) -> &'static str {
        match self {
            Family::Llama => "llama",
            Family::Qwen2 => "qwen2",
            Family::Qwen3 => "qwen3",
            Family::Mistral => "mistral",
        }
    }

    /// Its class in transformers.
    fn architecture(self, head: Head) -> String {
        let family = match self {
            Family::Llama => "Llama",
            Family::Qwen2 => "Qwen2",
            Family::Qwen3 => "Qwen3",
            Family::Mistral => "Mistral",
        };
        family.to_owned() + head.architecture()
    }
}

/// What a model says after a token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Head {
    /// How likely each next token is: a language model.
    #[default]
    Words,
    /// One number, from `score.weight`: a reward model or a critic, in transformers a sequence classifier with one label.
    Score,
}

impl Head {
    /// How the names of its classes in transformers end.
    pub(super) fn architecture(self) -> &'static str {
        match self {
            Head::Words => "ForCausalLM",
            Head::Score => "ForSequenceClassification",
        }
    }
}

/// Keys that name a classifier's labels. A folder's own are kept as they are.
pub(super) const LABELS: [&str; 3] = ["id2label", "label2id", "num_labels"];

/// How rotary frequencies are stretched for long contexts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    Default,
    /// All frequencies divided by one factor.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// Llama 3.1: low frequencies divided, high ones kept, a ramp between.
    Llama3 {
        /// Divisor of the low frequencies.
        factor: f64,
        /// Wavelengths above `original / low` are divided.
        low: f64,
        /// Wavelengths below `original / high` are kept.
        high: f64,
        /// Context length of the pre-training.
        original: f64,
    },
}

/// The shape of a decoder. Fields are plain data; [`ModelConfig::check`] says whether they fit together.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Which family.
    pub family: Family,
    /// Words or a score.
    pub head: Head,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the feed-forward layer.
    pub intermediate_size: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of a head; even.
    pub head_dim: usize,
    /// Longest sequence the model was made for.
    pub max_positions: usize,
    /// Added to the mean square in RMS norms.
    pub rms_norm_eps: f64,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Stretching of the rotary frequencies.
    pub rope_scaling: RopeScaling,
    /// One entry a layer: how many positions back it sees, itself included; `None`: all.
    pub windows: Vec<Option<usize>>,
    /// Biases on the query, key and value projections.
    pub qkv_bias: bool,
    /// Bias on the attention's output projection.
    pub output_bias: bool,
    /// Biases in the feed-forward layer.
    pub mlp_bias: bool,
    /// Whether the head that says words is the embedding.
    pub tied: bool,
    /// Standard deviation of fresh weights.
    pub initializer_range: f64,
    /// Tokens that end a text.
    pub eos_token_ids: Vec<u32>,
    /// Padding token.
    pub pad_token_id: Option<u32>,
    /// Keys of the file that say nothing about the computation; written back as they were.
    pub other: Map<String, Value>,
}

impl ModelConfig {
    /// How many transformer layers.
    pub fn layers(&self) -> usize {
        self.windows.len()
    }

    /// Whether the head has no weights of its own.
    pub fn shares_embedding(&self) -> bool {
        self.tied && self.head == Head::Words
    }

    /// The same body under a head that gives one number.
    pub fn scoring(&self) -> Self {
        let mut other = self.other.clone();
        LABELS.iter().for_each(|key| drop(other.remove(*key)));
        ModelConfig { head: Head::Score, other, ..self.clone() }
    }

    /// Whether queries and keys are normed per head.
    pub fn qk_norm(&self) -> bool {
        self.family == Family::Qwen3
    }

    /// What a pass over a sequence of so many tokens costs, in tokens that attend to none: matrices and attention, about.
    pub fn cost_of(&self, length: usize) -> f64 {
        packing::cost_of(length, 12.0 * self.hidden_size as f64)
    }

    /// Columns of the fused query, key and value projection.
    pub fn qkv_size(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Whether the numbers fit together; `path` is named in errors.
    pub fn check(&self, path: &Path) -> Result<(), ModelError> {
        let bad = |key: &str, found: String, expected: &str| {
            Err(ModelError::BadKey { path: PathBuf::from(path), key: key.into(), found, expected: expected.into() })
        };
        if !self.heads.is_multiple_of(self.kv_heads) {
            return bad("num_key_value_heads", self.kv_heads.to_string(), "a divisor of num_attention_heads");
        }
        if self.head_dim == 0 || !self.head_dim.is_multiple_of(2) {
            return bad("head_dim", self.head_dim.to_string(), "a positive even number, for rotary embeddings turn pairs");
        }
        if !(self.rms_norm_eps >= 0.0 && self.rms_norm_eps.is_finite()) {
            return bad("rms_norm_eps", self.rms_norm_eps.to_string(), "a finite number ≥ 0");
        }
        if !(self.rope_theta > 0.0 && self.rope_theta.is_finite()) {
            return bad("rope_theta", self.rope_theta.to_string(), "a finite number > 0");
        }
        let ids = self.eos_token_ids.iter().map(|&id| ("eos_token_id", id));
        for (key, id) in ids.chain(self.pad_token_id.map(|id| ("pad_token_id", id))) {
            if id as usize >= self.vocab_size {
                return bad(key, id.to_string(), "an id below vocab_size");
            }
        }
        Ok(())
    }

    /// The object of a `config.json` that transformers 4 and 5 load.
    pub fn to_json(&self) -> Map<String, Value> {
        let mut rope = match self.rope_scaling {
            RopeScaling::Default => json!({"rope_type": "default"}),
            RopeScaling::Linear { factor } => json!({"rope_type": "linear", "factor": factor}),
            RopeScaling::Llama3 { factor, low, high, original } => json!({"rope_type": "llama3", "factor": factor,
                "low_freq_factor": low, "high_freq_factor": high, "original_max_position_embeddings": original as u64}),
        };
        let rope_scaling = if self.rope_scaling == RopeScaling::Default { Value::Null } else { rope.clone() };
        rope["rope_theta"] = self.rope_theta.into();
        let window = self.windows.iter().flatten().next();
        let eos = match self.eos_token_ids.as_slice() {
            [] => Value::Null,
            [id] => json!(id),
            ids => json!(ids),
        };
        let mut keys = json!({
            "architectures": [self.family.architecture(self.head)],
            "model_type": self.family.model_type(),
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.layers(),
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": rope,
            "rope_theta": self.rope_theta,
            "rope_scaling": rope_scaling,
            "tie_word_embeddings": self.tied,
            "initializer_range": self.initializer_range,
            "eos_token_id": eos,
            "pad_token_id": self.pad_token_id,
            "dtype": "float32",
            "torch_dtype": "float32",
        });
        match self.family {
            Family::Llama => {
                keys["attention_bias"] = self.qkv_bias.into();
                keys["mlp_bias"] = self.mlp_bias.into();
            }
            Family::Mistral => keys["sliding_window"] = json!(window),
            Family::Qwen2 | Family::Qwen3 => {
                let kind = |window: &Option<usize>| if window.is_some() { "sliding_attention" } else { "full_attention" };
                keys["sliding_window"] = json!(window);
                keys["use_sliding_window"] = window.is_some().into();
                keys["layer_types"] = self.windows.iter().map(kind).collect();
                if self.family == Family::Qwen3 {
                    keys["attention_bias"] = self.qkv_bias.into();
                }
            }
        }
        if self.head == Head::Score {
            keys["id2label"] = json!({"0": "LABEL_0"});
            keys["label2id"] = json!({"LABEL_0": 0});
        }
        let Value::Object(mut keys) = keys else { unreachable!("json! of braces is an object") };
        keys.extend(self.other.clone());
        keys
    }
}
