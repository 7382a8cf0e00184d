//! DRO: direct reward optimization, a squared log-ratio as penalty.

use crate::algo::policy_loss::{Surrogate, Term, Token};
use crate::settings::declare::section;
use crate::settings::setting::POSITIVE;

section! {
    /// Penalises squared log-ratios.
    pub struct Dro {
        /// Coefficient of the squared log-ratio.
        beta: f64 = 0.1, POSITIVE;
    }
}

/// `−(Aθ − ½β (log ρ)²)`.
impl Surrogate for Dro {
    fn name(&self) -> &'static str {
        "dro"
    }

    fn ignores_zero_advantage(&self) -> bool {
        false
    }

    fn term(&self, token: &Token) -> Term {
        let (distance, beta) = (token.log_ratio, self.beta);
        let value = -(token.log_prob * token.advantage - 0.5 * beta * distance * distance);
        Term { value, by_log_ratio: beta * distance, by_log_prob: -token.advantage, ..Term::default() }
    }
}
