//! Architecture of a decoder, as in a Hugging Face `config.json`.

use std::path::Path;

use serde::{Serialize, Serializer};
use serde_json::{Map, Value};
use tch::{Device, Kind};

use super::family::QkNorm;
use super::{Compute, Dtype, Experts, Family, GatedDelta, ModelError, fused};
use crate::data::{RouteShape, Tokenizer, packing};

/// Keys of a classifier's labels. A folder's own labels are kept.
pub(super) const LABELS: [&str; 3] = ["id2label", "label2id", "num_labels"];

/// Stretching of rotary frequencies for long contexts, with the keys of `rope_parameters`.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(tag = "rope_type", rename_all = "lowercase")]
pub enum RopeScaling {
    /// No stretching.
    #[default]
    Default,
    /// All frequencies divided by one factor.
    Linear {
        /// Divisor of the frequencies.
        factor: f64,
    },
    /// Llama 3.1: low frequencies divided, high ones kept, a ramp between.
    Llama3 {
        /// Divisor of the low frequencies.
        factor: f64,
        /// Wavelengths above the pre-training context over this number are divided.
        low_freq_factor: f64,
        /// Wavelengths below the pre-training context over this number are kept.
        high_freq_factor: f64,
        /// Positions in pre-training.
        #[serde(serialize_with = "whole")]
        original_max_position_embeddings: f64,
    },
    /// Dynamic NTK. Frequencies change only beyond `max_position_embeddings`, a length this library
    /// rejects.
    Dynamic {
        /// Factor of the context.
        factor: f64,
    },
    /// LongRoPE (Ding et al., 2024): a divisor for each frequency, by the context that the model is used with
    /// ([`ModelConfig::within`]).
    LongRope {
        /// Divisors of the frequencies in contexts up to that of pre-training.
        short_factor: Vec<f64>,
        /// Divisors in longer contexts.
        long_factor: Vec<f64>,
        /// Factor of rotated queries and keys.
        attention_factor: f64,
        /// Positions in pre-training.
        #[serde(serialize_with = "whole")]
        original_max_position_embeddings: f64,
        /// Positions with `long_factor`.
        #[serde(skip)]
        stretched: usize,
    },
    /// YaRN (Peng et al., 2023): a ramp over frequencies, and longer queries and keys. The ramp
    /// depends on each frequency's turns within the pre-training context.
    Yarn {
        /// Divisor of the low frequencies.
        factor: f64,
        /// Positions in pre-training.
        #[serde(serialize_with = "whole")]
        original_max_position_embeddings: f64,
        /// Frequencies that turn more often than this are kept.
        beta_fast: f64,
        /// Frequencies that turn less often than this are divided.
        beta_slow: f64,
        /// Factor of rotated queries and keys.
        attention_factor: f64,
        /// If true, the ramp starts and ends at whole columns.
        truncate: bool,
    },
}

fn whole<S: Serializer>(number: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u64(*number as u64)
}

/// Activation of a feed-forward layer's gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// x · sigmoid(x).
    Silu,
    /// GELU (Hendrycks and Gimpel, 2016), approximated by tanh.
    GeluTanh,
    /// GELU by the error function.
    Gelu,
}

impl Activation {
    const ALL: [Activation; 3] = [Activation::Silu, Activation::GeluTanh, Activation::Gelu];

    /// Name in a `config.json`.
    pub fn name(self) -> &'static str {
        ["silu", "gelu_pytorch_tanh", "gelu"][self as usize]
    }

    /// The activation of that name.
    pub(super) fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|activation| activation.name() == name)
    }
}

/// The largest product of heads and their width.
const WIDEST_ATTENTION: usize = 1 << 22;

/// Architecture of a decoder, as plain data. [`ModelConfig::check`] rejects inconsistent values.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Model family.
    pub family: Family,
    /// If true, the head gives one number per token, from `score.weight`: a reward model or critic,
    /// in transformers a sequence classifier with one label. If false, it gives the logits of the
    /// next token: a language model.
    pub scores: bool,
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
    /// Base and stretching of the rotary frequencies in layers with a window; `None`: as in the others.
    pub window_rope: Option<(f64, RopeScaling)>,
    /// Layers without rotary embeddings.
    pub unrotated: Vec<usize>,
    /// Activation of the feed-forward layer.
    pub activation: Activation,
    /// Factor of the embeddings: 1 but in Granite and Gemma.
    pub embedding_multiplier: f64,
    /// Factor of a branch's output.
    pub residual_multiplier: f64,
    /// Factor of query-key products; `None`: 1/√`head_dim`.
    pub attention_multiplier: Option<f64>,
    /// Divisor of the logits.
    pub logits_scaling: f64,
    /// Cap of attention scores: they become `cap · tanh(score / cap)` (Gemma 2).
    pub attention_cap: Option<f64>,
    /// The same for logits.
    pub logits_cap: Option<f64>,
    /// Bound of projected queries, keys and values (OLMoE).
    pub qkv_bound: Option<f64>,
    /// Share of a head's columns that is rotated.
    pub rotated: f64,
    /// Layers that are gated delta nets, if the family has any.
    pub delta: Option<GatedDelta>,
    /// Mixture of experts, if the family has one.
    pub experts: Option<Experts>,
    /// Biases on the query, key and value projections.
    pub qkv_bias: bool,
    /// Bias on the attention's output projection.
    pub output_bias: bool,
    /// Biases in the feed-forward layer.
    pub mlp_bias: bool,
    /// If true, a language model's head shares the embedding.
    pub tied: bool,
    /// Standard deviation of fresh weights.
    pub initializer_range: f64,
    /// Format of the folder's tensors, and default format of saved weights.
    pub dtype: Dtype,
    /// Tokens that end a text.
    pub eos_token_ids: Vec<u32>,
    /// Padding token, whose row of the embedding learns nothing from inputs, as in transformers.
    pub pad_token_id: Option<u32>,
    /// Keys of the file without effect on the computation; written back unchanged.
    pub other: Map<String, Value>,
    /// Keys of `generation_config.json` that `config.json` does not say, such as the maker's sampling; written
    /// back unchanged.
    pub generation: Map<String, Value>,
}

impl ModelConfig {
    /// A small Llama for `tokenizer`, for experiments: tied, four query heads, two key heads,
    /// feed-forward layers of three times the width. `hidden` must be a multiple of 8.
    pub fn small(tokenizer: &Tokenizer, hidden: usize, layers: usize) -> Self {
        ModelConfig {
            eos_token_ids: tokenizer.eos_token_ids().to_vec(),
            pad_token_id: tokenizer.pad_token_id(),
            ..ModelConfig::small_of(tokenizer.vocab_size(), hidden, layers)
        }
    }

    /// A small Llama with `vocab_size` tokens and no end token.
    pub(crate) fn small_of(vocab_size: usize, hidden: usize, layers: usize) -> Self {
        ModelConfig {
            family: Family::Llama,
            scores: false,
            vocab_size,
            hidden_size: hidden,
            intermediate_size: 3 * hidden,
            heads: 4,
            kv_heads: 2,
            head_dim: hidden / 4,
            max_positions: 2048,
            rms_norm_eps: 1e-6,
            rope_theta: 10_000.0,
            rope_scaling: RopeScaling::Default,
            windows: vec![None; layers],
            window_rope: None,
            unrotated: Vec::new(),
            activation: Activation::Silu,
            embedding_multiplier: 1.0,
            residual_multiplier: 1.0,
            attention_multiplier: None,
            logits_scaling: 1.0,
            attention_cap: None,
            logits_cap: None,
            qkv_bound: None,
            rotated: 1.0,
            delta: None,
            experts: None,
            qkv_bias: false,
            output_bias: false,
            mlp_bias: false,
            tied: true,
            initializer_range: 0.02,
            dtype: Dtype::F32,
            eos_token_ids: Vec::new(),
            pad_token_id: None,
            other: Map::new(),
            generation: Map::new(),
        }
    }

    /// Number of transformer layers.
    pub fn layers(&self) -> usize {
        self.windows.len()
    }

    /// Returns true if the head is the embedding.
    pub fn shares_embedding(&self) -> bool {
        self.tied && !self.scores
    }

    /// Replaces the head by a score head.
    pub fn scoring(&self) -> Self {
        let mut other = self.other.clone();
        LABELS.iter().for_each(|key| drop(other.remove(*key)));
        ModelConfig { scores: true, other, ..self.clone() }
    }

    /// Unties the head.
    pub fn untied(&self) -> Self {
        ModelConfig { tied: self.tied && !self.shares_embedding(), ..self.clone() }
    }

    /// Sizes of the query and the key norm; `None` if the family has no such norms.
    pub(crate) fn qk_norm_sizes(&self) -> Option<(usize, usize)> {
        match self.family.definition().qk_norm {
            QkNorm::None => None,
            QkNorm::Heads => Some((self.head_dim, self.head_dim)),
            QkNorm::Tokens => Some((self.heads * self.head_dim, self.kv_heads * self.head_dim)),
        }
    }

    /// How many of a layer's two branches have a norm of their output.
    pub(crate) fn norms_of_branches(&self) -> usize {
        self.family.definition().norms.iter().filter(|norms| norms.after.is_some()).count()
    }

    /// Context of pre-training, and the longest, of a model whose rotation depends on the context that it is
    /// used with ([`within`](Self::within)); `None` without LongRoPE.
    pub fn contexts(&self) -> Option<(usize, usize)> {
        match self.rope_scaling {
            RopeScaling::LongRope { original_max_position_embeddings, stretched, .. } => {
                Some((original_max_position_embeddings as usize, stretched))
            }
            _ => None,
        }
    }

    /// Whether LongRoPE rotates all sequences by its factors for long contexts.
    pub fn rotates_long(&self) -> bool {
        self.contexts().is_some_and(|(short, _)| self.max_positions > short)
    }

    /// The configuration for sequences of up to `context` tokens; `None` changes nothing. Beyond the context of
    /// pre-training, LongRoPE rotates all sequences by its factors for long contexts, short ones too, as vLLM
    /// does with `--max-model-len`. (transformers chooses by each batch's longest sequence, which would score
    /// the tokens of a short sequence in two ways.)
    ///
    /// # Errors
    /// A context beyond the longest, or any for a model without LongRoPE.
    pub fn within(self, context: Option<usize>) -> Result<Self, ModelError> {
        let Some(context) = context else { return Ok(self) };
        match self.contexts() {
            None => Err(ModelError::FixedContext(self.max_positions)),
            Some((_, longest)) if !(1..=longest).contains(&context) => Err(ModelError::Context(context, longest)),
            Some((short, _)) => Ok(ModelConfig { max_positions: context.max(short), ..self }),
        }
    }

    /// Columns of a head that are rotated.
    pub(super) fn rotated_columns(&self) -> usize {
        (self.head_dim as f64 * self.rotated) as usize
    }

    /// The gated delta net that a layer is, if it is one.
    pub fn delta_of(&self, layer: usize) -> Option<&GatedDelta> {
        self.delta.as_ref().filter(|delta| delta.layers.contains(&layer))
    }

    /// Bytes of a token in a cache of keys and values, experts that were recorded included.
    pub(crate) fn cached_bytes(&self, compute: Compute) -> u64 {
        let layers = (0..self.layers()).filter(|layer| self.delta_of(*layer).is_none()).count();
        let keys_values = layers * 2 * self.kv_heads * self.head_dim * compute.activations().0.elt_size_in_bytes();
        let routes = self.route_shape().map_or(0, |shape| 2 * shape.layers * shape.per_token);
        (keys_values + routes) as u64
    }

    /// The experts of a layer, if it has any.
    pub fn experts_of(&self, layer: usize) -> Option<&Experts> {
        self.experts.as_ref().filter(|experts| !experts.dense_layers.contains(&layer))
    }

    /// Number of layers with experts before this one; of all with `layers()`.
    pub fn sparse_before(&self, layer: usize) -> usize {
        (0..layer).filter(|&layer| self.experts_of(layer).is_some()).count()
    }

    /// Sizes of the experts of a sequence, if there are any.
    pub fn route_shape(&self) -> Option<RouteShape> {
        let (layers, per_token) = (self.sparse_before(self.layers()), self.experts.as_ref()?.per_token);
        (layers > 0).then_some(RouteShape { layers, per_token })
    }

    /// Width of what a token's feed-forward layers compute, in the widest layer.
    pub fn active_width(&self) -> usize {
        let widths = (0..self.layers()).map(|layer| self.experts_of(layer).map_or(self.intermediate_size, Experts::active_width));
        widths.max().unwrap_or(self.intermediate_size)
    }

    /// Returns true if no padding is computed there.
    pub(crate) fn is_packed_on(&self, compute: Compute) -> bool {
        let (kind, device) = compute.options();
        device == Device::Cpu || (self.delta.is_none() && self.flashes(kind, device))
    }

    /// Returns true if attention there is libtorch's flash attention.
    pub(super) fn flashes(&self, kind: Kind, device: Device) -> bool {
        self.attention_cap.is_none() && fused::flashes(self.head_dim, kind, device)
    }

    /// Returns true if a decoding step's attention there is our kernel.
    pub(super) fn attends_slots(&self, kind: Kind, device: Device) -> bool {
        fused::gpu::attends_slots(self.fused_heads(), self.head_dim, kind, device)
    }

    /// Returns true if attention has sinks.
    pub(crate) fn has_sinks(&self) -> bool {
        self.family.definition().sinks
    }

    /// Heads as the fused attention takes them.
    pub(super) fn fused_heads(&self) -> fused::Heads {
        let (queries, keys) = (self.heads as i64, self.kv_heads as i64);
        fused::Heads { queries, keys, scale: self.attention_scale(), cap: self.attention_cap }
    }

    /// Factor of query-key products.
    pub(super) fn attention_scale(&self) -> f64 {
        self.attention_multiplier.unwrap_or_else(|| 1.0 / (self.head_dim as f64).sqrt())
    }

    /// Base and stretching of a layer's rotary frequencies; `None` without rotary embeddings.
    pub(super) fn rope_of(&self, layer: usize) -> Option<(f64, RopeScaling)> {
        let own = self.window_rope.clone().filter(|_| self.windows[layer].is_some());
        (!self.unrotated.contains(&layer)).then(|| own.unwrap_or((self.rope_theta, self.rope_scaling.clone())))
    }

    /// Approximate cost of a pass over `length` tokens, in tokens without attention.
    pub fn cost_of(&self, length: usize) -> f64 {
        packing::cost_of(length, 12.0 * self.hidden_size as f64)
    }

    /// Rejects inconsistent values; errors name `path`.
    pub fn check(&self, path: &Path) -> Result<(), ModelError> {
        let attended = self.heads.checked_mul(self.head_dim).filter(|width| *width <= WIDEST_ATTENTION);
        let (kv_heads, dim, eps, theta) = (self.kv_heads, self.head_dim, self.rms_norm_eps, self.rope_theta);
        let is_even = dim > 0 && dim.is_multiple_of(2);
        let rules = [
            (
                self.heads.is_multiple_of(kv_heads),
                "num_key_value_heads",
                kv_heads.to_string(),
                "a divisor of num_attention_heads",
            ),
            (attended.is_some(), "head_dim", dim.to_string(), "at most 4194304 over num_attention_heads"),
            (is_even, "head_dim", dim.to_string(), "a positive even number, for rotary embeddings turn pairs"),
            (eps >= 0.0 && eps.is_finite(), "rms_norm_eps", eps.to_string(), "a finite number ≥ 0"),
            (
                self.rotated_columns().is_multiple_of(2) && (1..=dim).contains(&self.rotated_columns()),
                "partial_rotary_factor",
                self.rotated.to_string(),
                "a number from 0 to 1 that gives an even number of columns",
            ),
            (
                !matches!(&self.rope_scaling, RopeScaling::LongRope { short_factor, long_factor, .. }
                    if [short_factor, long_factor].iter().any(|factors| factors.len() != self.rotated_columns() / 2)),
                "short_factor",
                "a list of another length".to_owned(),
                "as many numbers in short_factor and long_factor as a head has pairs of rotated columns",
            ),
            (theta > 0.0 && theta.is_finite(), "rope_theta", theta.to_string(), "a finite number > 0"),
        ];
        let ids = self.eos_token_ids.iter().map(|&id| ("eos_token_id", id));
        let ids = ids.chain(self.pad_token_id.map(|id| ("pad_token_id", id)));
        let ids = ids.map(|(key, id)| ((id as usize) < self.vocab_size, key, id.to_string(), "an id below vocab_size"));
        match rules.into_iter().chain(ids).find(|(holds, ..)| !holds) {
            Some((_, key, found, expected)) => Err(ModelError::bad_key(path, key, found, expected)),
            None => Ok(()),
        }
    }
}
