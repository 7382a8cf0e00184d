//! Probability ratios, what shares one, and how their slopes come back to log-probabilities.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::surrogate::Clipped;
use crate::algo::LossInputs;
use crate::algo::correction::{guarded, mean};

/// What shares one probability ratio ρ = π_θ / π_anchor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RatioLevel {
    /// A token: exp(θ − anchor) (PPO, GRPO).
    #[default]
    Token,
    /// A sequence: the product of its tokens' ratios. Its variance grows with length.
    Sequence,
    /// A sequence: the geometric mean of its tokens' ratios, exp(mean(θ − anchor)) (GSPO; TRL's `importance_sampling_level = "sequence"`).
    Geometric,
    /// The same value, but a token moves it as if it were its own (GSPO-token; verl's `gspo`): the same gradient as `Geometric` where advantages
    /// and weights are the same all over a sequence, and the right one where advantages differ by token.
    GeometricToken,
}

impl RatioLevel {
    pub(super) fn is_token(self) -> bool {
        self == RatioLevel::Token
    }
}

/// The log-ratios of one sequence, one per token.
pub(super) struct Ratios {
    pub log: Vec<f64>,
    /// How a token's log-probability moves its log-ratio, or all of them where they are one.
    moves: Vec<f64>,
    shared: bool,
    /// What was bounded before the ratio was taken; empty where a surrogate does that later.
    pub bounded: Vec<Clipped>,
}

impl Ratios {
    /// Those of the tokens `at`, cut to `limits`.
    pub fn new(level: RatioLevel, limits: [f64; 2], inputs: &LossInputs, at: Range<usize>) -> Self {
        let own = differences(inputs, at);
        let len = own.len();
        let cut = |log_ratio: f64| log_ratio.clamp(limits[0], limits[1]);
        // A bound that holds has no slope.
        let free = |log_ratio: f64| f64::from(u8::from((limits[0]..=limits[1]).contains(&log_ratio)));
        let total: f64 = own.iter().sum();
        let of_all = if level == RatioLevel::Sequence { total } else { total / len.max(1) as f64 };
        let all = |moves: f64, shared| {
            let moves = vec![free(of_all) * moves; len];
            Ratios { log: vec![cut(of_all); len], moves, shared, bounded: Vec::new() }
        };
        match level {
            RatioLevel::Token => Ratios {
                moves: own.iter().map(|&log_ratio| free(log_ratio)).collect(),
                log: own.into_iter().map(cut).collect(),
                shared: false,
                bounded: Vec::new(),
            },
            RatioLevel::Sequence => all(1.0, true),
            RatioLevel::Geometric => all(1.0 / len.max(1) as f64, true),
            RatioLevel::GeometricToken => all(1.0, false),
        }
    }

    /// The geometric mean of ratios that are bounded first, each on the side that its advantage pushes to: no higher than e^`high` where it
    /// is positive, no lower than e^−`low` where it is negative; a token without advantage adds nothing (GMPO).
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

    /// Adds what slopes by log-ratio, one per token, are by log-probability.
    pub fn pull_back(&self, slopes: &[f64], grad: &mut [f64]) {
        let total: f64 = if self.shared { slopes.iter().sum() } else { 0.0 };
        for ((grad, moves), slope) in grad.iter_mut().zip(&self.moves).zip(slopes) {
            *grad += moves * if self.shared { total } else { *slope };
        }
    }
}

/// θ − anchor of the tokens `at`.
pub(super) fn differences(inputs: &LossInputs, at: Range<usize>) -> Vec<f64> {
    inputs.log_probs[at.clone()].iter().zip(&inputs.anchor()[at]).map(|(theta, anchor)| theta - anchor).collect()
}
