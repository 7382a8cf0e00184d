//! Probability ratios ρ = π_θ / π_anchor by level, and their derivatives by log-probability.

use std::ops::Range;

use super::surrogate::Clipped;
use crate::algo::LossInputs;
use crate::algo::correction::{Level, guarded, mean};

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
    /// Ratios of the tokens `at`, with log-ratios clipped to `limits`.
    pub fn new(level: Level, limits: [f64; 2], inputs: &LossInputs, at: Range<usize>) -> Self {
        let own = differences(inputs, at);
        let (total, len) = (own.iter().sum::<f64>(), own.len());
        match level {
            Level::Token => Ratios {
                moves: own.iter().map(|&log_ratio| slope(log_ratio, limits)).collect(),
                log: own.into_iter().map(|log_ratio| log_ratio.clamp(limits[0], limits[1])).collect(),
                shared: false,
                bounded: Vec::new(),
            },
            Level::Sequence => Ratios { shared: true, ..Ratios::equal(total, 1.0, limits, len) },
            Level::Geometric => {
                let tokens = len.max(1) as f64;
                Ratios { shared: true, ..Ratios::equal(total / tokens, 1.0 / tokens, limits, len) }
            }
        }
    }

    /// The geometric mean of the ratios, which each token moves as if it were its own (GSPO-token;
    /// verl's `gspo`).
    ///
    /// The gradient equals that of [`Level::Geometric`] if advantages and weights are equal within
    /// a sequence.
    pub fn geometric_by_token(limits: [f64; 2], inputs: &LossInputs, at: Range<usize>) -> Self {
        let own = differences(inputs, at);
        Ratios::equal(own.iter().sum::<f64>() / own.len().max(1) as f64, 1.0, limits, own.len())
    }

    /// One log-ratio for `len` tokens.
    fn equal(log_ratio: f64, moves: f64, limits: [f64; 2], len: usize) -> Self {
        let moves = vec![slope(log_ratio, limits) * moves; len];
        Ratios { log: vec![log_ratio.clamp(limits[0], limits[1]); len], moves, shared: false, bounded: Vec::new() }
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
        let advantages = &inputs.advantages[at];
        let (log, bounded): (Vec<f64>, Vec<Clipped>) = own.into_iter().zip(advantages).map(bound).unzip();
        let of_all = mean(&log);
        let free = (limits[0]..=limits[1]).contains(&of_all);
        let share = if free { guarded(1.0, log.len()) } else { 0.0 };
        let moves = |(bounded, &advantage): (&Clipped, &f64)| match bounded {
            Clipped::No if advantage != 0.0 => share,
            _ => 0.0,
        };
        Ratios {
            moves: bounded.iter().zip(advantages).map(moves).collect(),
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

/// θ − anchor of the tokens `at`.
pub(in crate::algo) fn differences(inputs: &LossInputs, at: Range<usize>) -> Vec<f64> {
    inputs.log_probs[at.clone()].iter().zip(&inputs.anchor()[at]).map(|(theta, anchor)| theta - anchor).collect()
}
