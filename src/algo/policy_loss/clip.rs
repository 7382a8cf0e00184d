//! Surrogates of many runs: GRPO and PPO, DAPO, GSPO, CISPO, and REINFORCE without a ratio.

use std::ops::Range;

use super::ratio::Ratios;
use super::surrogate::{Clipped, Method, Sequence, Surrogate, Term, Token};
use crate::algo::LossInputs;
use crate::algo::correction::Level;
use crate::settings::declare::section;
use crate::settings::section::NoKeys;
use crate::settings::setting::{BELOW_ONE, Limit, NOT_NEGATIVE, POSITIVE_IF_GIVEN};

const ABOVE_ONE_IF_GIVEN: Limit<Option<f64>> =
    Limit { text: "above 1", holds: |value| value.is_none_or(|number| number > 1.0 && number.is_finite()) };

section! {
    /// Clips ratios to a trust region.
    pub struct Grpo {
        /// Lower clip ε: ratios are clipped at 1 − `epsilon`.
        #[formerly(clip_low)]
        epsilon: f64 = 0.2, BELOW_ONE;
        /// Upper clip ε: ratios are clipped at 1 + `epsilon_high`.
        #[formerly(clip_high)]
        epsilon_high: f64 = 0.2, NOT_NEGATIVE;
        /// Largest ratio, for negative advantages too (two-sided clipping).
        delta: Option<f64> = None, POSITIVE_IF_GIVEN;
        /// Dual clip c: largest loss of a token of negative advantage, as a multiple of its
        /// advantage.
        dual_clip: Option<f64> = None, ABOVE_ONE_IF_GIVEN;
        /// Level of the probability ratio.
        level: Level = Level::default();
    }
}

section! {
    /// Clips ratios to a trust region with a higher upper clip.
    pub struct Dapo {
        /// Lower clip ε: ratios are clipped at 1 − `epsilon`.
        #[formerly(clip_low)]
        epsilon: f64 = 0.2, BELOW_ONE;
        /// Upper clip ε: ratios are clipped at 1 + `epsilon_high`.
        #[formerly(clip_high)]
        epsilon_high: f64 = 0.28, NOT_NEGATIVE;
    }
}

section! {
    /// Clips the ratios of whole completions.
    pub struct Gspo {
        /// Lower clip ε: a completion's ratio is clipped at 1 − `epsilon`.
        #[formerly(clip_low)]
        epsilon: f64 = 3e-4, BELOW_ONE;
        /// Upper clip ε: a completion's ratio is clipped at 1 + `epsilon_high`.
        #[formerly(clip_high)]
        epsilon_high: f64 = 4e-4, NOT_NEGATIVE;
        /// If true, each token has its own gradient (GSPO-token), which advantages that differ by
        /// token need.
        by_token: bool = false;
    }
}

section! {
    /// Bounds the weights of log-probabilities.
    pub struct Cispo {
        /// Lower clip ε: weights are bounded at 1 − `epsilon`; 1 or more is no bound.
        #[formerly(clip_low)]
        epsilon: f64 = 1.0, NOT_NEGATIVE;
        /// Upper clip ε: weights are bounded at 1 + `epsilon_high`.
        #[formerly(clip_high)]
        epsilon_high: f64 = 4.0, NOT_NEGATIVE;
        /// Level of the probability ratio.
        level: Level = Level::default();
    }
}

impl Grpo {
    /// A clip range at token level, without further bounds.
    pub(in crate::algo) fn clip(epsilon: f64, epsilon_high: f64) -> Self {
        Grpo { epsilon, epsilon_high, ..Grpo::default() }
    }
}

/// `−min(min(ρ, δ) A, clip(ρ, 1 − low, 1 + high) A)`, and for A < 0 at most `−c A`: with δ =
/// `delta`, the bound of the ratio itself (INTELLECT-2; TRL's `delta`), and c = `dual_clip`
/// (dual-clip PPO; verl's `clip_ratio_c`).
impl Surrogate for Grpo {
    fn method(&self) -> Method {
        let name = if self.level == Level::Token { "grpo" } else { "gspo" };
        Method { level: self.level, ..Method::named(name) }
    }

    fn term(&self, token: &Token) -> Term {
        let (ratio, advantage) = (token.log_ratio.exp(), token.advantage);
        let (floor, ceiling) = (1.0 - self.epsilon, 1.0 + self.epsilon_high);
        let bound = self.delta.unwrap_or(f64::INFINITY);
        let bounded = ratio.min(bound);
        let clipped = Clipped::new(bounded < floor, bounded > ceiling, advantage);
        let (free, held) = (bounded * advantage, ratio.clamp(floor, ceiling) * advantage);
        // dρ/d log ρ = ρ, and an active bound has no slope; 0 · A rather than 0, so that a NaN advantage shows.
        let slope = |moves: bool| if moves { -ratio * advantage } else { 0.0 * advantage };
        let (value, by_log_ratio) =
            if free <= held { (-free, slope(ratio <= bound)) } else { (-held, slope((floor..=ceiling).contains(&ratio))) };
        match self.dual_clip.map(|most| -most * advantage) {
            Some(most) if advantage < 0.0 && value > most => Term { value: most, by_log_ratio: 0.0, by_log_prob: 0.0, clipped },
            _ => Term { value, by_log_ratio, by_log_prob: 0.0, clipped },
        }
    }
}

impl Surrogate for Dapo {
    fn method(&self) -> Method {
        Method::named("grpo")
    }

    fn term(&self, token: &Token) -> Term {
        Grpo::clip(self.epsilon, self.epsilon_high).term(token)
    }
}

impl Surrogate for Gspo {
    fn method(&self) -> Method {
        Method { level: Level::Geometric, ..Method::named("gspo") }
    }

    fn sequence(&self, limits: [f64; 2], inputs: &LossInputs, at: Range<usize>) -> Sequence {
        let ratios = match self.by_token {
            true => Ratios::geometric_by_token(limits, inputs, at.clone()),
            false => Ratios::new(Level::Geometric, limits, inputs, at.clone()),
        };
        Sequence::new(ratios, inputs, at)
    }

    fn term(&self, token: &Token) -> Term {
        Grpo::clip(self.epsilon, self.epsilon_high).term(token)
    }
}

/// `−sg(clip(ρ, 1 − low, 1 + high)) A θ`. TRL's `epsilon_high` is 1 + `epsilon_high`.
impl Surrogate for Cispo {
    fn method(&self) -> Method {
        Method { level: self.level, ..Method::named("cispo") }
    }

    fn term(&self, token: &Token) -> Term {
        let ratio = token.log_ratio.exp();
        let (floor, ceiling) = (1.0 - self.epsilon, 1.0 + self.epsilon_high);
        let clipped = Clipped::new(ratio < floor, ratio > ceiling, token.advantage);
        Term::weighted(ratio.clamp(floor, ceiling), token, clipped)
    }
}

/// `−Aθ`: REINFORCE, which has no settings.
impl Surrogate for NoKeys {
    fn method(&self) -> Method {
        Method::named("gpg")
    }

    fn term(&self, token: &Token) -> Term {
        Term::weighted(1.0, token, Clipped::No)
    }
}
