//! Training a reward model: of two answers to one prompt, the better one should score higher.

use super::preference::{log_sigmoid, sigmoid};

/// A loss of pairs of scores, with its derivatives.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PairwiseReward {
    /// Mean over pairs.
    pub loss: f64,
    /// ∂loss/∂score of the chosen answers.
    pub chosen: Vec<f64>,
    /// ∂loss/∂score of the rejected answers.
    pub rejected: Vec<f64>,
}

/// Bradley and Terry's `−log σ(chosen − rejected − margin)`, and `center · (chosen + rejected)²` besides, which keeps scores around 0 (TRL's
/// `RewardTrainer`, `center_rewards_coefficient`). Scores have one entry per pair; so have `margins`, which say by how much an answer is better.
/// `batch_pairs` is the number of pairs in the whole optimizer batch (law N1).
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn equal_scores_cost_log_two() {
        assert_eq!(pairwise_reward(&[0.7], &[0.7], None, 0.0, 1).loss, 2f64.ln());
        assert_eq!(pairwise_reward(&[], &[], None, 0.0, 0), PairwiseReward::default());
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
