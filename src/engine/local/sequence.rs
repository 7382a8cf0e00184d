//! State of one sample in flight. Everything besides its tokens (random numbers, text for stop
//! strings) follows from its tokens, so only tokens are saved (laws C1, N2).

use std::rc::Rc;

use crate::data::{Answer, Tokenizer, Version};
use crate::engine::sampling::uniform;
use crate::engine::slots::ActiveSample;
use crate::engine::stop::StopWatch;
use crate::engine::{EngineError, FinishReason};
use crate::model::Views;

/// One version of the weights, kept while a sample uses it.
pub struct ServedWeights {
    pub version: Version,
    pub views: Views,
}

pub struct SequenceState {
    pub weights: Rc<ServedWeights>,
    watch: StopWatch,
}

pub type Sequence = ActiveSample<SequenceState>;

impl SequenceState {
    pub fn new(weights: &Rc<ServedWeights>) -> Self {
        SequenceState { weights: weights.clone(), watch: StopWatch::default() }
    }
}

impl Sequence {
    /// Newest token and its position, the input of a step.
    pub fn newest(&self) -> (i64, usize) {
        let token = self.answer.tokens.last().map_or(0, |&token| i64::from(token));
        (token, self.computed())
    }

    /// Uniform number that decides the next token.
    pub fn uniform(&self, run_seed: u64) -> f64 {
        let Answer { index, tokens, .. } = &self.answer;
        // A greedy choice needs none, and a key costs more than an argmax of a small vocabulary.
        if self.request.params.greedy() {
            0.0
        } else {
            uniform(run_seed, self.request.ordinal, *index, self.request.offset + tokens.len())
        }
    }

    /// Appends a token. Returns how that ended the sample, if so.
    pub fn take(&mut self, token: u32, log_prob: f32, tokenizer: &Tokenizer) -> Result<Option<FinishReason>, EngineError> {
        self.answer.push(token, log_prob, self.state.weights.version);
        Ok(self.state.watch.ends(&self.answer, &self.request.params, tokenizer)?)
    }
}
