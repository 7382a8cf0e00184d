//! Reference objective: a batch's loss from its logits, in doubles and without tensors. Backends are
//! tested against it.

use rollflow::algo::{Loss, LossError, LossOutput, OffPolicy};
use rollflow::train::TrainBatch;

/// Returns the loss of a whole batch and ∂loss/∂logits, shaped as the logits. `logits` holds, per sequence, one row of `vocab` numbers for each position (row `t` predicts token
/// `t + 1`; rows past the last trained token may be there or not).
pub fn objective(
    batch: &TrainBatch,
    logits: &[Vec<f64>],
    vocab: usize,
    loss: &dyn Loss,
) -> Result<(LossOutput, Vec<Vec<f64>>), LossError> {
    let all = batch.all();
    let places: Vec<(usize, usize)> =
        all.iter().flat_map(|&at| batch.sequences[at].rows.iter().map(move |row| (at, row * vocab))).collect();
    let row = |&(sequence, start): &(usize, usize)| &logits[sequence][start..start + vocab];
    let targets = || batch.sequences.iter().flat_map(|sequence| &sequence.targets).map(|&target| target as usize);
    let log_probs: Vec<f64> = places.iter().zip(targets()).map(|(place, target)| log_softmax_at(row(place), target)).collect();
    let entropies: Vec<f64> = places.iter().map(|place| entropy(row(place))).collect();
    let output = batch.evaluate(&all, loss, &OffPolicy::default(), &log_probs, &entropies, None)?;

    let mut logits_grad: Vec<Vec<f64>> = logits.iter().map(|rows| vec![0.0; rows.len()]).collect();
    for (t, (place, target)) in places.iter().zip(targets()).enumerate() {
        for token in 0..vocab {
            let log_p = log_softmax_at(row(place), token);
            let p = log_p.exp();
            let mut slope = output.grad[t] * (f64::from(token == target) - p);
            if let Some(entropy_grad) = output.entropy_grad.as_ref().filter(|_| p > 0.0) {
                slope -= entropy_grad[t] * p * (log_p + entropies[t]);
            }
            logits_grad[place.0][place.1 + token] = slope;
        }
    }
    Ok((output, logits_grad))
}

/// Returns the largest logit and `log Σ exp(logit − largest)`, apart so that huge logits keep their precision.
fn normalizer(logits: &[f64]) -> (f64, f64) {
    let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    (max, logits.iter().map(|logit| (logit - max).exp()).sum::<f64>().ln())
}

/// Returns `log softmax(logits)[index]` (TRL's `selective_log_softmax`, one row).
pub fn log_softmax_at(logits: &[f64], index: usize) -> f64 {
    let (max, log_sum) = normalizer(logits);
    (logits[index] - max) - log_sum
}

/// Returns the entropy `−Σ p log p` of `softmax(logits)` (TRL's `entropy_from_logits`, one row). Masked tokens (−∞) add nothing.
pub fn entropy(logits: &[f64]) -> f64 {
    let (max, log_sum) = normalizer(logits);
    logits.iter().map(|logit| (logit - max) - log_sum).filter(|log_p| log_p.is_finite()).map(|log_p| -log_p.exp() * log_p).sum()
}
