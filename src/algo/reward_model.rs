//! Loss of a reward model: the better of two completions should have the higher score.

use super::preference::{log_sigmoid, sigmoid};
use super::{Loss, LossError, LossInputs, LossOutput, PairMetrics};

/// A loss of pairs of scores, with its derivatives.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PairwiseReward {
    /// Mean over pairs.
    pub loss: f64,
    /// ∂loss/∂score of the chosen completions.
    pub chosen: Vec<f64>,
    /// ∂loss/∂score of the rejected completions.
    pub rejected: Vec<f64>,
}

/// `−log σ(chosen − rejected − margin) + center · (chosen + rejected)²` (Bradley and Terry). The
/// second term keeps scores around 0 (TRL's `RewardTrainer`, `center_rewards_coefficient`).
///
/// Scores and `margins` have one entry per pair. `batch_pairs` is the number of pairs in the whole
/// optimizer batch (law N1).
pub fn pairwise_reward(
    chosen: &[f64],
    rejected: &[f64],
    margins: Option<&[f64]>,
    center: f64,
    batch_pairs: usize,
) -> PairwiseReward {
    let share = 1.0 / batch_pairs.max(1) as f64;
    let mut output = PairwiseReward::default();
    for (at, (won, lost)) in chosen.iter().zip(rejected).enumerate() {
        let ahead = won - lost - margins.map_or(0.0, |margins| margins[at]);
        let sum = won + lost;
        output.loss += share * (-log_sigmoid(ahead) + center * sum * sum);
        let (apart, together) = (share * sigmoid(-ahead), share * 2.0 * center * sum);
        output.chosen.push(together - apart);
        output.rejected.push(together + apart);
    }
    output
}

/// [`pairwise_reward`] over a batch. Sequences 2i and 2i + 1 are the chosen and the rejected
/// completion of a pair; each has one trained row, whose score is the completion's.
///
/// A micro-batch may split a pair, so the whole batch is scored first, unless it is one
/// micro-batch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BradleyTerry {
    /// Coefficient of the term that keeps scores around 0.
    pub center: f64,
}

impl Loss for BradleyTerry {
    fn name(&self) -> &str {
        "bradley_terry"
    }

    fn whole_batch(&self) -> bool {
        true
    }

    fn evaluate(&self, inputs: &LossInputs) -> Result<LossOutput, LossError> {
        inputs.check_whole("bradley_terry")?;
        let scores = inputs.log_probs;
        let whole = |pair: &[std::ops::Range<usize>]| pair.len() == 2 && pair.iter().all(|answer| answer.len() == 1);
        if let Some(at) = inputs.sequences.chunks(2).position(|pair| !whole(pair)) {
            let problem =
                format!("bradley_terry: sequences {} and {} are no pair of answers with one score each", 2 * at, 2 * at + 1);
            return Err(LossError::Custom(problem));
        }
        let column = |of: usize| scores.iter().skip(of).step_by(2).copied().collect::<Vec<f64>>();
        let (chosen, rejected) = (column(0), column(1));
        let judged = pairwise_reward(&chosen, &rejected, None, self.center, inputs.batch_tokens / 2);
        let grad = judged.chosen.iter().zip(&judged.rejected).flat_map(|(won, lost)| [*won, *lost]).collect();
        let mut output = LossOutput::new(judged.loss, grad);
        output.metrics.pairs = PairMetrics::of(chosen.into_iter().zip(rejected));
        Ok(output)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn equal_scores_cost_log_two() {
        assert_eq!(pairwise_reward(&[0.7], &[0.7], None, 0.0, 1).loss, 2f64.ln());
        assert_eq!(pairwise_reward(&[], &[], None, 0.0, 0), PairwiseReward::default());
    }

    #[test]
    fn answers_of_a_batch_are_paired_as_they_come_and_what_is_no_pair_is_refused() {
        let scores = [2.0, 1.0, -1.0, 0.5];
        let (weights, sequences) = ([0.25; 4], [0..1, 1..2, 2..3, 3..4]);
        let inputs =
            LossInputs { log_probs: &scores, weights: &weights, sequences: &sequences, batch_tokens: 4, ..LossInputs::default() };
        let output = BradleyTerry::default().evaluate(&inputs).unwrap();
        let expected = pairwise_reward(&[2.0, -1.0], &[1.0, 0.5], None, 0.0, 2);
        assert_eq!((output.loss, output.grad[1], output.grad[2]), (expected.loss, expected.rejected[0], expected.chosen[1]));
        assert_eq!((output.metrics.pairs.accuracy(), output.metrics.pairs.margin()), (0.5, -0.25));

        let part = BradleyTerry::default().evaluate(&LossInputs { batch_tokens: 6, ..inputs }).unwrap_err();
        assert!(matches!(part, LossError::Part { seen: 4, of: 6, .. }), "{part}");
        for sequences in [&[0..1, 1..2, 2..4][..], &[0..2, 2..4], &[0..1, 1..2, 2..3]] {
            let error = BradleyTerry::default().evaluate(&LossInputs { sequences, ..inputs }).unwrap_err().to_string();
            assert!(error.contains("no pair of answers"), "{error}");
        }
    }

    proptest! {
        #[test]
        fn derivatives_equal_finite_differences_and_pairs_add_up(
            pairs in prop::collection::vec((-3.0f64..3.0, -3.0f64..3.0, -1.0f64..1.0), 1..6), center in 0.0f64..0.5
        ) {
            let column = |of: fn(&(f64, f64, f64)) -> f64| pairs.iter().map(of).collect::<Vec<_>>();
            let (chosen, rejected, margins) = (column(|p| p.0), column(|p| p.1), column(|p| p.2));
            let n = pairs.len();
            let whole = pairwise_reward(&chosen, &rejected, Some(&margins), center, n);
            let h = 1e-6;
            for at in 0..n {
                let moved = |by: (f64, f64)| {
                    let (mut chosen, mut rejected) = (chosen.clone(), rejected.clone());
                    (chosen[at], rejected[at]) = (chosen[at] + by.0, rejected[at] + by.1);
                    pairwise_reward(&chosen, &rejected, Some(&margins), center, n).loss
                };
                prop_assert!(((moved((h, 0.0)) - moved((-h, 0.0))) / (2.0 * h) - whole.chosen[at]).abs() < 1e-7);
                prop_assert!(((moved((0.0, h)) - moved((0.0, -h))) / (2.0 * h) - whole.rejected[at]).abs() < 1e-7);
            }
            let part = |at: usize| pairwise_reward(&chosen[at..=at], &rejected[at..=at], Some(&margins[at..=at]), center, n).loss;
            prop_assert!(((0..n).map(part).sum::<f64>() - whole.loss).abs() < 1e-12);
        }

        #[test]
        fn extreme_scores_stay_finite(won in -1e4f64..1e4, lost in -1e4f64..1e4) {
            let output = pairwise_reward(&[won], &[lost], None, 0.0, 1);
            prop_assert!(output.loss.is_finite() && output.loss >= 0.0);
            prop_assert!(output.chosen[0] <= 0.0 && output.rejected[0] >= 0.0);
        }
    }
}
