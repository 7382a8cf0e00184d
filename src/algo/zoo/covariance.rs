//! Clip-Cov and KL-Cov: another term for tokens with a large covariance of advantage and
//! log-probability.
//!
//! These tokens lose entropy fastest (Cui et al., The Entropy Mechanism of Reinforcement Learning,
//! 2025). Both surrogates compare the tokens of the whole optimizer batch.

use crate::algo::LossInputs;
use crate::algo::correction::mean;
use crate::algo::policy_loss::{Grpo, Method, Surrogate, Term, Token};
use crate::settings::declare::section;
use crate::settings::setting::{BELOW_ONE, FINITE, NOT_NEGATIVE, SHARE};
use crate::util::rng;

section! {
    /// Clips ratios, and leaves some tokens out.
    pub struct ClipCov {
        /// Lower clip ε: ratios are clipped at 1 − `epsilon`.
        #[formerly(clip_low)]
        epsilon: f64 = 0.2, BELOW_ONE;
        /// Upper clip ε: ratios are clipped at 1 + `epsilon_high`.
        #[formerly(clip_high)]
        epsilon_high: f64 = 0.2, NOT_NEGATIVE;
        /// Share of the step's tokens that are left out, at least one token.
        share: f64 = 2e-4, SHARE;
        /// Lower bound of the covariance between advantage and log-probability of tokens that may
        /// be left out.
        min: f64 = 1.0, FINITE;
        /// Upper bound of that covariance.
        max: f64 = 5.0, FINITE;
    }
}

section! {
    /// Penalises some tokens.
    pub struct KlCov {
        /// Share of the step's tokens that are penalised, those of largest covariance between
        /// advantage and log-probability; at least one token.
        share: f64 = 2e-4, SHARE;
        /// Coefficient of the penalty, the absolute log-ratio.
        coef: f64 = 0.1, NOT_NEGATIVE;
    }
}

/// The clipped surrogate, without gradient for tokens that are drawn from those in the covariance
/// range.
impl Surrogate for ClipCov {
    fn method(&self) -> Method {
        Method { whole_batch: true, ..Method::named("clip_cov") }
    }

    fn conflict(&self) -> Option<(&'static str, &'static str)> {
        (self.min >= self.max).then_some(("min", "no covariance is between it and max"))
    }

    fn singled_out(&self, inputs: &LossInputs) -> Vec<bool> {
        let covariances = covariances(inputs);
        let mut eligible: Vec<(u64, usize)> = Vec::new();
        for sequence in inputs.sequences {
            for t in sequence.clone() {
                let ratio = (inputs.log_probs[t] - inputs.anchor()[t]).exp();
                let advantage = inputs.advantages[t];
                let below = ratio < 1.0 - self.epsilon && advantage < 0.0;
                let above = ratio > 1.0 + self.epsilon_high && advantage > 0.0;
                if inputs.keeps(t) && !below && !above && covariances[t] > self.min && covariances[t] < self.max {
                    eligible.push((draw(inputs, sequence.start, t), t));
                }
            }
        }
        eligible.sort_by(|&(a, t), &(b, u)| a.cmp(&b).then(inputs.advantages[t].total_cmp(&inputs.advantages[u])));
        let order: Vec<usize> = eligible.into_iter().map(|(_, t)| t).collect();
        mark(&order, self.share, inputs)
    }

    fn term(&self, token: &Token) -> Term {
        match token.singled_out {
            true => Term { value: 0.0 * token.advantage * token.log_ratio.exp(), ..Term::default() },
            false => Grpo::clip(self.epsilon, self.epsilon_high).term(token),
        }
    }
}

/// `−ρA`, plus `coef · |log ρ|` for the tokens of largest covariance.
impl Surrogate for KlCov {
    fn method(&self) -> Method {
        Method { whole_batch: true, ..Method::named("kl_cov") }
    }

    fn singled_out(&self, inputs: &LossInputs) -> Vec<bool> {
        let covariances = covariances(inputs);
        let mut order: Vec<usize> = inputs.kept_of(0..covariances.len()).collect();
        order.sort_by(|&a, &b| covariances[b].total_cmp(&covariances[a]));
        mark(&order, self.share, inputs)
    }

    fn term(&self, token: &Token) -> Term {
        let coef = if token.singled_out { self.coef } else { 0.0 };
        let side = if token.log_ratio == 0.0 { 0.0 } else { token.log_ratio.signum() };
        let plain = -token.log_ratio.exp() * token.advantage;
        let value = plain + coef * token.log_ratio.abs();
        Term { value, by_log_ratio: plain + coef * side, ..Term::default() }
    }
}

/// `(A − mean A)(θ − mean θ)`, with means over the tokens that no rejection dropped.
fn covariances(inputs: &LossInputs) -> Vec<f64> {
    let mean_of = |column: &[f64]| mean(&inputs.kept_of(0..column.len()).map(|t| column[t]).collect::<Vec<_>>());
    let (advantage, log_prob) = (mean_of(inputs.advantages), mean_of(inputs.log_probs));
    inputs.advantages.iter().zip(inputs.log_probs).map(|(a, theta)| (a - advantage) * (theta - log_prob)).collect()
}

/// Random number of a token, by which tokens are drawn. verl permutes them at random. Here it
/// depends on the token's position and on the recorded log-probabilities of itself and of its
/// sequence's first token, so that parts and order of a batch do not matter (law N1).
fn draw(inputs: &LossInputs, first: usize, t: usize) -> u64 {
    let recorded = inputs.behaviour.unwrap_or(inputs.anchor());
    let words = [recorded[first].to_bits(), recorded[t].to_bits(), (t - first) as u64];
    words.into_iter().fold(0, |key, word| rng::mix(rng::state(key ^ word, 1)))
}

/// Marks the first tokens of `order`: this share of all that are kept, at least one.
fn mark(order: &[usize], share: f64, inputs: &LossInputs) -> Vec<bool> {
    let tokens = inputs.log_probs.len();
    let most = ((share * inputs.kept_of(0..tokens).count() as f64) as usize).max(1);
    let mut marked = vec![false; tokens];
    order.iter().take(most).for_each(|&t| marked[t] = true);
    marked
}
