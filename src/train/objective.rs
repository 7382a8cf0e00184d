//! A batch's loss straight from logits, in doubles and without tensors: what every backend must compute.
//!
//! Backends are tested against it; it is also the shortest way to see how samples, masks and a loss become a number.

use super::{CollateError, PackedColumns, TrainBatch, collate};
use crate::algo::{Aggregation, Loss, LossError, LossOutput, OffPolicy, PolicyGradient, entropy, log_softmax_at};
use crate::data::Sample;

/// A loss and its derivative for every logit.
#[derive(Clone, Debug, PartialEq)]
pub struct Objective {
    /// Value, derivatives per token, counts.
    pub output: LossOutput,
    /// ∂loss/∂logits, shaped as the logits were given; zero wherever nothing is trained.
    pub logits_grad: Vec<Vec<f64>>,
}

/// The loss of a whole batch. `logits` holds, per sequence, one row of `vocab` numbers for each position (row `t` predicts token
/// `t + 1`; rows past the last trained token may be there or not).
pub fn objective(batch: &TrainBatch, logits: &[Vec<f64>], vocab: usize, loss: &dyn Loss) -> Result<Objective, LossError> {
    let all: Vec<usize> = (0..batch.sequences.len()).collect();
    let columns = PackedColumns::new(batch, &all);
    let places: Vec<(usize, usize)> =
        all.iter().flat_map(|&at| batch.sequences[at].rows.iter().map(move |row| (at, row * vocab))).collect();
    let row = |&(sequence, start): &(usize, usize)| &logits[sequence][start..start + vocab];
    let targets = || columns.targets.iter().map(|&target| target as usize);
    let log_probs: Vec<f64> = places.iter().zip(targets()).map(|(place, target)| log_softmax_at(row(place), target)).collect();
    let entropies: Vec<f64> = places.iter().map(|place| entropy(row(place))).collect();
    let output = columns.evaluate(loss, &OffPolicy::default(), &log_probs, &entropies, batch.batch_tokens)?;

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
    Ok(Objective { output, logits_grad })
}

/// An objective that can't be computed.
#[derive(Debug, thiserror::Error)]
pub enum ObjectiveError {
    /// The samples couldn't be collated.
    #[error(transparent)]
    Collate(#[from] CollateError),
    /// The loss refused them.
    #[error(transparent)]
    Loss(#[from] LossError),
}

/// The plain GRPO objective, `−mean over sequences (mean log-probability over trained tokens × advantage)`.
///
/// `labels` are whole sequences, unshifted, and `loss_mask` is aligned with them: the shift is [`collate`]'s.
pub fn grpo_loss(
    logits: &[Vec<f64>],
    vocab: usize,
    labels: &[Vec<u32>],
    loss_mask: &[Vec<f32>],
    advantages: &[f64],
) -> Result<Objective, ObjectiveError> {
    let sample = |((tokens, mask), advantage): ((&Vec<u32>, &Vec<f32>), &f64)| Sample {
        tokens: tokens.clone(),
        loss_mask: mask.clone(),
        advantage: Some(*advantage),
        ..Sample::default()
    };
    let samples: Vec<Sample> = labels.iter().zip(loss_mask).zip(advantages).map(sample).collect();
    compute_grpo_loss(&samples, logits, vocab, &PolicyGradient)
}

/// The same from samples, whose tokens, masks and advantages it reads, with any loss; every sequence counts alike.
pub fn compute_grpo_loss(
    samples: &[Sample],
    logits: &[Vec<f64>],
    vocab: usize,
    loss: &dyn Loss,
) -> Result<Objective, ObjectiveError> {
    Ok(objective(&collate(samples, Aggregation::SeqMeanTokenMean)?, logits, vocab, loss)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algo::{CrossEntropy, Grpo};
    use proptest::prelude::*;

    /// Two sequences over three tokens; the hand-computed value of the first is −(ln ½ + ln ¼)/2 · 2.
    #[test]
    fn the_grpo_loss_equals_the_hand_computed_one() {
        let half = [0.5f64.ln(), 0.25f64.ln(), 0.25f64.ln()];
        let logits = vec![half.repeat(3), half.repeat(3)];
        let labels = [vec![2, 2, 0, 1], vec![1, 0, 0, 0]];
        let mask = [vec![0.0, 0.0, 1.0, 1.0], vec![0.0, 1.0, 0.0, 0.0]];
        let found = grpo_loss(&logits, 3, &labels, &mask, &[2.0, -1.0]).unwrap();
        let first = (0.5f64.ln() + 0.25f64.ln()) / 2.0 * 2.0;
        let second = -(0.5f64.ln());
        assert!((found.output.loss + (first + second) / 2.0).abs() < 1e-15);
        // Row 0 of sequence 0 predicts token 1, which is masked; row 1 predicts token 2, which is trained.
        assert_eq!(found.logits_grad[0][..3], [0.0; 3]);
        assert!(found.logits_grad[0][3..].iter().all(|slope| *slope != 0.0));
        assert!(found.logits_grad[1][3..].iter().all(|slope| *slope == 0.0));
    }

    proptest! {
        #[test]
        fn derivatives_by_logits_equal_finite_differences(
            logits in prop::collection::vec(-2.0f64..2.0, 12), tokens in prop::collection::vec(0u32..4, 4), advantage in -1.0f64..1.0
        ) {
            let sample = |advantage| Sample {
                tokens: tokens.clone(),
                loss_mask: vec![0.0, 0.0, 1.0, 0.5],
                advantage: Some(advantage),
                ..Sample::default()
            };
            // On policy GRPO's ratio is one by definition and its value stands still; without advantage its bonus alone remains.
            let bonus = Grpo { entropy_coef: 0.5, ..Grpo::default() };
            for (loss, advantage) in [(&PolicyGradient as &dyn Loss, advantage), (&CrossEntropy, advantage), (&bonus, 0.0)] {
                let batch = collate(&[sample(advantage)], Aggregation::TokenMean).unwrap();
                let value = |at: usize, by: f64| {
                    let mut logits = logits.clone();
                    logits[at] += by;
                    objective(&batch, &[logits], 4, loss).unwrap()
                };
                for at in 0..logits.len() {
                    let slope = (value(at, 1e-5).output.loss - value(at, -1e-5).output.loss) / 2e-5;
                    prop_assert!((slope - value(at, 0.0).logits_grad[0][at]).abs() < 1e-8, "{}", loss.name());
                }
            }
        }
    }
}
