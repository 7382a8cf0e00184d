//! Gap between trainer and generator over whole sequences: perplexities and the χ² divergence.
//! Equal to verl 0.9's `compute_offpolicy_metrics`. Sums over sequences, so that parts merge.

use super::ComparedToken;
use super::correction::{mean, safe};

/// Sums over sequences with sampled tokens.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SequenceGap {
    /// Sequences compared.
    pub sequences: usize,
    /// Log-perplexities and perplexities under the trainer: Σ mean −θ, and Σ exp of it.
    pub trainer: (f64, f64),
    /// Log-perplexities and perplexities under the behaviour policy: Σ mean −b, and Σ exp of it.
    pub behaviour: (f64, f64),
    /// Σ |difference| of the two means.
    pub abs_sum: f64,
    /// Σ exp of the difference.
    ratio_sum: f64,
    /// Σ (Π ρ)².
    square_ratio_sum: f64,
    /// Smallest and largest difference.
    range: Option<(f64, f64)>,
}

impl SequenceGap {
    /// Adds a sequence's sampled tokens, which may be none.
    pub(super) fn add(&mut self, tokens: &[ComparedToken]) {
        if tokens.is_empty() {
            return;
        }
        let column = |of: fn(&ComparedToken) -> f64| -> Vec<f64> { tokens.iter().map(of).collect() };
        let (trainer, behaviour) = (-mean(&column(|token| token.trainer)), -mean(&column(|token| token.behaviour)));
        let difference = trainer - behaviour;
        let log_ratio: f64 = column(|token| token.trainer - token.behaviour).iter().sum();
        self.merge(&SequenceGap {
            sequences: 1,
            trainer: (trainer, trainer.exp()),
            behaviour: (behaviour, behaviour.exp()),
            abs_sum: difference.abs(),
            ratio_sum: difference.exp(),
            square_ratio_sum: (2.0 * safe(log_ratio)).exp(),
            range: Some((difference, difference)),
        });
    }

    /// Adds another part's sequences.
    pub fn merge(&mut self, other: &SequenceGap) {
        let add = |a: (f64, f64), b: (f64, f64)| (a.0 + b.0, a.1 + b.1);
        self.sequences += other.sequences;
        self.trainer = add(self.trainer, other.trainer);
        self.behaviour = add(self.behaviour, other.behaviour);
        self.abs_sum += other.abs_sum;
        self.ratio_sum += other.ratio_sum;
        self.square_ratio_sum += other.square_ratio_sum;
        self.range = match (self.range, other.range) {
            (Some(a), Some(b)) => Some((a.0.min(b.0), a.1.max(b.1))),
            (a, b) => a.or(b),
        };
    }

    /// Mean perplexity ratio over sequences, trainer over generator; 1 without sequences.
    pub fn perplexity_ratio(&self) -> f64 {
        if self.sequences == 0 { 1.0 } else { self.per_sequence(self.ratio_sum) }
    }

    /// Smallest and largest difference of the log-perplexities, trainer − generator.
    pub fn range(&self) -> Option<(f64, f64)> {
        self.range
    }

    /// χ² divergence over sequences, `E[(Π ρ)²] − 1`: the variance of sequence weights.
    pub fn chi2(&self) -> f64 {
        if self.sequences == 0 { 0.0 } else { self.per_sequence(self.square_ratio_sum) - 1.0 }
    }

    fn per_sequence(&self, sum: f64) -> f64 {
        sum / self.sequences.max(1) as f64
    }
}
