//! Penalties of tokens that were read or said, and biases of tokens: pure functions.
//!
//! A score `s` of a token becomes `r(s + bias) − frequency · n − presence · [n > 0]`, where `n` is how
//! often the completion has the token, and `r` divides a positive score of a token of prompt or completion
//! by the repetition penalty and multiplies any other by it (Keskar et al., CTRL, 2019). This is the order
//! of vLLM; temperature and truncation follow.

use std::collections::HashMap;

use super::SamplingParams;

/// Change of the score of one token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adjusted {
    /// The token.
    pub token: u32,
    /// Added first.
    pub bias: f32,
    /// Divides a positive score, multiplies any other.
    pub divisor: f32,
    /// Subtracted last.
    pub less: f32,
}

impl Adjusted {
    /// The score that replaces `score`.
    pub fn of(&self, score: f32) -> f32 {
        let biased = score + self.bias;
        (if biased > 0.0 { biased / self.divisor } else { biased * self.divisor }) - self.less
    }
}

/// Changes after a prompt and what was said of its completion, one for each token with any, in no order.
/// Costs a look at each of these tokens.
pub fn adjusted<'a>(params: &SamplingParams, prompt: &[u32], said: impl Iterator<Item = &'a u32>) -> Vec<Adjusted> {
    if !params.adjusts() {
        return Vec::new();
    }
    let mut all = HashMap::new();
    let none = |token| Adjusted { token, bias: 0.0, divisor: 1.0, less: 0.0 };
    for (&token, &bias) in &params.logit_bias {
        all.entry(token).or_insert(none(token)).bias = bias;
    }
    if params.repetition_penalty != 1.0 {
        for &token in prompt {
            all.entry(token).or_insert(none(token)).divisor = params.repetition_penalty;
        }
    }
    let mut counts: HashMap<u32, u32> = HashMap::new();
    said.for_each(|token| *counts.entry(*token).or_default() += 1);
    for (token, count) in counts {
        let of = all.entry(token).or_insert(none(token));
        of.divisor = params.repetition_penalty;
        of.less = params.frequency_penalty * count as f32 + params.presence_penalty;
    }
    all.into_values().collect()
}

/// Changes scores of a vocabulary.
pub fn adjust(scores: &mut [f32], adjusted: &[Adjusted]) {
    for of in adjusted {
        let score = &mut scores[of.token as usize];
        *score = of.of(*score);
    }
}
