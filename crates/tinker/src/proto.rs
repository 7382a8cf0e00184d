//! The protobuf dialect: passes, and answers to passes and samples.
//!
//! Tensors travel as little-endian bytes. A batched tensor has the entries of all sequences, and
//! the byte at which each begins.

use std::collections::{BTreeMap, HashMap};

use prost::Message;

use crate::message::{Chunk, Datum, ModelInput, Pass, PassOutput, SampleResponse, Sequence, StopReason, Tensor, TopRow};
use crate::tensor::MOST_DENSE;

/// Media type of the dialect.
pub const MEDIA_TYPE: &str = "application/x-protobuf";

const FLOAT32: i32 = 1;
const INT64: i32 = 2;
const INT32: i32 = 3;
const BFLOAT16: i32 = 4;

#[derive(Clone, PartialEq, Message)]
struct SparseCsr {
    #[prost(bytes = "vec", tag = "1")]
    values: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    crow_indices: Vec<u8>,
    #[prost(bytes = "vec", tag = "3")]
    col_indices: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
struct WireTensor {
    #[prost(bytes = "vec", optional, tag = "1")]
    dense: Option<Vec<u8>>,
    #[prost(message, optional, tag = "2")]
    sparse: Option<SparseCsr>,
    #[prost(int32, tag = "3")]
    dtype: i32,
    #[prost(int64, repeated, tag = "4")]
    shape: Vec<i64>,
}

#[derive(Clone, PartialEq, Message)]
struct BatchedTensor {
    #[prost(bytes = "vec", tag = "1")]
    data: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    offsets: Vec<u8>,
    #[prost(int32, tag = "3")]
    dtype: i32,
    #[prost(int64, repeated, tag = "4")]
    trailing_shape: Vec<i64>,
}

#[derive(Clone, PartialEq, Message)]
struct ArrayRecord {
    #[prost(string, tag = "1")]
    type_tag: String,
    #[prost(map = "string, message", tag = "2")]
    fields: HashMap<String, BatchedTensor>,
    #[prost(int64, tag = "3")]
    num_datums: i64,
}

#[derive(Clone, PartialEq, Message)]
struct WireOutput {
    #[prost(string, tag = "1")]
    loss_fn_output_type: String,
    #[prost(message, repeated, tag = "2")]
    loss_fn_outputs: Vec<ArrayRecord>,
    #[prost(map = "string, double", tag = "3")]
    metrics: HashMap<String, f64>,
}

#[derive(Clone, PartialEq, Message)]
struct Text {
    #[prost(bytes = "vec", tag = "1")]
    tokens: Vec<u8>,
}

/// A piece that is not text: its contents are not read.
#[derive(Clone, PartialEq, Message)]
struct Other {}

#[derive(Clone, PartialEq, Message)]
struct WireChunk {
    #[prost(message, optional, tag = "1")]
    text: Option<Text>,
    #[prost(message, optional, tag = "2")]
    image: Option<Other>,
    #[prost(message, optional, tag = "3")]
    audio: Option<Other>,
}

#[derive(Clone, PartialEq, Message)]
struct WireDatum {
    #[prost(message, repeated, tag = "1")]
    model_input: Vec<WireChunk>,
    #[prost(map = "string, message", tag = "2")]
    loss_fn_inputs: HashMap<String, WireTensor>,
}

#[derive(Clone, PartialEq, Message)]
struct ConfigValue {
    #[prost(double, optional, tag = "1")]
    number: Option<f64>,
    #[prost(string, optional, tag = "2")]
    text: Option<String>,
}

#[derive(Clone, PartialEq, Message)]
struct WirePass {
    #[prost(string, tag = "1")]
    model_id: String,
    #[prost(int32, tag = "2")]
    seq_id: i32,
    #[prost(message, repeated, tag = "3")]
    data: Vec<WireDatum>,
    #[prost(string, tag = "4")]
    loss_fn: String,
    #[prost(map = "string, double", tag = "5")]
    loss_fn_config: HashMap<String, f64>,
    #[prost(bool, tag = "6")]
    forward_only: bool,
    #[prost(map = "string, message", tag = "7")]
    loss_fn_config_v2: HashMap<String, ConfigValue>,
}

/// The fields of a pass that are read without its data.
#[derive(Clone, PartialEq, Message)]
struct WirePlace {
    #[prost(string, tag = "1")]
    model_id: String,
    #[prost(int32, tag = "2")]
    seq_id: i32,
}

#[derive(Clone, PartialEq, Message)]
struct WireSequence {
    /// 0: a stop; 1: the limit of length.
    #[prost(int32, tag = "1")]
    stop_reason: i32,
    #[prost(bytes = "vec", tag = "2")]
    tokens: Vec<u8>,
    #[prost(bytes = "vec", optional, tag = "3")]
    logprobs: Option<Vec<u8>>,
    #[prost(message, optional, tag = "4")]
    topk_logprobs: Option<WireTop>,
}

#[derive(Clone, PartialEq, Message)]
struct WireSamples {
    #[prost(message, repeated, tag = "1")]
    sequences: Vec<WireSequence>,
    #[prost(bytes = "vec", optional, tag = "2")]
    prompt_logprobs: Option<Vec<u8>>,
    #[prost(message, optional, tag = "3")]
    topk_prompt_logprobs: Option<WireTop>,
}

/// `length` rows of `k` tokens. An empty place is token 0 with [`EMPTY`].
#[derive(Clone, PartialEq, Message)]
struct WireTop {
    #[prost(bytes = "vec", tag = "1")]
    token_ids: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    logprobs: Vec<u8>,
    #[prost(uint32, tag = "3")]
    k: u32,
    #[prost(uint32, tag = "4")]
    length: u32,
}

/// Log-probability of an empty place.
const EMPTY: f32 = -99999.0;

impl WireTop {
    fn of(rows: &[TopRow]) -> Self {
        let k = rows.iter().flatten().map(Vec::len).max().unwrap_or(0);
        let place = |row: &TopRow, at: usize| {
            row.as_ref().and_then(|row| row.get(at)).map_or((0, EMPTY), |(token, log_prob)| (*token as i32, *log_prob))
        };
        let places: Vec<(i32, f32)> = rows.iter().flat_map(|row| (0..k).map(move |at| place(row, at))).collect();
        WireTop {
            token_ids: bytes(&places, |(token, _)| token.to_le_bytes()),
            logprobs: bytes(&places, |(_, log_prob)| log_prob.to_le_bytes()),
            k: k as u32,
            length: rows.len() as u32,
        }
    }

    fn rows(&self) -> Result<Vec<TopRow>, String> {
        let tokens = numbers(&self.token_ids, |four| i64::from(i32::from_le_bytes(four)))?;
        let log_probs = numbers(&self.logprobs, f32::from_le_bytes)?;
        let (k, length) = (self.k as usize, self.length as usize);
        if Some(tokens.len()) != k.checked_mul(length) || tokens.len() != log_probs.len() || k == 0 {
            return Err(format!(
                "{length} rows of {k} likeliest tokens have {} tokens, {} numbers",
                tokens.len(),
                log_probs.len()
            ));
        }
        let row = |(tokens, log_probs): (&[i64], &[f32])| {
            let places = tokens.iter().copied().zip(log_probs.iter().copied());
            let row: Vec<(i64, f32)> = places.filter(|(token, log_prob)| (*token, *log_prob) != (0, EMPTY)).collect();
            (!row.is_empty()).then_some(row)
        };
        Ok(tokens.chunks(k).zip(log_probs.chunks(k)).map(row).collect())
    }
}

fn bytes<T, const N: usize>(values: &[T], of: impl Fn(&T) -> [u8; N]) -> Vec<u8> {
    values.iter().flat_map(of).collect()
}

fn float_bytes(values: &[f32]) -> Vec<u8> {
    bytes(values, |value| value.to_le_bytes())
}

/// Numbers of `N` bytes each.
fn numbers<T, const N: usize>(bytes: &[u8], of: impl Fn([u8; N]) -> T) -> Result<Vec<T>, String> {
    let (whole, rest) = bytes.as_chunks::<N>();
    if rest.is_empty() {
        Ok(whole.iter().map(|chunk| of(*chunk)).collect())
    } else {
        Err(format!("{} bytes of numbers of {N}", bytes.len()))
    }
}

fn tensor(dtype: i32, bytes: &[u8]) -> Result<Tensor, String> {
    Ok(match dtype {
        FLOAT32 => Tensor::Floats(numbers(bytes, f32::from_le_bytes)?),
        INT64 => Tensor::Ints(numbers(bytes, i64::from_le_bytes)?),
        INT32 => Tensor::Ints(numbers(bytes, |four| i64::from(i32::from_le_bytes(four)))?),
        // The upper half of a float.
        BFLOAT16 => Tensor::Floats(numbers(bytes, |two| f32::from_bits(u32::from(u16::from_le_bytes(two)) << 16))?),
        other => return Err(format!("a tensor of the unknown type {other}")),
    })
}

fn encoded(tensor: &Tensor) -> (i32, Vec<u8>) {
    match tensor {
        Tensor::Floats(values) => (FLOAT32, float_bytes(values)),
        Tensor::Ints(values) => (INT64, bytes(values, |value| value.to_le_bytes())),
        Tensor::Rows(_, of) => encoded(of),
    }
}

/// Writes a pass.
pub fn encode_pass(pass: &Pass) -> Vec<u8> {
    let text = |tokens: &Vec<i64>| Text { tokens: bytes(tokens, |token| (*token as i32).to_le_bytes()) };
    let chunk = |chunk: &Chunk| match &chunk.tokens {
        Some(tokens) => WireChunk { text: Some(text(tokens)), ..WireChunk::default() },
        None => WireChunk { image: Some(Other {}), ..WireChunk::default() },
    };
    let tensor = |(name, tensor): (&String, &Tensor)| {
        let (dtype, bytes) = encoded(tensor);
        let shape = tensor.shape().into_iter().map(|size| size as i64).collect();
        (name.clone(), WireTensor { dense: Some(bytes), sparse: None, dtype, shape })
    };
    let datum = |datum: &Datum| WireDatum {
        model_input: datum.model_input.chunks.iter().map(chunk).collect(),
        loss_fn_inputs: datum.loss_fn_inputs.iter().map(tensor).collect(),
    };
    let number = |(name, value): (&String, &f64)| (name.clone(), ConfigValue { number: Some(*value), text: None });
    let wire = WirePass {
        model_id: pass.model_id.clone(),
        seq_id: pass.seq_id as i32,
        data: pass.data.iter().map(datum).collect(),
        loss_fn: pass.loss_fn.clone(),
        // Written twice, for servers before the second map.
        loss_fn_config: pass.loss_fn_config.clone().into_iter().collect(),
        forward_only: pass.forward_only,
        loss_fn_config_v2: pass.loss_fn_config.iter().map(number).collect(),
    };
    wire.encode_to_vec()
}

/// Reads a pass.
///
/// # Errors
/// The reason.
pub fn decode_pass(body: &[u8]) -> Result<Pass, String> {
    let wire = WirePass::decode(body).map_err(|error| error.to_string())?;
    let chunk = |chunk: WireChunk| -> Result<Chunk, String> {
        let kind = |word: &str| Chunk { tokens: None, kind: Some(word.to_owned()) };
        Ok(match chunk {
            WireChunk { text: Some(text), .. } => {
                let tokens = numbers(&text.tokens, |four| i64::from(i32::from_le_bytes(four)))?;
                Chunk { tokens: Some(tokens), kind: Some("encoded_text".to_owned()) }
            }
            WireChunk { image: Some(_), .. } => kind("image"),
            _ => kind("dmel"),
        })
    };
    let mut room = MOST_DENSE;
    let mut read = |(name, wire): (String, WireTensor)| -> Result<(String, Tensor), String> {
        let shape: Vec<usize> = wire.shape.iter().map(|size| usize::try_from(*size).unwrap_or(usize::MAX)).collect();
        let mut read = || match &wire.sparse {
            None => Tensor::shaped(tensor(wire.dtype, wire.dense.as_deref().unwrap_or_default())?, &shape),
            Some(SparseCsr { values, crow_indices, col_indices }) => {
                let [rows, columns] = [crow_indices, col_indices].map(|bytes| numbers(bytes, i64::from_le_bytes));
                Tensor::sparse(tensor(wire.dtype, values)?, &shape, &rows?, &columns?, &mut room)
            }
        };
        let tensor = read().map_err(|why| format!("`{name}`: {why}"))?;
        Ok((name, tensor))
    };
    let datum = |datum: WireDatum| -> Result<Datum, String> {
        let chunks = datum.model_input.into_iter().map(chunk).collect::<Result<_, _>>()?;
        let loss_fn_inputs = datum.loss_fn_inputs.into_iter().map(&mut read).collect::<Result<_, _>>()?;
        Ok(Datum { model_input: ModelInput { chunks }, loss_fn_inputs })
    };
    let mut config: BTreeMap<String, f64> = wire.loss_fn_config.into_iter().collect();
    for (name, ConfigValue { number, text }) in wire.loss_fn_config_v2 {
        match (number, text) {
            (Some(number), _) => drop(config.insert(name, number)),
            (None, Some(text)) => return Err(format!("the loss's `{name}` is the text {text:?}, not a number")),
            (None, None) => {}
        }
    }
    Ok(Pass {
        model_id: wire.model_id,
        seq_id: seq_id(wire.seq_id)?,
        data: wire.data.into_iter().map(datum).collect::<Result<_, _>>()?,
        loss_fn: wire.loss_fn,
        loss_fn_config: config,
        forward_only: wire.forward_only,
    })
}

fn seq_id(number: i32) -> Result<u64, String> {
    u64::try_from(number).map_err(|_| format!("seq_id {number}"))
}

/// Reads the model and the number of a pass, also of one whose data [`decode_pass`] refuses.
///
/// # Errors
/// The reason.
pub fn place_of_pass(body: &[u8]) -> Result<(String, u64), String> {
    let WirePlace { model_id, seq_id: number } = WirePlace::decode(body).map_err(|error| error.to_string())?;
    Ok((model_id, seq_id(number)?))
}

/// Writes the answer to a pass. All sequences have the same tensors.
pub fn encode_output(output: &PassOutput) -> Vec<u8> {
    let mut fields: HashMap<String, BatchedTensor> = HashMap::new();
    for (name, first) in output.loss_fn_outputs.first().into_iter().flatten() {
        let (dtype, _) = encoded(first);
        let (mut data, mut offsets) = (Vec::new(), vec![0_i64]);
        for tensors in &output.loss_fn_outputs {
            data.extend(tensors.get(name).map(|tensor| encoded(tensor).1).unwrap_or_default());
            offsets.push(data.len() as i64);
        }
        let offsets = bytes(&offsets, |offset| offset.to_le_bytes());
        let trailing_shape = if let Tensor::Rows(columns, _) = first { vec![*columns as i64] } else { Vec::new() };
        fields.insert(name.clone(), BatchedTensor { data, offsets, dtype, trailing_shape });
    }
    let (kind, count) = (output.loss_fn_output_type.clone(), output.loss_fn_outputs.len() as i64);
    let record = ArrayRecord { type_tag: kind.clone(), fields, num_datums: count };
    let wire = WireOutput {
        loss_fn_output_type: kind,
        loss_fn_outputs: if count == 0 { Vec::new() } else { vec![record] },
        metrics: output.metrics.clone().into_iter().collect(),
    };
    wire.encode_to_vec()
}

/// Reads the answer to a pass.
///
/// # Errors
/// The reason.
pub fn decode_output(body: &[u8]) -> Result<PassOutput, String> {
    let wire = WireOutput::decode(body).map_err(|error| error.to_string())?;
    let mut outputs: Vec<BTreeMap<String, Tensor>> = Vec::new();
    for record in wire.loss_fn_outputs {
        let first = outputs.len();
        for (name, batched) in record.fields {
            let offsets = numbers(&batched.offsets, i64::from_le_bytes)?;
            let count = offsets.len().saturating_sub(1);
            if outputs.len() < first + count {
                outputs.resize(first + count, BTreeMap::new());
            }
            for (at, pair) in offsets.windows(2).enumerate() {
                let range = usize::try_from(pair[0]).ok().zip(usize::try_from(pair[1]).ok());
                let slice = range.and_then(|(start, end)| batched.data.get(start..end));
                let slice = slice.ok_or_else(|| format!("`{name}` has an offset outside of its bytes"))?;
                let flat = tensor(batched.dtype, slice)?;
                let columns = batched.trailing_shape.first().map(|columns| usize::try_from(*columns).unwrap_or(0));
                let shape = columns.map_or_else(Vec::new, |columns| vec![flat.len() / columns.max(1), columns]);
                outputs[first + at].insert(name.clone(), Tensor::shaped(flat, &shape)?);
            }
        }
    }
    let metrics = wire.metrics.into_iter().collect();
    Ok(PassOutput { loss_fn_output_type: wire.loss_fn_output_type, loss_fn_outputs: outputs, metrics })
}

/// Writes samples. A position of the prompt without a log-probability is NaN.
pub fn encode_samples(samples: &SampleResponse) -> Vec<u8> {
    let sequence = |sequence: &Sequence| {
        let tokens: Vec<i32> = sequence.tokens.iter().map(|token| *token as i32).collect();
        WireSequence {
            stop_reason: i32::from(sequence.stop_reason == StopReason::Length),
            tokens: bytes(&tokens, |token| token.to_le_bytes()),
            logprobs: sequence.logprobs.as_deref().map(float_bytes),
            topk_logprobs: sequence.topk_logprobs.as_deref().map(WireTop::of),
        }
    };
    let scores =
        |scores: &Vec<Option<f32>>| float_bytes(&scores.iter().map(|score| score.unwrap_or(f32::NAN)).collect::<Vec<f32>>());
    let wire = WireSamples {
        sequences: samples.sequences.iter().map(sequence).collect(),
        prompt_logprobs: samples.prompt_logprobs.as_ref().map(scores),
        topk_prompt_logprobs: samples.topk_prompt_logprobs.as_deref().map(WireTop::of),
    };
    wire.encode_to_vec()
}

/// Reads samples.
///
/// # Errors
/// The reason.
pub fn decode_samples(body: &[u8]) -> Result<SampleResponse, String> {
    let wire = WireSamples::decode(body).map_err(|error| error.to_string())?;
    let floats = |bytes: &Vec<u8>| numbers(bytes, f32::from_le_bytes);
    let sequence = |sequence: WireSequence| -> Result<Sequence, String> {
        Ok(Sequence {
            stop_reason: if sequence.stop_reason == 1 { StopReason::Length } else { StopReason::Stop },
            tokens: numbers(&sequence.tokens, |four| i64::from(i32::from_le_bytes(four)))?,
            logprobs: sequence.logprobs.as_ref().map(floats).transpose()?,
            topk_logprobs: sequence.topk_logprobs.as_ref().map(WireTop::rows).transpose()?,
        })
    };
    let scored = wire.prompt_logprobs.as_ref().map(floats).transpose()?;
    Ok(SampleResponse {
        sequences: wire.sequences.into_iter().map(sequence).collect::<Result<_, _>>()?,
        prompt_logprobs: scored.map(|scores| scores.into_iter().map(|score| (!score.is_nan()).then_some(score)).collect()),
        topk_prompt_logprobs: wire.topk_prompt_logprobs.as_ref().map(WireTop::rows).transpose()?,
    })
}

#[cfg(test)]
mod tests;
