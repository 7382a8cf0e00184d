//! TRL's supervised loss, from logits and unshifted labels.

use rollflow::algo::{Aggregation, BatchSize, CrossEntropy, Loss, LossChoice, LossError, LossInputs, LossOutput, PolicyLoss};
use rollflow::data::Sample;
use rollflow::recipe::NoKeys;
use rollflow::train::collate_in;

use crate::case::{Case, count, scalar};
use crate::objective::{entropy, log_softmax_at, objective};

/// Labels of this value are not trained.
const IGNORED: f64 = -100.0;

/// The recorded gradient norm is over the parameters of a model that is not recorded; only the loss and the metrics can be held.
pub fn loss(case: &Case) -> Result<(), String> {
    case.only("inputs", &["logits", "labels", "attention_mask", "num_items_in_batch"])?;
    case.only("config", &["loss_type", "label_smoothing_factor"])?;
    let dynamic = match case.value["config"]["loss_type"].as_str() {
        None | Some("nll") => false,
        Some("dft") => true,
        Some(loss_type) => return Err(format!("loss_type {loss_type} is unknown")),
    };
    let (logits, labels, mask) = (case.needed("logits")?, case.needed("labels")?, case.needed("attention_mask")?);
    let (columns, vocab) = (labels.shape[1], logits.shape[2]);
    let sample = |labels: &[f64]| Sample {
        tokens: labels.iter().map(|&label| if label == IGNORED { 0 } else { label as u32 }).collect(),
        loss_mask: labels.iter().map(|&label| if label == IGNORED { 0.0 } else { 1.0 }).collect(),
        ..Sample::default()
    };
    let samples: Vec<Sample> = labels.data.chunks(columns).map(sample).collect();
    let rows: Vec<Vec<f64>> = logits.data.chunks(columns * vocab).map(<[f64]>::to_vec).collect();
    // A given count of tokens, of all micro-batches and ranks, replaces the batch's own.
    let masks: Vec<&[f32]> = samples.iter().map(|sample| &sample.loss_mask[1..]).collect();
    let own = BatchSize::of(&masks);
    let ranks = count(&case.value["resolved"]["num_processes"]).map_or(1, |ranks| ranks as usize);
    let size = match case.count("num_items_in_batch") {
        Some(tokens) => BatchSize { tokens, averaged_ranks: ranks, ..own },
        None => own,
    };
    let batch = collate_in(&samples, Aggregation::TokenMean, &size).map_err(|error| error.to_string())?;
    let trained: Vec<(&[f64], f64)> = (0..labels.data.len())
        .filter(|at| at % columns != 0 && labels.data[*at] != IGNORED)
        .map(|at| (&logits.data[(at - 1) * vocab..at * vocab], labels.data[at]))
        .collect();
    // As in TRL, `dft` smooths nothing.
    let epsilon = case.value["config"]["label_smoothing_factor"].as_f64().filter(|epsilon| !dynamic && *epsilon > 0.0);
    let value = match epsilon {
        Some(epsilon) => {
            let smoothed: Result<f64, LossError> =
                trained.iter().map(|(row, label)| smoothed(row, *label as usize, epsilon)).sum();
            smoothed.map_err(|error| error.to_string())? / size.tokens * size.averaged_ranks as f64
        }
        None => {
            let loss: &dyn Loss = if dynamic { &dynamic_fine_tuning } else { &CrossEntropy };
            objective(&batch, &rows, vocab, loss).map_err(|error| error.to_string())?.0.loss
        }
    };
    let expected = case.expected("loss")?;
    match epsilon {
        // transformers sums over the vocabulary in single precision, whatever it is given.
        Some(_) => case.close_single("loss", value, expected.data[0])?,
        None => case.close("loss", &[value], &expected)?,
    }
    let best =
        |row: &[f64]| (0..vocab).max_by(|&a, &b| row[a].total_cmp(&row[b]).then(b.cmp(&a))).map_or(f64::NAN, |at| at as f64);
    let hits = trained.iter().filter(|(row, label)| best(row) == *label).count();
    let read: Vec<&[f64]> =
        logits.data.chunks(vocab).zip(&mask.data).filter(|(_, mask)| **mask > 0.0).map(|(row, _)| row).collect();
    for (name, expected) in case.value["expected"]["metrics"].as_object().into_iter().flatten() {
        let actual = match name.as_str() {
            "entropy" => trained.iter().map(|(row, _)| entropy(row)).sum::<f64>() / trained.len() as f64,
            "mean_token_accuracy" => hits as f64 / trained.len() as f64,
            "num_tokens" => read.len() as f64,
            name => return Err(format!("metric {name} is unknown")),
        };
        case.close_single(name, actual, scalar(expected))?;
    }
    Ok(())
}

/// Dynamic fine-tuning is REINFORCE with advantages of 1 and each token's own probability as a constant weight.
fn dynamic_fine_tuning(inputs: &LossInputs) -> Result<LossOutput, LossError> {
    let (probabilities, ones): (Vec<f64>, Vec<f64>) = inputs.log_probs.iter().map(|log_prob| (log_prob.exp(), 1.0)).unzip();
    let weighted = LossInputs { importance: Some(&probabilities), advantages: &ones, ..*inputs };
    PolicyLoss::from(LossChoice::Gpg(NoKeys)).evaluate(&weighted)
}

/// Cross-entropy against a smoothed label, one row: every token is a target, and the label most of all.
fn smoothed(logits: &[f64], label: usize, epsilon: f64) -> Result<f64, LossError> {
    let log_probs: Vec<f64> = (0..logits.len()).map(|token| log_softmax_at(logits, token)).collect();
    let mut weights = vec![epsilon / logits.len() as f64; logits.len()];
    weights[label] += 1.0 - epsilon;
    let inputs = LossInputs { log_probs: &log_probs, weights: &weights, ..LossInputs::default() };
    Ok(CrossEntropy.evaluate(&inputs)?.loss)
}
