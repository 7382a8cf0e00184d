//! Surrogates that few use: SAPO, DRO, DPPO, GMPO and VESPO.

use std::ops::Range;

use crate::algo::LossInputs;
use crate::algo::correction::{Level, mean};
use crate::algo::policy_loss::{Clipped, Method, Ratios, Sequence, Surrogate, Term, Token, differences};
use crate::settings::declare::{choices, section};
use crate::settings::setting::{FINITE, NOT_NEGATIVE, POSITIVE};

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
    fn method(&self) -> Method {
        Method { level: self.level, ..Method::named("sapo") }
    }

    fn term(&self, token: &Token) -> Term {
        let (ratio, advantage) = (token.log_ratio.exp(), token.advantage);
        let tau = if advantage > 0.0 { self.tau_pos } else { self.tau_neg };
        let gate = 1.0 / (1.0 + (-tau * (ratio - 1.0)).exp());
        let value = -gate * 4.0 / tau * advantage;
        Term { value, by_log_ratio: -4.0 * gate * (1.0 - gate) * ratio * advantage, ..Term::default() }
    }
}

section! {
    /// Penalises squared log-ratios.
    pub struct Dro {
        /// Coefficient of the squared log-ratio.
        beta: f64 = 0.1, POSITIVE;
    }
}

/// `−(Aθ − ½β (log ρ)²)`.
impl Surrogate for Dro {
    fn method(&self) -> Method {
        Method { ignores_zero_advantage: false, ..Method::named("dro") }
    }

    fn term(&self, token: &Token) -> Term {
        let (distance, beta) = (token.log_ratio, self.beta);
        let value = -(token.log_prob * token.advantage - 0.5 * beta * distance * distance);
        Term { value, by_log_ratio: beta * distance, by_log_prob: -token.advantage, ..Term::default() }
    }
}

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
    fn method(&self) -> Method {
        Method::named("dppo")
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

section! {
    /// Bounds log-ratios.
    pub struct GeoMean {
        /// Lower bound: log-ratios are clipped at −`epsilon`.
        #[formerly(clip_low)]
        epsilon: f64 = 0.4, NOT_NEGATIVE;
        /// Upper bound: log-ratios are clipped at `epsilon_high`.
        #[formerly(clip_high)]
        epsilon_high: f64 = 0.4, NOT_NEGATIVE;
    }
}

/// `−mean(A) exp(mean(bounded log ρ))` over a sequence. Importance weights enter by their geometric
/// mean.
impl Surrogate for GeoMean {
    fn method(&self) -> Method {
        Method { level: Level::Geometric, whole_sequences: true, ..Method::named("geo_mean") }
    }

    fn sequence(&self, limits: [f64; 2], inputs: &LossInputs, at: Range<usize>) -> Sequence {
        let ratios = Ratios::bounded_each([self.epsilon, self.epsilon_high], limits, inputs, at.clone());
        let mean_of = |value: &dyn Fn(usize) -> f64| mean(&inputs.kept_of(at.clone()).map(value).collect::<Vec<_>>());
        // verl's guard against a weight of 0.
        let of_all = |importance: &[f64]| mean_of(&|t| (importance[t] + 1e-10).ln()).exp();
        let mut sequence = Sequence::new(ratios, inputs, at.clone());
        sequence.importance = vec![inputs.importance.map_or(1.0, of_all); at.len()];
        sequence.advantage = Some(mean_of(&|t| inputs.advantages[t]));
        sequence
    }

    fn term(&self, token: &Token) -> Term {
        let value = -token.log_ratio.exp() * token.advantage;
        Term { value, by_log_ratio: value, ..Term::default() }
    }
}

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
    fn method(&self) -> Method {
        Method::named("vespo")
    }

    fn sequence(&self, limits: [f64; 2], inputs: &LossInputs, at: Range<usize>) -> Sequence {
        let mut sequence = Sequence::new(Ratios::new(Level::Token, limits, inputs, at.clone()), inputs, at.clone());
        // TRL's bounds.
        let lowest = 1e-8f64.ln();
        let own: f64 = differences(inputs, at.clone()).iter().map(|log_ratio| log_ratio.clamp(-20.0, 20.0)).sum();
        let weight = |t: usize| sequence.importance[t - at.start].ln().clamp(lowest, 20.0);
        let given: f64 = inputs.kept_of(at.clone()).map(weight).sum();
        sequence.log_weight = (own + given).clamp(lowest, 20.0);
        sequence.importance = vec![1.0; at.len()];
        sequence
    }

    /// `φ(w) = e^λ wᵏ e^−λw`, which is 1 at w = 1.
    fn term(&self, token: &Token) -> Term {
        let positive = token.advantage >= 0.0;
        let (k, lambda) = if positive { (self.k_pos, self.lambda_pos) } else { (self.k_neg, self.lambda_neg) };
        let lambda = lambda.max(1e-4);
        let phi = (lambda + k * token.log_weight - lambda * token.log_weight.exp()).exp();
        Term::weighted(if phi.is_finite() { phi } else { 0.0 }, token, Clipped::No)
    }
}
