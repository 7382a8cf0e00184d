//! State of one sample in flight. Everything besides its tokens (random numbers, text for stop
//! strings) follows from its tokens, so only tokens are saved (laws C1, N2).

use std::rc::Rc;

use crate::data::{Answer, Tokenizer, Version};
use crate::engine::sampling::{Choice, uniform};
use crate::engine::slots::ActiveSample;
use crate::engine::stop::StopWatch;
use crate::engine::waiting::Waiting;
use crate::engine::{EngineError, FinishReason, Finished};
use crate::model::Views;

/// One version of the weights, kept while a sample uses it.
pub struct ServedWeights {
    pub version: Version,
    pub views: Views,
}

/// State for computing a sample's next token.
pub struct SequenceState {
    pub weights: Rc<ServedWeights>,
    watch: Option<StopWatch>,
}

/// Sample in a slot.
pub type Sequence = ActiveSample<SequenceState>;

impl Sequence {
    /// Starts sample `index` of a waiting request from its present tokens. With stop strings, this
    /// decodes its tokens.
    pub fn begin(waiting: &Waiting, index: u32, weights: &Rc<ServedWeights>, tokenizer: &Tokenizer) -> Result<Self, EngineError> {
        let Waiting { request, begun } = waiting.clone();
        let answer = begun.unwrap_or_else(|| Answer::new(index));
        let mut watch = (!request.params.stop.is_empty()).then(StopWatch::default);
        if let Some(watch) = &mut watch {
            let turn = &answer.tokens[answer.tokens.len() - answer.turn()..];
            for len in 1..=turn.len() {
                // A completion with a stop string would have ended.
                let _none = watch.feed(tokenizer, &turn[..len], &request.params.stop)?;
            }
        }
        Ok(Sequence { request, answer, state: SequenceState { weights: weights.clone(), watch } })
    }

    /// Newest token and its position, the input of a step.
    pub fn newest(&self) -> (i64, usize) {
        let token = self.answer.tokens.last().map_or(0, |&token| i64::from(token));
        (token, self.computed())
    }

    /// Number of tokens in the cache: all but the newest.
    pub fn computed(&self) -> usize {
        self.request.tokens.len() + self.answer.tokens.len() - 1
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

    /// Appends a token. Returns how that ended the sample, if so. An end token takes precedence
    /// over the length limit.
    pub fn take(&mut self, choice: Choice, tokenizer: &Tokenizer) -> Result<Option<FinishReason>, EngineError> {
        let Choice { token, log_prob } = choice;
        self.answer.push(token, log_prob, self.state.weights.version);
        let (params, made) = (&self.request.params, self.answer.turn());
        let turn = &self.answer.tokens[self.answer.tokens.len() - made..];
        let ends = (!params.ignore_eos && tokenizer.eos_token_ids().contains(&token)) || params.stop_token_ids.contains(&token);
        let stops = match &mut self.state.watch {
            Some(watch) if !ends => watch.feed(tokenizer, turn, &params.stop)?.is_some(),
            _ => false,
        };
        let full = made >= params.max_new_tokens;
        Ok(if ends || stops { Some(FinishReason::Stop) } else { full.then_some(FinishReason::Length) })
    }

    pub fn finished(self, finish: FinishReason) -> Finished {
        Finished::new(self.request.ordinal, self.answer, finish)
    }
}
