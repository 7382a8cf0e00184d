//! Corrections for off-policy tokens: bounded importance weights, and rejection of tokens that
//! diverge too far.
//!
//! Inputs are log-ratios `trainer − behaviour` per token. A [`Correction`] turns them into one
//! factor per token, a constant for the gradient: an importance weight ([`Importance`]), or 0 if a
//! [`Rejection`] drops the token. A factor of 0 removes a token from the policy term and leaves the
//! denominators unchanged (law N1). Sequences are never split, so the factors of parts equal those
//! of the batch; only `normalize` needs the whole batch.
//!
//! Pure, in doubles, O(tokens). Equal to TRL 1.16 (`vllm_importance_sampling_mode`) and verl 0.9
//! (`rollout_corr_helper.py`).

mod choice;
mod rejection;
mod spread;

use std::ops::Range;

pub use choice::{IcePop, ImportanceChoice, MaskedIs, TruncatedIs};
pub use rejection::{Divergence, Over, Rejection};
use spread::Observed;
pub use spread::Spread;
pub(super) use spread::{guarded, mean};

use crate::settings::declare::choices;

/// Bound of log-ratios before `exp`, as in verl: e²⁰ exceeds every threshold, and sums of e²⁰ stay
/// finite.
const SAFE: f64 = 20.0;

pub(super) fn safe(log_ratio: f64) -> f64 {
    log_ratio.clamp(-SAFE, SAFE)
}

choices! {
    /// Level of an importance weight or ratio.
    pub enum Level {
        /// each token has its own.
        "token" => Token,
        /// the product of the sequence's token ratios.
        "sequence" => Sequence,
        /// the geometric mean of the sequence's token ratios.
        "geometric" => Geometric,
    }
}

/// Treatment of ratios out of bounds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Bound {
    /// Truncation to the bounds (TIS; TRL's `*_truncate`, verl with one threshold).
    Truncate {
        /// Lowest weight; `None` keeps small ratios.
        min: Option<f64>,
        /// Highest weight.
        max: f64,
    },
    /// Weight 0 (MIS; TRL's `*_mask`, verl's `lower_upper`; at token level, IcePop's mask outside
    /// [α, β]).
    Mask {
        /// Lowest ratio that counts; `None` admits all small ratios.
        min: Option<f64>,
        /// Highest ratio that counts.
        max: f64,
    },
}

impl Bound {
    /// Lower and upper bound. Without a lower bound, reports count ratios below 1 / upper, as verl
    /// does.
    fn reported(self) -> (f64, f64) {
        let (Bound::Truncate { min, max } | Bound::Mask { min, max }) = self;
        (min.unwrap_or(1.0 / max), max)
    }

    fn apply(self, ratio: f64) -> f64 {
        match self {
            Bound::Truncate { min, max } => ratio.min(max).max(min.unwrap_or(0.0)),
            Bound::Mask { min, max } if ratio > max || min.is_some_and(|min| ratio < min) => 0.0,
            Bound::Mask { .. } => ratio,
        }
    }
}

/// Importance weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Importance {
    /// Level of the weights.
    pub level: Level,
    /// Treatment of ratios out of bounds.
    pub bound: Bound,
    /// If true, weights are divided by their mean over the optimizer batch (verl's
    /// `rollout_is_batch_normalize`). Costs a second forward pass if the batch is cut into
    /// micro-batches.
    pub normalize: bool,
}

impl Importance {
    /// Weights truncated at `max`.
    pub fn truncated(level: Level, max: f64) -> Self {
        Importance { level, bound: Bound::Truncate { min: None, max }, normalize: false }
    }

    /// Weights that are 0 outside [`min`, `max`].
    pub fn masked(level: Level, min: f64, max: f64) -> Self {
        Importance { level, bound: Bound::Mask { min: Some(min), max }, normalize: false }
    }

    /// IcePop (Ling team, Every Step Evolves, 2025): the token's ratio inside [α, β], 0 outside.
    /// The paper takes 0.5 and 5.
    pub fn icepop(alpha: f64, beta: f64) -> Self {
        Self::masked(Level::Token, alpha, beta)
    }

    /// One weight per token, and their statistics. `sequences` tile `log_ratios`.
    pub fn weights(&self, log_ratios: &[f64], sequences: &[Range<usize>]) -> (Vec<f64>, Spread) {
        let per_sequence: Vec<f64> = sequences.iter().map(|at| self.log_ratio(&log_ratios[at.clone()])).collect();
        let raw: Vec<f64> = match self.level {
            Level::Token => log_ratios.iter().map(|&log_ratio| safe(log_ratio).exp()).collect(),
            _ => spread_over(&per_sequence, sequences, |log_ratio| safe(log_ratio).exp()),
        };
        let mut weights: Vec<f64> = raw.iter().map(|&ratio| self.bound.apply(ratio)).collect();
        let means = |values: &[f64]| -> Vec<f64> { sequences.iter().map(|at| mean(&values[at.clone()])).collect() };
        let (applied, unbounded) = (means(&weights), means(&raw));
        let ratios: Vec<f64> = per_sequence.iter().map(|log_ratio| log_ratio.min(SAFE).exp()).collect();
        let at_tokens = self.level == Level::Token;
        let spread = Spread::new(&Observed {
            tokens: &weights,
            extremes: if at_tokens { &weights } else { &ratios },
            judged: if at_tokens { &raw } else { &ratios },
            sequences: &applied,
            judged_sequences: &unbounded,
            bounds: self.bound.reported(),
            floor: 0.0,
        });
        if self.normalize {
            let mean = if at_tokens { spread.mean() } else { spread.sequence_mean() };
            // A batch whose weights are all 0 has nothing to scale.
            if mean > spread::GUARD {
                weights.iter_mut().for_each(|weight| *weight /= mean);
            }
        }
        (weights, spread)
    }

    fn log_ratio(&self, of_sequence: &[f64]) -> f64 {
        match self.level {
            Level::Geometric => mean(of_sequence),
            _ => of_sequence.iter().sum(),
        }
    }
}

/// Correction of off-policy tokens. The default does nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Correction {
    /// Importance weights, proximal policy over behaviour policy.
    pub weigh: Option<Importance>,
    /// Rejections; a token that any of them rejects is dropped.
    pub reject: Vec<Rejection>,
}

/// Statistics of a correction; parts add up.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CorrectionMetrics {
    /// Importance weights, before normalisation and rejection.
    pub weights: Spread,
    /// Divergences that each rejection measured, in the order of the rejections.
    pub rejections: Vec<Spread>,
    /// Tokens seen.
    pub tokens: usize,
    /// Tokens whose factor is 0.
    pub dropped_tokens: usize,
    /// Sequences seen.
    pub sequences: usize,
    /// Sequences with such a token.
    pub dropped_sequences: usize,
}

impl CorrectionMetrics {
    /// Adds the statistics of another part.
    pub fn merge(&mut self, other: &CorrectionMetrics) {
        self.weights.merge(&other.weights);
        self.rejections.resize(self.rejections.len().max(other.rejections.len()), Spread::default());
        self.rejections.iter_mut().zip(&other.rejections).for_each(|(own, other)| own.merge(other));
        self.tokens += other.tokens;
        self.dropped_tokens += other.dropped_tokens;
        self.sequences += other.sequences;
        self.dropped_sequences += other.dropped_sequences;
    }

    /// Share of tokens whose factor is 0.
    pub fn dropped_token_share(&self) -> f64 {
        self.dropped_tokens as f64 / self.tokens.max(1) as f64
    }

    /// Share of sequences with such a token.
    pub fn dropped_sequence_share(&self) -> f64 {
        self.dropped_sequences as f64 / self.sequences.max(1) as f64
    }
}

impl Correction {
    /// If true, it changes nothing.
    pub fn is_nothing(&self) -> bool {
        self.weigh.is_none() && self.reject.is_empty()
    }

    /// If true, it must see the whole optimizer batch.
    pub fn whole_batch(&self) -> bool {
        self.weigh.is_some_and(|weigh| weigh.normalize)
    }

    /// Factor of every token. Weights are exp(`proximal` − `behaviour`). Rejections judge `trainer`
    /// − `behaviour`, which includes a gap that a proximal policy close to behaviour hides. All
    /// columns have one entry per token, and `sequences` tile them.
    pub fn apply(
        &self,
        proximal: &[f64],
        trainer: &[f64],
        behaviour: &[f64],
        sequences: &[Range<usize>],
    ) -> (Vec<f64>, CorrectionMetrics) {
        let against = |own: &[f64]| -> Vec<f64> { own.iter().zip(behaviour).map(|(own, sampled)| own - sampled).collect() };
        let (mut factors, weights) = match &self.weigh {
            Some(weigh) => weigh.weights(&against(proximal), sequences),
            None => (vec![1.0; behaviour.len()], Spread::default()),
        };
        let log_ratios = against(trainer);
        let mut rejections = Vec::with_capacity(self.reject.len());
        for rejection in &self.reject {
            let (keep, spread) = rejection.judge(&log_ratios, sequences);
            factors.iter_mut().zip(keep).filter(|(_, keep)| !keep).for_each(|(factor, _)| *factor = 0.0);
            rejections.push(spread);
        }
        let dropped = |factors: &[f64]| factors.iter().filter(|factor| **factor == 0.0).count();
        let metrics = CorrectionMetrics {
            weights,
            rejections,
            tokens: factors.len(),
            dropped_tokens: dropped(&factors),
            sequences: sequences.len(),
            dropped_sequences: sequences.iter().filter(|at| dropped(&factors[(*at).clone()]) > 0).count(),
        };
        (factors, metrics)
    }
}

/// Repeats a value per sequence for each of its tokens.
fn spread_over<T: Copy, U: Copy>(per_sequence: &[T], sequences: &[Range<usize>], of: impl Fn(T) -> U) -> Vec<U> {
    per_sequence.iter().zip(sequences).flat_map(|(&value, at)| std::iter::repeat_n(of(value), at.len())).collect()
}

#[cfg(test)]
mod tests;
