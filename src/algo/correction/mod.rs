//! Corrections for off-policy tokens: the centre of the trust region, bounded importance weights,
//! and rejection of tokens that diverge too far.
//!
//! Decoupled PPO (Hilton et al., 2022; AReaL): ratios are taken against a *proximal* policy near
//! the trained one. An importance weight exp(proximal − behaviour) accounts for the rest. A
//! [`Rejection`] makes it 0, and takes the token out of its sequence's ratio. Weights are constants
//! for the gradient and leave the denominators unchanged (law N1). Sequences are never split, so the
//! weights of parts equal those of the batch; only `normalize` needs the whole batch.
//!
//! Pure, in doubles, O(tokens). Equal to TRL 1.16 (`vllm_importance_sampling_mode`) and verl 0.9
//! (`rollout_corr_helper.py`).

mod choice;
mod rejection;
mod spread;

use std::ops::Range;

pub use choice::ImportanceChoice;
pub use rejection::{Divergence, Over, Rejection};
pub use spread::{Spread, Tally};
pub(super) use spread::{guarded, mean};

use serde::{Deserialize, Serialize};

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

choices! {
    /// Policy that probability ratios are taken against.
    pub enum Proximal {
        /// the policy that sampled (PPO, GRPO).
        "behaviour" => Behaviour,
        /// the trainer's policy at the first update on the batch (decoupled PPO). Batches with
        /// several updates are scored once before.
        "recompute" => Recompute,
        /// between the policy that sampled, `b`, and the current one, θ, by token lag: `b + (1 −
        /// 1/lag)(θ − b)`, and `b` at lags 0 and 1 (A-3PO; AReaL's `loglinear`).
        "loglinear" => LogLinear,
    }
}

/// Importance weights of tokens, proximal policy over behaviour policy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Importance {
    /// Level of the weights.
    pub level: Level,
    /// Smallest ratio within the bounds; `None` keeps all small ratios.
    pub min: Option<f64>,
    /// Largest ratio within the bounds.
    pub max: f64,
    /// If true, ratios out of bounds get weight 0 (MIS; TRL's `*_mask`, verl's `lower_upper`; at token
    /// level, IcePop's mask). If false, they are truncated to the bounds (TIS; TRL's `*_truncate`,
    /// verl with one threshold).
    pub mask: bool,
    /// If true, weights are divided by their mean over the optimizer batch (verl's
    /// `rollout_is_batch_normalize`). Costs a second forward pass if the batch is cut into
    /// micro-batches.
    pub normalize: bool,
}

impl Importance {
    /// Weights truncated at `max`.
    pub fn truncated(level: Level, max: f64) -> Self {
        Importance { level, min: None, max, mask: false, normalize: false }
    }

    /// Weights that are 0 outside [`min`, `max`].
    pub fn masked(level: Level, min: f64, max: f64) -> Self {
        Importance { level, min: Some(min), max, mask: true, normalize: false }
    }

    /// IcePop (Ling team, Every Step Evolves, 2025): the token's ratio inside [α, β], 0 outside.
    /// The paper takes 0.5 and 5.
    pub fn icepop(alpha: f64, beta: f64) -> Self {
        Self::masked(Level::Token, alpha, beta)
    }

    /// One weight per token, and their statistics. `sequences` tile `log_ratios`. Without a lower
    /// bound, the statistics count ratios below 1 / `max` as low, as verl does.
    pub fn weights(&self, log_ratios: &[f64], sequences: &[Range<usize>]) -> (Vec<f64>, Spread) {
        let of_sequence = |at: &Range<usize>| match self.level {
            Level::Geometric => mean(&log_ratios[at.clone()]),
            _ => log_ratios[at.clone()].iter().sum(),
        };
        let per_sequence: Vec<f64> = sequences.iter().map(of_sequence).collect();
        let ratio = |log_ratio: &f64| safe(*log_ratio).exp();
        let raw: Vec<f64> = match self.level {
            Level::Token => log_ratios.iter().map(ratio).collect(),
            _ => spread_over(&per_sequence.iter().map(ratio).collect::<Vec<_>>(), sequences),
        };
        let mut weights: Vec<f64> = raw.iter().map(|&ratio| self.bounded(ratio)).collect();
        let bounds = [self.min.unwrap_or(1.0 / self.max), self.max];
        let means = |values: &[f64]| -> Vec<f64> { sequences.iter().map(|at| mean(&values[at.clone()])).collect() };
        let at_tokens = self.level == Level::Token;
        let units = if at_tokens {
            Tally::of(&weights, &raw, bounds)
        } else {
            let ratios: Vec<f64> = per_sequence.iter().map(|log_ratio| log_ratio.min(SAFE).exp()).collect();
            Tally::of(&ratios, &ratios, bounds)
        };
        let spread = Spread::new(&weights, [0.0, self.max], units, Tally::of(&means(&weights), &means(&raw), bounds));
        if self.normalize {
            // A sequence without trained tokens has no weight. The statistics count it, as in verl.
            let trained = sequences.iter().filter(|at| !at.is_empty()).count();
            let mean = match at_tokens {
                true => spread.mean(),
                false => means(&weights).iter().sum::<f64>() / trained.max(1) as f64,
            };
            // A batch whose weights are all 0 has nothing to scale.
            if mean > spread::GUARD {
                weights.iter_mut().for_each(|weight| *weight /= mean);
            }
        }
        (weights, spread)
    }

    fn bounded(&self, ratio: f64) -> f64 {
        let outside = ratio > self.max || self.min.is_some_and(|min| ratio < min);
        match self.mask {
            true if outside => 0.0,
            true => ratio,
            false => ratio.min(self.max).max(self.min.unwrap_or(0.0)),
        }
    }
}

/// Centre of the trust region, and correction for the distance from there to the behaviour policy.
/// The default takes ratios against the behaviour policy and corrects nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OffPolicy {
    /// Policy that ratios are taken against.
    pub proximal: Proximal,
    /// Importance weights, proximal policy over behaviour policy.
    pub weigh: Option<Importance>,
    /// Rejections; a token that any of them rejects is dropped.
    pub reject: Vec<Rejection>,
}

/// Statistics of a correction; parts add up.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
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

/// Columns of a loss's inputs; `None` for those that are not needed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Anchors {
    /// p: proximal log-probabilities.
    pub proximal: Option<Vec<f64>>,
    /// Factor of each token's policy term.
    pub importance: Option<Vec<f64>>,
    /// False for rejected tokens.
    pub kept: Option<Vec<bool>>,
    /// Statistics of the correction.
    pub metrics: CorrectionMetrics,
}

impl OffPolicy {
    /// If true, it must see the whole optimizer batch.
    pub fn whole_batch(&self) -> bool {
        self.weigh.is_some_and(|weigh| weigh.normalize)
    }

    /// Columns for tokens with log-probabilities `trainer` now, `start` at the first update on the
    /// batch and `behaviour` when they were sampled, `lags` versions ago. All have one entry per
    /// token; `sequences` tile them.
    pub fn anchors(
        &self,
        trainer: &[f64],
        start: &[f64],
        behaviour: &[f64],
        lags: &[u64],
        sequences: &[Range<usize>],
    ) -> Anchors {
        let proximal: Option<Vec<f64>> = match self.proximal {
            Proximal::Behaviour => None,
            Proximal::Recompute => Some(start.to_vec()),
            Proximal::LogLinear => {
                let tokens = trainer.iter().zip(behaviour).zip(lags);
                Some(tokens.map(|((&theta, &b), &lag)| log_linear(theta, b, lag)).collect())
            }
        };
        if self.weigh.is_none() && self.reject.is_empty() {
            return Anchors { proximal, ..Anchors::default() };
        }
        let centre = proximal.as_deref().unwrap_or(behaviour);
        let (importance, kept, metrics) = self.judge(centre, start, behaviour, sequences);
        let kept = Some(kept).filter(|_| !self.reject.is_empty());
        Anchors { proximal, importance: Some(importance), kept, metrics }
    }

    /// Factor of every token. Weights are exp(`proximal` − `behaviour`). Rejections judge `trainer`
    /// − `behaviour`, which includes a gap that a proximal policy close to behaviour hides. All
    /// columns have one entry per token, and `sequences` tile them.
    pub fn factors(
        &self,
        proximal: &[f64],
        trainer: &[f64],
        behaviour: &[f64],
        sequences: &[Range<usize>],
    ) -> (Vec<f64>, CorrectionMetrics) {
        let (factors, _, metrics) = self.judge(proximal, trainer, behaviour, sequences);
        (factors, metrics)
    }

    /// [`OffPolicy::factors`], with the tokens that no rejection dropped.
    fn judge(
        &self,
        proximal: &[f64],
        trainer: &[f64],
        behaviour: &[f64],
        sequences: &[Range<usize>],
    ) -> (Vec<f64>, Vec<bool>, CorrectionMetrics) {
        let against = |own: &[f64]| -> Vec<f64> { own.iter().zip(behaviour).map(|(own, sampled)| own - sampled).collect() };
        let (mut factors, weights) = match &self.weigh {
            Some(weigh) => weigh.weights(&against(proximal), sequences),
            None => (vec![1.0; behaviour.len()], Spread::default()),
        };
        let log_ratios = against(trainer);
        let (mut kept, mut rejections) = (vec![true; factors.len()], Vec::with_capacity(self.reject.len()));
        for rejection in &self.reject {
            let (keep, spread) = rejection.judge(&log_ratios, sequences);
            kept.iter_mut().zip(keep).for_each(|(kept, keep)| *kept &= keep);
            rejections.push(spread);
        }
        factors.iter_mut().zip(&kept).filter(|(_, kept)| !**kept).for_each(|(factor, _)| *factor = 0.0);
        let dropped = |factors: &[f64]| factors.iter().filter(|factor| **factor == 0.0).count();
        let metrics = CorrectionMetrics {
            weights,
            rejections,
            tokens: factors.len(),
            dropped_tokens: dropped(&factors),
            sequences: sequences.len(),
            dropped_sequences: sequences.iter().filter(|at| dropped(&factors[(*at).clone()]) > 0).count(),
        };
        (factors, kept, metrics)
    }
}

/// Policy one version before the current one, if log-probabilities moved linearly since sampling.
fn log_linear(theta: f64, behaviour: f64, lag: u64) -> f64 {
    let share = if lag == 0 { 0.0 } else { 1.0 - 1.0 / lag as f64 };
    behaviour + share * (theta - behaviour)
}

/// Repeats a value per sequence for each of its tokens.
fn spread_over(per_sequence: &[f64], sequences: &[Range<usize>]) -> Vec<f64> {
    per_sequence.iter().zip(sequences).flat_map(|(&value, at)| std::iter::repeat_n(value, at.len())).collect()
}
