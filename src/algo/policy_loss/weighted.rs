//! Surrogates that weight log-probabilities: CISPO, and REINFORCE without a ratio.

use super::surrogate::{Clipped, Surrogate, Term, Token};
use crate::algo::correction::Level;
use crate::settings::declare::section;
use crate::settings::section::NoKeys;
use crate::settings::setting::NOT_NEGATIVE;

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

/// `−sg(clip(ρ, 1 − low, 1 + high)) A θ`. TRL's `epsilon_high` is 1 + `epsilon_high`.
impl Surrogate for Cispo {
    fn name(&self) -> &'static str {
        "cispo"
    }

    fn level(&self) -> Level {
        self.level
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
    fn name(&self) -> &'static str {
        "gpg"
    }

    fn term(&self, token: &Token) -> Term {
        Term::weighted(1.0, token, Clipped::No)
    }
}
