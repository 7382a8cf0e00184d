//! verl's aggregation modes, by themselves and under its value and entropy losses.

use rollflow::algo::{Aggregation, BatchSize, value_loss};
use serde_json::Value;

use crate::case::{Case, Tensor, count, tensor};
use crate::objective::entropy;

/// What verl's `agg_loss` takes beside a loss and a mask.
pub const BATCH: [&str; 5] = ["loss_agg_mode", "dp_size", "batch_num_tokens", "global_batch_size", "loss_scale_factor"];

pub fn losses(case: &Case) -> Result<(), String> {
    case.only("inputs", &[&["loss_mat", "loss_mask"][..], &BATCH].concat())?;
    let weights = weights(case, &case.needed("loss_mask")?)?;
    case.close("loss", &[total(&case.needed("loss_mat")?.data, &weights)], &tensor(&case.value["expected"]))
}

pub fn entropies(case: &Case) -> Result<(), String> {
    case.only("inputs", &[&["logits", "response_mask"][..], &BATCH].concat())?;
    let weights = weights(case, &case.needed("response_mask")?)?;
    let logits = case.needed("logits")?;
    let vocab = *logits.shape.last().ok_or("logits are a scalar")?;
    let entropies: Vec<f64> = logits.data.chunks(vocab).map(entropy).collect();
    case.close("entropy", &[total(&entropies, &weights)], &tensor(&case.value["expected"]))
}

pub fn values(case: &Case) -> Result<(), String> {
    case.only("inputs", &[&["vpreds", "returns", "values", "response_mask", "cliprange_value"][..], &BATCH].concat())?;
    let mask = case.needed("response_mask")?;
    let weights = weights(case, &mask)?;
    let [predictions, returns, old] = ["vpreds", "returns", "values"].map(|name| case.needed(name));
    let clip = case.value["inputs"]["cliprange_value"].as_f64().ok_or("cliprange_value is missing")?;
    let of =
        value_loss(&predictions?.data, &old?.data, &returns?.data, &weights, Some(clip)).map_err(|error| error.to_string())?;
    case.close("vf_loss", &[of.loss], &case.expected("vf_loss")?)?;
    case.close("grad_vpreds", &of.grad, &case.expected("grad_vpreds")?)?;
    let tokens = mask.data.iter().sum::<f64>() + GUARD;
    case.close("vf_clipfrac", &[of.clipped.len() as f64 / tokens], &case.expected("vf_clipfrac")?)
}

/// verl adds this to the counts that it divides by, but for the batch's.
pub const GUARD: f64 = 1e-8;

/// A case is one rank's share of a batch, or all of it.
fn weights(case: &Case, mask: &Tensor) -> Result<Vec<f64>, String> {
    let inputs = &case.value["inputs"];
    let mode = inputs["loss_agg_mode"].as_str().unwrap_or("token-mean");
    let columns = mask.shape[1];
    let rows: Vec<Vec<f32>> = mask.data.chunks(columns).map(|row| row.iter().map(|&mask| mask as f32).collect()).collect();
    // Padding keeps its place here.
    Ok(verl_weights(mode, inputs, &rows, columns)?.concat())
}

/// Weights by verl's `agg_loss(.., loss_agg_mode, **info)`: `info` may hold `dp_size`, `batch_num_tokens`, `global_batch_size` and
/// `loss_scale_factor`. A sequence without trained tokens is none to verl.
pub fn verl_weights(mode: &str, info: &Value, masks: &[Vec<f32>], columns: usize) -> Result<Vec<Vec<f64>>, String> {
    let setting = |name: &str| count(&info[name]);
    let aggregation = match mode {
        "token-mean" => Aggregation::TokenMean,
        "token-sum" => Aggregation::TokenSum,
        "seq-mean-token-sum" => Aggregation::SeqMeanTokenSum,
        "seq-mean-token-mean" => Aggregation::SeqMeanTokenMean,
        "seq-mean-token-sum-norm" => {
            Aggregation::DrGrpo { max_len: setting("loss_scale_factor").map_or(columns, |factor| factor as usize) }
        }
        mode => return Err(format!("loss_agg_mode {mode} is unknown")),
    };
    let length = |row: &[f32]| row.iter().map(|&mask| f64::from(mask)).sum::<f64>();
    let counted: Vec<&Vec<f32>> = masks.iter().filter(|row| length(row) > 0.0).collect();
    let own = BatchSize::of(&counted);
    let batch = BatchSize {
        tokens: setting("batch_num_tokens").unwrap_or(own.tokens),
        sequences: setting("global_batch_size").unwrap_or(own.sequences),
        averaged_ranks: setting("dp_size").map_or(1, |ranks| ranks as usize),
        ..own
    };
    let mut of_sequence = aggregation.token_weights(&counted, &batch).into_iter();
    let weights = masks.iter().map(|row| {
        let length = length(row);
        let guard = if mode == "seq-mean-token-mean" { length / (length + GUARD) } else { 1.0 };
        match length > 0.0 {
            true => of_sequence.next().unwrap().into_iter().map(|weight| weight * guard).collect(),
            false => vec![0.0; row.len()],
        }
    });
    Ok(weights.collect())
}

fn total(terms: &[f64], weights: &[f64]) -> f64 {
    terms.iter().zip(weights).filter(|(_, weight)| **weight != 0.0).map(|(term, weight)| term * weight).sum()
}
