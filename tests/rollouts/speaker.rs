//! An engine whose model is a closure: it says what a test wants said, token by token, under whatever version is there.

use std::collections::VecDeque;
use std::sync::Arc;

use rollflow::data::{Answer, SampledToken, Status, Version};
use rollflow::engine::{EngineError, FinishReason, Finished, Load, Request, TokenEngine};
use rollflow::prelude::*;

/// What a model says after these tokens, as a rollout of that place in its group.
type Says = Arc<dyn Fn(&str, u32) -> String + Send + Sync>;

pub struct Speaker {
    tokenizer: Tokenizer,
    says: Says,
    version: Version,
    /// A turn's request, the answer so far, and what is left to say.
    turns: Vec<(Request, Answer, VecDeque<u32>)>,
    sampled: Vec<SampledToken>,
    steps: usize,
    before_step: Box<dyn FnMut(usize)>,
}

impl Speaker {
    pub fn new(tokenizer: &Tokenizer, says: impl Fn(&str, u32) -> String + Send + Sync + 'static) -> Self {
        let (tokenizer, says) = (tokenizer.clone(), Arc::new(says));
        Speaker { tokenizer, says, version: 1, turns: Vec::new(), sampled: Vec::new(), steps: 0, before_step: Box::new(|_| ()) }
    }

    /// Calls this before every step, with how many there were.
    #[allow(dead_code, reason = "each test binary uses its part")]
    pub fn before_step(self, call: impl FnMut(usize) + 'static) -> Self {
        Speaker { before_step: Box::new(call), ..self }
    }
}

impl TokenEngine for Speaker {
    type Weights = ();

    fn submit(&mut self, request: Request) -> Result<(), EngineError> {
        for index in request.first..request.samples {
            let answer = request.answers.iter().find(|answer| answer.index == index).cloned().unwrap_or(Answer::new(index));
            let read = self.tokenizer.decode_all(&[&request.tokens[..], &answer.tokens].concat()).unwrap();
            let left = self.tokenizer.completion(&(self.says)(&read, index)).unwrap().into();
            self.turns.push((request.clone(), answer, left));
        }
        Ok(())
    }

    fn set_weights(&mut self, version: Version, _: &()) {
        self.version = version;
    }

    fn restart_expired(&mut self, _: &dyn Fn(u64, &Answer) -> bool) -> Vec<(u64, u32)> {
        Vec::new()
    }

    fn version(&self) -> Option<Version> {
        Some(self.version)
    }

    fn is_idle(&self) -> bool {
        self.turns.is_empty()
    }

    fn free_slots(&self) -> usize {
        64_usize.saturating_sub(self.turns.len())
    }

    fn active(&self) -> usize {
        self.turns.len()
    }

    fn limit_slots(&mut self, _: usize) {}

    fn step(&mut self) -> Result<Vec<Finished>, EngineError> {
        self.sampled.clear();
        (self.before_step)(self.steps);
        self.steps += 1;
        let (mut finished, mut going) = (Vec::new(), Vec::new());
        for (request, mut answer, mut left) in std::mem::take(&mut self.turns) {
            let Some(token) = left.pop_front() else { continue };
            answer.push(token, -0.5, self.version);
            let end = match (left.is_empty(), answer.turn() >= request.params.max_new_tokens) {
                (true, _) => Some(FinishReason::Stop),
                (_, true) => Some(FinishReason::Length),
                _ => None,
            };
            let (ordinal, index, version) = (request.ordinal, answer.index, self.version);
            let status = end.map_or(Status::Pending, Status::from);
            self.sampled.push(SampledToken { ordinal, index, token, log_prob: -0.5, version, status, routes: None });
            match end {
                Some(end) => finished.push(Finished::new(ordinal, answer, Ok(end))),
                None => going.push((request, answer, left)),
            }
        }
        self.turns = going;
        Ok(finished)
    }

    fn sampled(&self) -> &[SampledToken] {
        &self.sampled
    }

    fn load(&self) -> Load {
        Load::default()
    }
}
