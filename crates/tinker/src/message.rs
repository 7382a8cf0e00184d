//! Messages, as the JSON dialect writes them.

use std::collections::BTreeMap;

use serde::de::{Error, IgnoredAny};
use serde::{Deserialize, Deserializer, Serialize};

pub use crate::tensor::Tensor;
use crate::tensor::{JsonTensor, MOST_DENSE, dense};

/// One sequence of a pass.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Datum {
    /// Tokens that the model reads.
    pub model_input: ModelInput,
    /// Tensors of the loss, by name, with an entry per token: `target_tokens`, `weights`,
    /// `logprobs`, `advantages`.
    pub loss_fn_inputs: BTreeMap<String, Tensor>,
}

impl Datum {
    /// A sequence of text.
    pub fn new(tokens: Vec<i64>, inputs: impl IntoIterator<Item = (&'static str, Tensor)>) -> Self {
        let loss_fn_inputs = inputs.into_iter().map(|(name, tensor)| (name.to_owned(), tensor)).collect();
        Datum { model_input: ModelInput::text(tokens), loss_fn_inputs }
    }
}

/// Input of a model, in pieces.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ModelInput {
    /// The pieces, in order.
    pub chunks: Vec<Chunk>,
}

impl ModelInput {
    /// Text alone.
    pub fn text(tokens: Vec<i64>) -> Self {
        ModelInput { chunks: vec![Chunk { tokens: Some(tokens), kind: Some("encoded_text".to_owned()) }] }
    }

    /// The tokens of all pieces.
    ///
    /// # Errors
    /// The kind of a piece that is not text.
    pub fn tokens(&self) -> Result<Vec<i64>, String> {
        let mut tokens = Vec::new();
        for chunk in &self.chunks {
            match &chunk.tokens {
                Some(text) => tokens.extend_from_slice(text),
                None => return Err(chunk.kind.clone().unwrap_or_else(|| "unknown".to_owned())),
            }
        }
        Ok(tokens)
    }
}

/// A piece of a model's input.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Chunk {
    /// Tokens of a piece of text; `None` for other kinds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens: Option<Vec<i64>>,
    /// `encoded_text`, `image`, …
    #[serde(rename = "type", default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
}

/// A pass over sequences, whose gradient is added up unless it is only forward.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Pass {
    /// The model.
    pub model_id: String,
    /// Number of the operation.
    pub seq_id: u64,
    /// The sequences.
    pub data: Vec<Datum>,
    /// Name of the loss.
    pub loss_fn: String,
    /// Numbers of the loss, by name.
    pub loss_fn_config: BTreeMap<String, f64>,
    /// If true, no gradient is computed.
    pub forward_only: bool,
}

/// Data and loss of a pass in JSON.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PassInput {
    /// The sequences.
    #[serde(deserialize_with = "read_data")]
    pub data: Vec<Datum>,
    /// Name of the loss.
    pub loss_fn: String,
    /// Numbers of the loss, by name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_fn_config: Option<BTreeMap<String, f64>>,
}

/// Reads sequences, whose sparse tensors have one bound together.
fn read_data<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Datum>, D::Error> {
    #[derive(Deserialize)]
    struct JsonDatum {
        model_input: ModelInput,
        loss_fn_inputs: BTreeMap<String, JsonTensor>,
    }
    let mut room = MOST_DENSE;
    let datum = |JsonDatum { model_input, loss_fn_inputs }| -> Result<Datum, String> {
        Ok(Datum { model_input, loss_fn_inputs: dense(loss_fn_inputs, &mut room)? })
    };
    let data = Vec::<JsonDatum>::deserialize(deserializer)?;
    data.into_iter().map(datum).collect::<Result<_, _>>().map_err(D::Error::custom)
}

/// Answer to a pass.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PassOutput {
    /// Kind of the outputs.
    #[serde(default)]
    pub loss_fn_output_type: String,
    /// Tensors of each sequence, by name: `logprobs` among them.
    #[serde(deserialize_with = "read_outputs")]
    pub loss_fn_outputs: Vec<BTreeMap<String, Tensor>>,
    /// Numbers of the whole pass, each named with the way in which parts are combined: `loss:sum`.
    #[serde(default)]
    pub metrics: BTreeMap<String, f64>,
}

/// Reads the tensors of sequences, of which the sparse ones have one bound together.
fn read_outputs<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<BTreeMap<String, Tensor>>, D::Error> {
    let mut room = MOST_DENSE;
    let outputs = Vec::<BTreeMap<String, JsonTensor>>::deserialize(deserializer)?;
    outputs.into_iter().map(|tensors| dense(tensors, &mut room)).collect::<Result<_, _>>().map_err(D::Error::custom)
}

/// AdamW of one update. The defaults are the protocol's.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct AdamParams {
    /// Learning rate.
    pub learning_rate: f64,
    /// Decay rate of the first moment.
    pub beta1: f64,
    /// Decay rate of the second moment.
    pub beta2: f64,
    /// Against division by zero.
    pub eps: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Largest norm of the gradient; 0 does not clip.
    pub grad_clip_norm: f64,
}

impl Default for AdamParams {
    fn default() -> Self {
        AdamParams { learning_rate: 1e-4, beta1: 0.9, beta2: 0.95, eps: 1e-12, weight_decay: 0.0, grad_clip_norm: 0.0 }
    }
}

/// Adapters of a model.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LoraConfig {
    /// Rank; at 0 all weights are trained, by servers that do that.
    pub rank: usize,
    /// Seed of the first values; drawn if `None`.
    #[serde(default)]
    pub seed: Option<u64>,
    /// If true, the output head has an adapter.
    #[serde(default = "yes")]
    pub train_unembed: bool,
    /// If true, feed-forward layers have adapters.
    #[serde(default = "yes")]
    pub train_mlp: bool,
    /// If true, attention layers have adapters.
    #[serde(default = "yes")]
    pub train_attn: bool,
}

impl LoraConfig {
    /// Scale of adapters, for which the protocol has no setting.
    pub const ALPHA: f64 = 32.0;

    /// All weights of the model, without adapters.
    pub const WHOLE: LoraConfig = LoraConfig { rank: 0, seed: None, train_unembed: true, train_mlp: true, train_attn: true };
}

fn yes() -> bool {
    true
}

/// How completions are sampled.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SamplingParams {
    /// Most tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_tokens: Option<usize>,
    /// Seed; drawn if `None`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seed: Option<u64>,
    /// What ends a completion.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stop: Option<Stop>,
    /// Divisor of the logits; 1 if `None`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub temperature: Option<f32>,
    /// Likeliest tokens that are kept; all at -1, and if `None`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub top_k: Option<i64>,
    /// Probability mass that is kept; all if `None`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub top_p: Option<f32>,
}

/// What ends a completion: strings or tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Stop {
    /// Any of these tokens.
    Tokens(Vec<i64>),
    /// Any of these strings.
    Strings(Vec<String>),
    /// This string.
    One(String),
}

/// A request for samples of a prompt.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SampleRequest {
    /// Samples.
    #[serde(default = "one")]
    pub num_samples: usize,
    /// The prompt.
    pub prompt: ModelInput,
    /// How they are sampled.
    #[serde(default)]
    pub sampling_params: SamplingParams,
    /// The weights, by session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sampling_session_id: Option<String>,
    /// Number of the request in its session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seq_id: Option<u64>,
    /// The weights, by the name of a model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base_model: Option<String>,
    /// The weights, by their path.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model_path: Option<String>,
    /// If true, the prompt's tokens are scored, too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<bool>,
    /// Likeliest tokens that are reported at each position of the prompt.
    #[serde(default)]
    pub topk_prompt_logprobs: usize,
    /// Likeliest tokens that are reported at each sampled position.
    #[serde(default)]
    pub topk_sample_logprobs: usize,
    /// Tokens whose log-probabilities at the prompt's positions are wanted. Only read, never written.
    #[serde(default, skip_serializing)]
    pub target_prompt_logprobs: Option<IgnoredAny>,
    /// Tokens that are drawn at each position of the prompt.
    #[serde(default, skip_serializing)]
    pub prompt_alt_tokens_k: usize,
    /// `sample`.
    #[serde(rename = "type", default)]
    pub kind: String,
}

fn one() -> usize {
    1
}

/// One sample.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sequence {
    /// Why it ended.
    pub stop_reason: StopReason,
    /// Its tokens, the one that ended it included.
    pub tokens: Vec<i64>,
    /// Log-probability of each.
    #[serde(default)]
    pub logprobs: Option<Vec<f32>>,
    /// Likeliest tokens at the position of each, with their log-probabilities.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub topk_logprobs: Option<Vec<TopRow>>,
}

/// Why a sample ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StopReason {
    /// A stop token or string.
    Stop,
    /// The limit of its length.
    Length,
}

/// Likeliest tokens of a position with their log-probabilities; `None` if it has none.
pub type TopRow = Option<Vec<(i64, f32)>>;

/// Samples of a prompt.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SampleResponse {
    /// The samples.
    pub sequences: Vec<Sequence>,
    /// Log-probability of each token of the prompt, if asked for. The first has none.
    #[serde(default)]
    pub prompt_logprobs: Option<Vec<Option<f32>>>,
    /// Likeliest tokens at each position of the prompt, with their log-probabilities, if asked
    /// for. The first has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub topk_prompt_logprobs: Option<Vec<TopRow>>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_piece_of_input_without_tokens_is_named() {
        let input: ModelInput =
            serde_json::from_str(r#"{"chunks": [{"tokens": [1, 2]}, {"type": "image", "data": "…"}]}"#).unwrap();
        assert_eq!(input.tokens(), Err("image".to_owned()));
        assert_eq!(ModelInput::text(vec![3]).tokens(), Ok(vec![3]));
    }

    #[test]
    fn a_sample_ends_at_tokens_or_at_strings() {
        let read = |text: &str| serde_json::from_str::<SamplingParams>(text).unwrap().stop;
        assert_eq!(read(r#"{"stop": [1, 2]}"#), Some(Stop::Tokens(vec![1, 2])));
        assert_eq!(read(r#"{"stop": ["a"]}"#), Some(Stop::Strings(vec!["a".to_owned()])));
        assert_eq!(read(r#"{"stop": "a"}"#), Some(Stop::One("a".to_owned())));
        assert_eq!(read("{}"), None);
    }
}
