//! Aggregation of token terms into one loss, `Σ weight · term`: the only place with a denominator
//! (law N1).
//!
//! | here | weight of a token with mask `m` | TRL | verl |
//! | --- | --- | --- | --- |
//! | `TokenMean` | `m / Σ m` over the batch | `dapo`, `bnpo` | `token-mean` |
//! | `SeqMeanTokenMean` | `m / Σ_seq m / sequences` | `grpo` | `seq-mean-token-mean` |
//! | `SeqMeanTokenSum` | `m / sequences` | | `seq-mean-token-sum` |
//! | `DrGrpo` | `m / (sequences · max_len)` | `dr_grpo` | `seq-mean-token-sum-norm` |
//! | `TokenSum` | `m` | | `token-sum` |

use crate::settings::declare::choices;

choices! {
    /// Weights of tokens in the loss.
    pub enum Aggregation {
        /// every trained token of the step weighs the same.
        "token_mean" => TokenMean,
        /// every completion weighs the same, and every token within it.
        "seq_mean_token_mean" => SeqMeanTokenMean,
        /// a completion weighs by its length: each token 1 / completions.
        "seq_mean_token_sum" => SeqMeanTokenSum,
        /// each token weighs 1 / (completions × `max_new_tokens`).
        "dr_grpo" => DrGrpo {
            /// Largest length of a completion, in tokens. A recipe takes `generate.max_new_tokens`.
            max_len: usize = 0
        },
        /// each token weighs 1; the step's size grows with its tokens.
        "token_sum" => TokenSum,
    }
}

/// Size of a whole optimizer batch, for a caller that holds a micro-batch or one rank's share of it
/// (law N1).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BatchSize {
    /// Trained tokens, the sum over all masks: transformers' and TRL's `num_items_in_batch`, verl's
    /// `batch_num_tokens`.
    pub tokens: f64,
    /// Sequences: verl's `global_batch_size`.
    pub sequences: f64,
    /// Number of ranks whose gradients are averaged, a factor of the weights: verl's `dp_size`,
    /// transformers' `num_processes`. 1 if gradients are summed.
    pub averaged_ranks: usize,
}

impl BatchSize {
    /// Size of a batch with these masks.
    pub fn of<M: AsRef<[f32]>>(masks: &[M]) -> Self {
        let tokens = masks.iter().map(|mask| mask_sum(mask.as_ref())).sum();
        BatchSize { tokens, sequences: masks.len() as f64, averaged_ranks: 1 }
    }
}

/// Sum of a sequence's mask.
fn mask_sum(mask: &[f32]) -> f64 {
    mask.iter().map(|&m| f64::from(m)).sum()
}

impl Aggregation {
    /// Weights aligned with `masks` (sequences × their own length), a part of a batch of this size.
    ///
    /// A sequence without trained tokens gets zeros and counts as a sequence, as in TRL. verl does
    /// not count it: for its number, leave such masks out.
    pub fn token_weights<M: AsRef<[f32]>>(&self, masks: &[M], batch: &BatchSize) -> Vec<Vec<f64>> {
        let BatchSize { tokens, sequences, averaged_ranks } = *batch;
        let ranks = averaged_ranks as f64;
        let denominator = |mask: &[f32]| match self {
            Aggregation::TokenMean => tokens,
            Aggregation::TokenSum => 1.0,
            Aggregation::SeqMeanTokenMean => mask_sum(mask) * sequences,
            Aggregation::SeqMeanTokenSum => sequences,
            Aggregation::DrGrpo { max_len } => sequences * *max_len as f64,
        };
        let weights = |mask: &[f32]| {
            let denominator = denominator(mask);
            mask.iter().map(|&m| if m > 0.0 { f64::from(m) / denominator * ranks } else { 0.0 }).collect()
        };
        masks.iter().map(|mask| weights(mask.as_ref())).collect()
    }

    /// Denominator of a part of a batch. A token's weight in the whole batch is its weight in the
    /// part, times the part's share of the sum over all parts. `None` for
    /// [`Aggregation::TokenSum`], which has no denominator.
    pub fn weight_sum<M: AsRef<[f32]>>(&self, masks: &[M]) -> Option<f64> {
        match self {
            Aggregation::TokenMean => Some(masks.iter().flat_map(|mask| mask.as_ref()).map(|&m| f64::from(m)).sum()),
            Aggregation::TokenSum => None,
            _ => Some(masks.len() as f64),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ALL: [Aggregation; 5] = [
        Aggregation::TokenMean,
        Aggregation::SeqMeanTokenMean,
        Aggregation::SeqMeanTokenSum,
        Aggregation::DrGrpo { max_len: 10 },
        Aggregation::TokenSum,
    ];

    /// Weights of a whole batch.
    fn weights<M: AsRef<[f32]>>(aggregation: Aggregation, masks: &[M]) -> Vec<Vec<f64>> {
        aggregation.token_weights(masks, &BatchSize::of(masks))
    }

    fn masks(lowest: f32, fewest: usize) -> impl Strategy<Value = Vec<Vec<f32>>> {
        prop::collection::vec(prop::collection::vec(lowest..2.0, 1..9), fewest..9)
    }

    fn close(a: &[f64], b: &[f64]) -> bool {
        a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-12)
    }

    #[test]
    fn each_mode_divides_by_its_own_denominator() {
        let masks: [&[f32]; 3] = [&[0.0, 1.0, 1.0, 1.0], &[1.0], &[0.0, 0.0]];
        let sums = ALL.map(|aggregation| weights(aggregation, &masks).iter().map(|of| of.iter().sum()).collect::<Vec<f64>>());
        let third = 1.0 / 3.0;
        assert_eq!(sums, [[0.75, 0.25, 0.0], [third, third, 0.0], [1.0, third, 0.0], [0.1, 1.0 / 30.0, 0.0], [3.0, 1.0, 0.0]]);
    }

    proptest! {
        #[test]
        fn n1_parts_weigh_by_their_weight_sum_what_they_weigh_in_the_whole(masks in masks(0.0, 2), cut in 1usize..8) {
            let parts = masks.split_at(cut.min(masks.len() - 1));
            for aggregation in &ALL[..4] {
                let (first, second) = (aggregation.weight_sum(parts.0).unwrap(), aggregation.weight_sum(parts.1).unwrap());
                prop_assume!(first > 0.0 && second > 0.0);
                let scaled = |part: &[Vec<f32>], sum: f64| {
                    weights(*aggregation, part).concat().iter().map(|weight| weight * sum / (first + second)).collect::<Vec<f64>>()
                };
                prop_assert!(close(&weights(*aggregation, &masks).concat(), &[scaled(parts.0, first), scaled(parts.1, second)].concat()));
            }
        }

        #[test]
        fn n1_ranks_are_one_more_cut_of_the_batch(masks in masks(0.0, 1), cuts in prop::collection::vec(0usize..9, 0..4)) {
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(masks.len())).chain([0, masks.len()]).collect();
            cuts.sort_unstable();
            let (ranks, size) = (cuts.len() - 1, BatchSize::of(&masks));
            for aggregation in ALL {
                let summed = |of: &BatchSize| -> Vec<f64> {
                    cuts.windows(2).flat_map(|cut| aggregation.token_weights(&masks[cut[0]..cut[1]], of).concat()).collect()
                };
                let whole = weights(aggregation, &masks).concat();
                prop_assert_eq!(&summed(&size), &whole);
                let averaged = summed(&BatchSize { averaged_ranks: ranks, ..size });
                prop_assert!(close(&whole, &averaged.iter().map(|part| part / ranks as f64).collect::<Vec<_>>()));
            }
        }

        #[test]
        fn means_weigh_one_in_total_and_fractions_count_as_fractions(masks in masks(0.1, 1)) {
            for aggregation in [Aggregation::TokenMean, Aggregation::SeqMeanTokenMean] {
                let weights = weights(aggregation, &masks);
                prop_assert!((weights.iter().flatten().sum::<f64>() - 1.0).abs() < 1e-12);
                for (mask, weights) in masks.iter().zip(&weights) {
                    let share = weights[0] / f64::from(mask[0]);
                    prop_assert!(close(weights, &mask.iter().map(|&m| share * f64::from(m)).collect::<Vec<_>>()));
                }
            }
        }
    }
}
