//! Samples that wait for a slot, with partial completions after an interruption.

use std::borrow::Cow;
use std::sync::Arc;

use super::scheduler::Scheduler;
use super::{FinishReason, Finished, Request};
use crate::data::{Answer, Status};

/// Sample that waits for a slot.
#[derive(Clone)]
pub struct Waiting {
    pub request: Arc<Request>,
    /// Partial completion, which has not ended.
    pub begun: Option<Answer>,
}

impl Waiting {
    /// Tokens to prefill before the next token is drawn.
    pub fn tokens(&self) -> Cow<'_, [u32]> {
        let prompt = &self.request.tokens;
        self.begun.as_ref().map_or(Cow::Borrowed(prompt), |answer| Cow::Owned([prompt, answer.tokens.as_slice()].concat()))
    }
}

impl Waiting {
    /// Largest number of tokens at the end of the sample's turn.
    #[cfg(feature = "torch")]
    pub fn longest(&self) -> usize {
        let given = self.begun.as_ref().map_or(0, |answer| answer.tokens.len() - answer.turn());
        self.request.tokens.len() + given + self.request.params.max_new_tokens
    }
}

impl Scheduler<Waiting> {
    /// Queues a request's samples. Returns partial completions that have ended already.
    pub fn take_in(&mut self, mut request: Request) -> Vec<Finished> {
        let Request { ordinal, first, samples, params, answers, .. } = &mut request;
        let (ordinal, first, samples, max_new_tokens) = (*ordinal, *first, *samples, params.max_new_tokens);
        let mut answers: Vec<Answer> = std::mem::take(answers).into_iter().filter(|answer| !answer.tokens.is_empty()).collect();
        answers.sort_by_key(|answer| answer.index);
        let request = Arc::new(request);
        let (mut next, mut ended) = (first, Vec::new());
        for answer in answers {
            let index = answer.index;
            self.submit(Waiting { request: request.clone(), begun: None }, next..index);
            next = index + 1;
            match finish_of(&answer, max_new_tokens) {
                Some(finish) => ended.push(Finished::new(ordinal, answer, finish)),
                None => self.submit(Waiting { request: request.clone(), begun: Some(answer) }, index..next),
            }
        }
        self.submit(Waiting { request, begun: None }, next..samples);
        ended
    }
}

/// Reason for the end of a partial completion, if it has ended. One without room for a token has.
pub(super) fn finish_of(answer: &Answer, max_new_tokens: usize) -> Option<FinishReason> {
    match answer.status {
        Status::Completed => Some(FinishReason::Stop),
        Status::Truncated => Some(FinishReason::Length),
        Status::Pending | Status::Aborted => (answer.turn() >= max_new_tokens).then_some(FinishReason::Length),
    }
}
