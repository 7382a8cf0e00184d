//! VESPO: weights of whole sequences by a function of their ratio.

use std::ops::Range;

use crate::algo::LossInputs;
use crate::algo::correction::Level;
use crate::algo::policy_loss::{Clipped, Ratios, Sequence, Surrogate, Term, Token, differences};
use crate::settings::declare::section;
use crate::settings::setting::{FINITE, POSITIVE};

section! {
    /// Weights a completion of ratio w by `e^lambda w^k e^(−lambda w)`.
    pub struct Vespo {
        /// k for advantages of 0 and more.
        k_pos: f64 = 2.0, FINITE;
        /// lambda for advantages of 0 and more.
        lambda_pos: f64 = 3.0, POSITIVE;
        /// k for negative advantages.
        k_neg: f64 = 3.0, FINITE;
        /// lambda for negative advantages.
        lambda_neg: f64 = 2.0, POSITIVE;
    }
}

/// `−sg(φ(w)) A θ` with w the product of a sequence's ratios and importance weights.
impl Surrogate for Vespo {
    fn name(&self) -> &'static str {
        "vespo"
    }

    fn sequence(&self, limits: [f64; 2], inputs: &LossInputs, at: Range<usize>) -> Sequence {
        let mut sequence = Sequence::new(Ratios::new(Level::Token, limits, inputs, at.clone()), inputs, at.clone());
        // TRL's bounds.
        let lowest = 1e-8f64.ln();
        let own: f64 = differences(inputs, at.clone()).iter().map(|log_ratio| log_ratio.clamp(-20.0, 20.0)).sum();
        let given: f64 = sequence.importance.iter().map(|weight| weight.ln().clamp(lowest, 20.0)).sum();
        sequence.log_weight = (own + given).clamp(lowest, 20.0);
        sequence.importance = vec![1.0; at.len()];
        sequence
    }

    fn term(&self, token: &Token) -> Term {
        Term::weighted(self.phi(token.log_weight, token.advantage), token, Clipped::No)
    }
}

impl Vespo {
    /// `φ(w) = e^λ wᵏ e^−λw`, which is 1 at w = 1.
    fn phi(&self, log_weight: f64, advantage: f64) -> f64 {
        let (k, lambda) = if advantage >= 0.0 { (self.k_pos, self.lambda_pos) } else { (self.k_neg, self.lambda_neg) };
        let lambda = lambda.max(1e-4);
        let phi = (lambda + k * log_weight - lambda * log_weight.exp()).exp();
        if phi.is_finite() { phi } else { 0.0 }
    }
}
