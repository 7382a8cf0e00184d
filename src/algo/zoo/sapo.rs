//! SAPO: a gate that closes smoothly instead of a clip.

use crate::algo::correction::Level;
use crate::algo::policy_loss::{Surrogate, Term, Token};
use crate::settings::declare::section;
use crate::settings::setting::POSITIVE;

section! {
    /// Gates ratios smoothly.
    pub struct Sapo {
        /// Temperature of the gate for positive advantages.
        tau_pos: f64 = 1.0, POSITIVE;
        /// Temperature of the gate for all other advantages.
        tau_neg: f64 = 1.05, POSITIVE;
        /// Level of the probability ratio.
        level: Level = Level::default();
    }
}

/// `−4/τ σ(τ(ρ − 1)) A`.
impl Surrogate for Sapo {
    fn name(&self) -> &'static str {
        "sapo"
    }

    fn level(&self) -> Level {
        self.level
    }

    fn term(&self, token: &Token) -> Term {
        let (ratio, advantage) = (token.log_ratio.exp(), token.advantage);
        let tau = if advantage > 0.0 { self.tau_pos } else { self.tau_neg };
        let gate = 1.0 / (1.0 + (-tau * (ratio - 1.0)).exp());
        let value = -gate * 4.0 / tau * advantage;
        Term { value, by_log_ratio: -4.0 * gate * (1.0 - gate) * ratio * advantage, ..Term::default() }
    }
}
