//! DPPO: a mask on tokens whose probability has moved too far.

use crate::algo::policy_loss::{Clipped, Surrogate, Term, Token};
use crate::settings::declare::{choices, section};
use crate::settings::setting::{NOT_NEGATIVE, POSITIVE};

section! {
    /// Masks tokens that have moved too far.
    pub struct Dppo {
        /// Distance that a token has moved.
        divergence: BinaryDivergence = BinaryDivergence::default();
        /// Largest distance downward, for tokens whose advantage is not positive.
        #[formerly(clip_low)]
        epsilon: f64 = 0.2, NOT_NEGATIVE;
        /// Largest distance upward, for tokens of positive advantage.
        #[formerly(clip_high)]
        epsilon_high: f64 = 0.2, NOT_NEGATIVE;
        /// Largest weight.
        max_ratio: f64 = 20.0, POSITIVE;
    }
}

choices! {
    /// Distance between two probabilities of a token, with all other tokens taken as one.
    pub enum BinaryDivergence {
        /// total variation: |π_θ − π_anchor|.
        "tv" => TotalVariation,
        /// the divergence KL(anchor ‖ θ).
        "kl" => Kl,
    }
}

/// `−sg(min(ρ, max_ratio) · valid) A θ`, where a token is valid unless its advantage pushes it
/// beyond the divergence.
impl Surrogate for Dppo {
    fn name(&self) -> &'static str {
        "dppo"
    }

    fn term(&self, token: &Token) -> Term {
        let (too_high, too_low) = self.beyond(token);
        let clipped = match (token.advantage > 0.0, too_high, too_low) {
            (true, true, _) => Clipped::High,
            (false, _, true) => Clipped::Low,
            _ => Clipped::No,
        };
        let valid = f64::from(u8::from(clipped == Clipped::No));
        Term::weighted(token.log_ratio.exp().min(self.max_ratio) * valid, token, clipped)
    }
}

impl Dppo {
    /// If θ is too far above the anchor, and if it is too far below.
    fn beyond(&self, token: &Token) -> (bool, bool) {
        let (low, high) = (self.epsilon, self.epsilon_high);
        let (prob, old) = (token.log_prob.exp(), token.anchor.exp());
        match self.divergence {
            BinaryDivergence::TotalVariation => (prob - old > high, prob - old < -low),
            BinaryDivergence::Kl => {
                // verl's guard against a certain token.
                let rest = (1.0 - old) * ((1.0 - old + 1e-8) / (1.0 - prob + 1e-8)).ln();
                let kl = old * (token.anchor - token.log_prob) + rest;
                // NaN, which no bound admits, if rounding left a log-probability above 0.
                let (within_high, within_low) = (kl <= high, kl <= low);
                (!within_high && prob > old, !within_low && prob < old)
            }
        }
    }
}
