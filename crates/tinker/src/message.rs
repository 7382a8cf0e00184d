//! Messages, as the JSON dialect writes them.

use std::collections::BTreeMap;

use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};

/// A dense tensor of one or two dimensions.
#[derive(Clone, Debug, PartialEq)]
pub enum Tensor {
    /// 32-bit floats.
    Floats(Vec<f32>),
    /// 64-bit integers.
    Ints(Vec<i64>),
    /// Rows of so many columns, which are at least 1, one after the other.
    Rows(usize, Box<Tensor>),
}

impl Tensor {
    /// A tensor with the entries of `flat` in this shape.
    ///
    /// # Errors
    /// Returns the reason if the shape has more dimensions, or another number of entries.
    pub fn shaped(flat: Tensor, shape: &[usize]) -> Result<Self, String> {
        match shape {
            [] | [_] => Ok(flat),
            [rows, columns] if *columns > 0 && Some(flat.len()) == rows.checked_mul(*columns) => {
                Ok(Tensor::Rows(*columns, Box::new(flat)))
            }
            _ => {
                Err(format!("a tensor of the shape {shape:?} with {} entries; one and two dimensions are understood", flat.len()))
            }
        }
    }

    /// The dense tensor of two dimensions whose other entries are 0: `flat` has the listed values row by
    /// row, `rows` where each row begins and ends among them, and `columns` the column of each.
    ///
    /// # Errors
    /// Returns the reason if the numbers do not belong together, or the tensor is too large.
    pub fn sparse(flat: Tensor, shape: &[usize], rows: &[i64], columns: &[i64]) -> Result<Self, String> {
        /// Entries of the largest dense tensor.
        const MOST: usize = 1 << 28;
        let wrong = || format!("a sparse tensor of the shape {shape:?} whose indices do not fit it");
        let [height, width] = *shape else { return Err(wrong()) };
        let entries = height.checked_mul(width).filter(|entries| *entries <= MOST).ok_or_else(wrong)?;
        if rows.len() != height + 1 || rows[0] != 0 || rows[height] != flat.len() as i64 || columns.len() != flat.len() {
            return Err(wrong());
        }
        let mut places = Vec::with_capacity(flat.len());
        for (row, ends) in rows.windows(2).enumerate() {
            let listed = usize::try_from(ends[0]).ok().zip(usize::try_from(ends[1]).ok());
            for column in listed.and_then(|(from, to)| columns.get(from..to)).ok_or_else(wrong)? {
                let column = usize::try_from(*column).ok().filter(|column| *column < width).ok_or_else(wrong)?;
                places.push(row * width + column);
            }
        }
        fn spread<T: Copy + Default>(values: &[T], places: &[usize], entries: usize) -> Vec<T> {
            let mut dense = vec![T::default(); entries];
            places.iter().zip(values).for_each(|(place, value)| dense[*place] = *value);
            dense
        }
        let dense = match &flat {
            Tensor::Floats(values) => Tensor::Floats(spread(values, &places, entries)),
            Tensor::Ints(values) => Tensor::Ints(spread(values, &places, entries)),
            Tensor::Rows(..) => return Err(wrong()),
        };
        Tensor::shaped(dense, shape)
    }

    /// Its shape: rows, and columns of two dimensions.
    pub fn shape(&self) -> Vec<usize> {
        match self {
            Tensor::Rows(columns, _) => vec![self.len(), *columns],
            _ => vec![self.len()],
        }
    }

    /// Entries per row: 1 of one dimension.
    pub fn columns(&self) -> usize {
        if let Tensor::Rows(columns, _) = self { *columns } else { 1 }
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        match self {
            Tensor::Floats(values) => values.len(),
            Tensor::Ints(values) => values.len(),
            Tensor::Rows(columns, of) => of.len() / columns,
        }
    }

    /// Returns true without entries.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The entries as floats, row by row.
    pub fn floats(&self) -> Vec<f32> {
        match self {
            Tensor::Rows(_, of) => of.floats(),
            Tensor::Floats(values) => values.clone(),
            Tensor::Ints(values) => values.iter().map(|value| *value as f32).collect(),
        }
    }

    /// The entries as integers, row by row; `None` if one is a fraction.
    pub fn ints(&self) -> Option<Vec<i64>> {
        match self {
            Tensor::Rows(_, of) => of.ints(),
            Tensor::Ints(values) => Some(values.clone()),
            Tensor::Floats(values) => values.iter().map(|value| (value.fract() == 0.0).then_some(*value as i64)).collect(),
        }
    }
}

/// How JSON writes a tensor. `dtype` decides, because `[1, 2]` may be floats.
#[derive(Serialize, Deserialize)]
struct JsonTensor {
    data: Vec<f64>,
    #[serde(default)]
    dtype: Option<String>,
    #[serde(default)]
    shape: Option<Vec<usize>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    sparse_crow_indices: Option<Vec<i64>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    sparse_col_indices: Option<Vec<i64>>,
}

impl Serialize for Tensor {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Written<'a, T> {
            data: &'a [T],
            dtype: &'static str,
            shape: Vec<usize>,
        }
        let shape = self.shape();
        let mut flat = self;
        while let Tensor::Rows(_, of) = flat {
            flat = of;
        }
        match flat {
            Tensor::Floats(data) => Written { data, dtype: "float32", shape }.serialize(serializer),
            Tensor::Ints(data) => Written { data, dtype: "int64", shape }.serialize(serializer),
            Tensor::Rows(..) => unreachable!("its entries are flat"),
        }
    }
}

impl<'de> Deserialize<'de> for Tensor {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        use serde::de::Error;
        let JsonTensor { data, dtype, shape, sparse_crow_indices, sparse_col_indices } = JsonTensor::deserialize(deserializer)?;
        let flat = match dtype.as_deref() {
            Some("int64") => Tensor::Ints(data.into_iter().map(|value| value as i64).collect()),
            _ => Tensor::Floats(data.into_iter().map(|value| value as f32).collect()),
        };
        let shape = shape.unwrap_or_default();
        let tensor = match sparse_crow_indices {
            None => Tensor::shaped(flat, &shape),
            Some(rows) => Tensor::sparse(flat, &shape, &rows, &sparse_col_indices.unwrap_or_default()),
        };
        tensor.map_err(D::Error::custom)
    }
}

/// One sequence of a pass.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
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
    pub data: Vec<Datum>,
    /// Name of the loss.
    pub loss_fn: String,
    /// Numbers of the loss, by name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_fn_config: Option<BTreeMap<String, f64>>,
}

/// Answer to a pass.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PassOutput {
    /// Kind of the outputs.
    #[serde(default)]
    pub loss_fn_output_type: String,
    /// Tensors of each sequence, by name: `logprobs` among them.
    pub loss_fn_outputs: Vec<BTreeMap<String, Tensor>>,
    /// Numbers of the whole pass, each named with the way in which parts are combined: `loss:sum`.
    #[serde(default)]
    pub metrics: BTreeMap<String, f64>,
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
    fn type_and_shape_of_a_tensor_are_what_it_says() {
        let read = |text: &str| serde_json::from_str::<Tensor>(text);
        assert_eq!(read(r#"{"data": [1, 2], "dtype": "int64", "shape": [2]}"#).unwrap(), Tensor::Ints(vec![1, 2]));
        assert_eq!(read(r#"{"data": [1, 2], "dtype": "float32"}"#).unwrap(), Tensor::Floats(vec![1.0, 2.0]));
        assert_eq!(read(r#"{"data": [1.5]}"#).unwrap(), Tensor::Floats(vec![1.5]));
        let table = read(r#"{"data": [1.0, 2.0], "dtype": "float32", "shape": [1, 2]}"#).unwrap();
        assert_eq!((table.len(), table.columns(), table.shape()), (1, 2, vec![1, 2]));
        assert_eq!(serde_json::to_string(&table).unwrap(), r#"{"data":[1.0,2.0],"dtype":"float32","shape":[1,2]}"#);
        for shape in ["[1, 1, 1]", "[2, 1]", "[1, 0]"] {
            let error = read(&format!(r#"{{"data": [1.0], "shape": {shape}}}"#)).unwrap_err();
            assert!(error.to_string().contains("one and two dimensions are understood"), "{error}");
        }
        let written = serde_json::to_string(&Tensor::Floats(vec![1.0])).unwrap();
        assert_eq!(written, r#"{"data":[1.0],"dtype":"float32","shape":[1]}"#);
    }

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
