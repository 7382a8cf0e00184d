//! Surrogate of a policy loss: the term of a token by its ratio and advantage, which gives a method
//! its name.

use std::ops::Range;

use super::ratio::Ratios;
use crate::algo::LossInputs;
use crate::algo::correction::Level;

/// Fixed properties of a method.
pub(in crate::algo) struct Method {
    /// Name in errors and logs.
    pub name: &'static str,
    /// Level of the probability ratio.
    pub level: Level,
    /// If true, it compares tokens of the whole optimizer batch.
    pub whole_batch: bool,
    /// If true, no token of a sequence can be masked.
    pub whole_sequences: bool,
    /// If true, a token with advantage 0 adds nothing to loss and gradient.
    pub ignores_zero_advantage: bool,
}

impl Method {
    /// A method at token level, for any part of a batch, that ignores tokens with advantage 0.
    pub fn named(name: &'static str) -> Self {
        Method { name, level: Level::Token, whole_batch: false, whole_sequences: false, ignores_zero_advantage: true }
    }
}

/// Term of a token by its ratio ρ, its log-probability θ and its advantage A. `sg` marks a constant
/// for the gradient.
pub(in crate::algo) trait Surrogate {
    /// Name, level and needs.
    fn method(&self) -> Method;

    /// Term of one token, and its derivatives.
    fn term(&self, token: &Token) -> Term;

    /// Values that the tokens `at` of one sequence share. Log-ratios are clipped to `limits`.
    fn sequence(&self, limits: [f64; 2], inputs: &LossInputs, at: Range<usize>) -> Sequence {
        Sequence::new(Ratios::new(self.method().level, limits, inputs, at.clone()), inputs, at)
    }

    /// Marks the tokens that get another term, one entry per token; empty if there are none.
    fn singled_out(&self, _inputs: &LossInputs) -> Vec<bool> {
        Vec::new()
    }

    /// First setting that contradicts another one, with the reason.
    fn conflict(&self) -> Option<(&'static str, &'static str)> {
        None
    }
}

/// Values that the tokens of one sequence share.
pub(in crate::algo) struct Sequence {
    at: Range<usize>,
    pub ratios: Ratios,
    /// Factor of each token's term.
    pub importance: Vec<f64>,
    /// Advantage of all tokens, for a surrogate that takes their mean.
    pub advantage: Option<f64>,
    /// Logarithm of the sequence's weight, for [`Vespo`](crate::algo::Vespo).
    pub log_weight: f64,
}

impl Sequence {
    /// The tokens `at` with these ratios and the importance weights of `inputs`.
    pub fn new(ratios: Ratios, inputs: &LossInputs, at: Range<usize>) -> Self {
        let importance = inputs.importance.map_or_else(|| vec![1.0; at.len()], |importance| importance[at.clone()].to_vec());
        Sequence { at, ratios, importance, advantage: None, log_weight: 0.0 }
    }

    pub fn token(&self, inputs: &LossInputs, t: usize, singled_out: bool) -> Token {
        Token {
            log_ratio: self.ratios.log[t - self.at.start],
            log_prob: inputs.log_probs[t],
            anchor: inputs.anchor()[t],
            advantage: self.advantage.unwrap_or(inputs.advantages[t]),
            log_weight: self.log_weight,
            singled_out,
        }
    }
}

/// One token, as a surrogate reads it.
#[derive(Clone, Copy, Debug)]
pub(in crate::algo) struct Token {
    pub log_ratio: f64,
    pub log_prob: f64,
    pub anchor: f64,
    pub advantage: f64,
    /// Logarithm of its sequence's weight.
    pub log_weight: f64,
    /// If true, [`Surrogate::singled_out`] marked it.
    pub singled_out: bool,
}

/// Term of a token, and its derivatives by log-ratio and by the token's own log-probability.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(in crate::algo) struct Term {
    pub value: f64,
    pub by_log_ratio: f64,
    pub by_log_prob: f64,
    pub clipped: Clipped,
}

impl Term {
    /// `−sg(weight) A θ`.
    pub fn weighted(weight: f64, token: &Token, clipped: Clipped) -> Self {
        let slope = -weight * token.advantage;
        Term { value: slope * token.log_prob, by_log_ratio: 0.0, by_log_prob: slope, clipped }
    }
}

/// Side on which the trust region clips a token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::algo) enum Clipped {
    #[default]
    No,
    Low,
    High,
}

impl Clipped {
    /// A token `below` the region is clipped if its advantage is negative, one `above` if it is
    /// positive.
    pub fn new(below: bool, above: bool, advantage: f64) -> Self {
        if below && advantage < 0.0 {
            Clipped::Low
        } else if above && advantage > 0.0 {
            Clipped::High
        } else {
            Clipped::No
        }
    }
}
