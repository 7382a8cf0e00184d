//! Probability ratios ρ = π_θ / π_anchor by level, and their derivatives by log-probability.

use std::ops::Range;

use super::surrogate::Clipped;
use crate::algo::LossInputs;
use crate::algo::correction::{Level, guarded};

/// The log-ratios of one sequence, one per token.
pub(in crate::algo) struct Ratios {
    pub log: Vec<f64>,
    /// Derivative of a token's log-ratio by its log-probability; of the common log-ratio if
    /// `shared`.
    moves: Vec<f64>,
    shared: bool,
    /// Sides on which tokens were clipped before the ratio was taken; empty if a surrogate clips
    /// later.
    pub bounded: Vec<Clipped>,
}

impl Ratios {
    /// Ratios of the tokens `at`, with log-ratios clipped to `limits`. A rejected token has ratio 1
    /// and no part in those of its sequence.
    pub fn new(level: Level, limits: [f64; 2], inputs: &LossInputs, at: Range<usize>) -> Self {
        let own = differences(inputs, at.clone());
        let total = own.iter().sum::<f64>();
        match level {
            Level::Token => Ratios {
                moves: own.iter().map(|&log_ratio| slope(log_ratio, limits)).collect(),
                log: own.into_iter().map(|log_ratio| log_ratio.clamp(limits[0], limits[1])).collect(),
                shared: false,
                bounded: Vec::new(),
            },
            Level::Sequence => Ratios { shared: true, ..Ratios::equal(total, 1.0, limits, inputs, at) },
            Level::Geometric => {
                let tokens = inputs.kept_of(at.clone()).count().max(1) as f64;
                Ratios { shared: true, ..Ratios::equal(total / tokens, 1.0 / tokens, limits, inputs, at) }
            }
        }
    }

    /// The geometric mean of the ratios, which each token moves as if it were its own (GSPO-token;
    /// verl's `gspo`).
    ///
    /// The gradient equals that of [`Level::Geometric`] if advantages and weights are equal within
    /// a sequence.
    pub fn geometric_by_token(limits: [f64; 2], inputs: &LossInputs, at: Range<usize>) -> Self {
        let tokens = inputs.kept_of(at.clone()).count().max(1) as f64;
        let total = differences(inputs, at.clone()).iter().sum::<f64>();
        Ratios::equal(total / tokens, 1.0, limits, inputs, at)
    }

    /// One log-ratio for the tokens `at`, which those that are kept move.
    fn equal(log_ratio: f64, moves: f64, limits: [f64; 2], inputs: &LossInputs, at: Range<usize>) -> Self {
        let (log, moves) = (log_ratio.clamp(limits[0], limits[1]), slope(log_ratio, limits) * moves);
        Ratios {
            log: vec![log; at.len()],
            moves: at.map(|t| if inputs.keeps(t) { moves } else { 0.0 }).collect(),
            shared: false,
            bounded: Vec::new(),
        }
    }

    /// The geometric mean of ratios that are bounded first (GMPO). A positive advantage bounds a
    /// ratio at e^`high`, a negative one at e^−`low`; a token without advantage adds nothing.
    pub fn bounded_each([low, high]: [f64; 2], limits: [f64; 2], inputs: &LossInputs, at: Range<usize>) -> Self {
        let bound = |(log_ratio, &advantage): (f64, &f64)| {
            if advantage > 0.0 && log_ratio > high {
                (high, Clipped::High)
            } else if advantage < 0.0 && log_ratio < -low {
                (-low, Clipped::Low)
            } else if advantage == 0.0 {
                (log_ratio * 0.0, Clipped::No)
            } else {
                (log_ratio, Clipped::No)
            }
        };
        let own = differences(inputs, at.clone());
        let advantages = &inputs.advantages[at.clone()];
        let (log, bounded): (Vec<f64>, Vec<Clipped>) = own.into_iter().zip(advantages).map(bound).unzip();
        let count = inputs.kept_of(at.clone()).count();
        let of_all = guarded(log.iter().sum(), count);
        let free = (limits[0]..=limits[1]).contains(&of_all);
        let share = if free { guarded(1.0, count) } else { 0.0 };
        let moves = |(t, (bounded, &advantage)): (usize, (&Clipped, &f64))| match bounded {
            Clipped::No if advantage != 0.0 && inputs.keeps(t) => share,
            _ => 0.0,
        };
        Ratios {
            moves: at.zip(bounded.iter().zip(advantages)).map(moves).collect(),
            log: vec![of_all.clamp(limits[0], limits[1]); log.len()],
            shared: true,
            bounded,
        }
    }

    /// Adds derivatives by log-ratio, one per token, to `grad`, as derivatives by log-probability.
    pub fn pull_back(&self, slopes: &[f64], grad: &mut [f64]) {
        let total: f64 = if self.shared { slopes.iter().sum() } else { 0.0 };
        for ((grad, moves), slope) in grad.iter_mut().zip(&self.moves).zip(slopes) {
            *grad += moves * if self.shared { total } else { *slope };
        }
    }
}

/// Derivative of a clipped log-ratio: 0 if a bound is active.
fn slope(log_ratio: f64, limits: [f64; 2]) -> f64 {
    f64::from(u8::from((limits[0]..=limits[1]).contains(&log_ratio)))
}

/// θ − anchor of the tokens `at`; 0 for rejected ones, but NaN where it is no number (law N4).
pub(in crate::algo) fn differences(inputs: &LossInputs, at: Range<usize>) -> Vec<f64> {
    let own = |t: usize| (inputs.log_probs[t] - inputs.anchor()[t]) * f64::from(u8::from(inputs.keeps(t)));
    at.map(own).collect()
}
