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
    /// Tokens with a mask above 0.
    pub trained: usize,
    /// Completions: verl's `global_batch_size`. A rollout in several parts is one.
    pub sequences: f64,
    /// Number of ranks whose gradients are averaged, a factor of the weights: verl's `dp_size`,
    /// transformers' `num_processes`. 1 if gradients are summed.
    pub averaged_ranks: usize,
}

impl BatchSize {
    /// Size of a batch with these masks.
    pub fn of<M: AsRef<[f32]>>(masks: &[M]) -> Self {
        let tokens = masks.iter().map(|mask| mask_sum(mask.as_ref())).sum();
        let trained = masks.iter().flat_map(|mask| mask.as_ref()).filter(|m| **m > 0.0).count();
        BatchSize { tokens, trained, sequences: masks.len() as f64, averaged_ranks: 1 }
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
        let BatchSize { tokens, sequences, averaged_ranks, .. } = *batch;
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
