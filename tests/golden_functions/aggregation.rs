//! verl's aggregation modes, by themselves and under its value and entropy losses.

use rollflow::algo::{Aggregation, entropy, value_loss};

use crate::case::{Case, Tensor, tensor};

const BATCH: [&str; 5] = ["loss_agg_mode", "dp_size", "batch_num_tokens", "global_batch_size", "loss_scale_factor"];

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
const GUARD: f64 = 1e-8;

/// A case is one rank's share of a batch: the other ranks' sequences are made up, as many and as long as the case says. verl's ranks
/// average their gradients, so each loss is multiplied by their number. A sequence without trained tokens is none to verl.
fn weights(case: &Case, mask: &Tensor) -> Result<Vec<f64>, String> {
    let setting = |name: &str| case.value["inputs"][name].as_u64().map(|number| number as usize);
    let columns = mask.shape[1];
    let mode = case.value["inputs"]["loss_agg_mode"].as_str().unwrap_or("token-mean");
    let aggregation = match mode {
        "token-mean" => Aggregation::TokenMean,
        "token-sum" => Aggregation::TokenSum,
        "seq-mean-token-sum" => Aggregation::SeqMeanTokenSum,
        "seq-mean-token-mean" => Aggregation::SeqMeanTokenMean,
        "seq-mean-token-sum-norm" => Aggregation::DrGrpo { max_len: setting("loss_scale_factor").unwrap_or(columns) },
        mode => return Err(format!("loss_agg_mode {mode} is unknown")),
    };
    let rows: Vec<Vec<f32>> = mask.data.chunks(columns).map(|row| row.iter().map(|&mask| mask as f32).collect()).collect();
    let length = |row: &[f32]| row.iter().map(|&mask| f64::from(mask)).sum::<f64>();
    let mut masks: Vec<Vec<f32>> = rows.iter().filter(|row| length(row) > 0.0).cloned().collect();
    let own_tokens = masks.iter().map(|row| length(row)).sum::<f64>() as usize;
    let tokens = setting("batch_num_tokens").map_or(0, |tokens| tokens - own_tokens);
    let sequences = setting("global_batch_size").map_or(tokens.min(1), |sequences| sequences - masks.len());
    masks.extend((0..sequences).map(|at| vec![1.0; tokens / sequences + usize::from(at < tokens % sequences)]));

    let ranks = setting("dp_size").unwrap_or(1) as f64;
    let mut of_sequence = aggregation.token_weights(&masks).into_iter();
    let weights = rows.iter().map(|row| {
        let length = length(row);
        let guard = if mode == "seq-mean-token-mean" { length / (length + GUARD) } else { 1.0 };
        match length > 0.0 {
            true => of_sequence.next().unwrap().into_iter().map(|weight| weight * guard * ranks).collect(),
            false => vec![0.0; columns],
        }
    });
    Ok(weights.collect::<Vec<Vec<f64>>>().concat())
}

fn total(terms: &[f64], weights: &[f64]) -> f64 {
    terms.iter().zip(weights).filter(|(_, weight)| **weight != 0.0).map(|(term, weight)| term * weight).sum()
}
