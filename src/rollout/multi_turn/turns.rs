//! The engine's half of multi-turn rollouts: requests, sampled tokens and new weights.

use std::time::Duration;

use super::{Key, MultiTurn, NextStep, Rollout, StopReason};
use crate::data::{Answer, Group, Prompt, SampledToken, Version};
use crate::engine::{EngineError, FinishReason, Finished, Request, SamplingParams, TokenEngine};
use crate::rollout::Rollouts;

impl<E: TokenEngine> Rollouts<E> for MultiTurn {
    fn admit(&mut self, _: &mut E, prompt: Prompt, size: u32, params: SamplingParams) -> Result<(), EngineError> {
        if self.open.contains_key(&prompt.ordinal) {
            return Err(EngineError::same_ordinal(prompt.ordinal));
        }
        self.open(prompt, size, params);
        Ok(())
    }

    fn is_idle(&self, _: &E) -> bool {
        self.rollouts.is_empty()
    }

    fn room(&self, engine: &E) -> usize {
        let free = engine.free_slots();
        match self.context.lockstep {
            true if self.environments_at_work() || !engine.is_idle() => 0,
            true => free.max(usize::from(engine.is_idle())).saturating_sub(self.rollouts.len()),
            false if self.rollouts.len() < self.limit => free,
            false => 0,
        }
    }

    fn expire(&mut self, engine: &mut E, version: Version) {
        self.version = version;
        let Some(admission) = self.context.admission.clone() else { return };
        let expired = engine.restart_expired(&|ordinal, answer| {
            let expires = |answer: &Answer| admission.expires(ordinal, answer, version);
            // Of a first turn only the engine has tokens.
            self.rollouts.get(&(ordinal, answer.index)).is_some_and(|rollout| expires(answer) || expires(&rollout.oldest()))
        });
        self.discard_turns(&expired);
    }

    fn submit(&mut self, engine: &mut E) -> Result<(), EngineError> {
        if self.context.lockstep && (self.environments_at_work() || !engine.is_idle()) {
            return Ok(());
        }
        let ready: Vec<Key> = std::mem::take(&mut self.ready).into_iter().collect();
        let mut at = 0;
        while let Some(&(ordinal, first)) = ready.get(at) {
            let (Some(rollout), Some(open)) = (self.rollouts.get(&(ordinal, first)), self.open.get(&ordinal)) else {
                at += 1;
                continue;
            };
            let (tokens, answer, offset) = rollout.request();
            // First turns with the same context are one request, whose prompt is read once.
            let alike = |place: usize| {
                let key = (ordinal, first + place as u32);
                let same = |rollout: &Rollout| {
                    let (other, answer, offset) = rollout.request();
                    answer.tokens.is_empty() && offset == 0 && other == tokens
                };
                ready.get(at + place) == Some(&key) && self.rollouts.get(&key).is_some_and(same)
            };
            let begun = !answer.tokens.is_empty() || offset > 0;
            let count = if begun { 1 } else { (1..).take_while(|place| alike(*place)).count() + 1 };
            if tokens.is_empty() && answer.tokens.is_empty() {
                let reason = "the model was asked to continue an empty text";
                (first..first + count as u32).try_for_each(|index| self.turn_rejected((ordinal, index), reason))?;
                at += count;
                continue;
            }
            let submitted = engine.submit(Request {
                first,
                offset,
                answers: if answer.tokens.is_empty() { Vec::new() } else { vec![answer.clone()] },
                ..Request::new(ordinal, tokens.clone(), first + count as u32, open.params.clone())
            });
            match submitted {
                Err(error @ EngineError::TooLong { .. }) => {
                    let reason = error.to_string();
                    (first..first + count as u32).try_for_each(|index| self.turn_rejected((ordinal, index), &reason))?;
                }
                submitted => submitted?,
            }
            at += count;
        }
        Ok(())
    }

    fn awaits_environments(&self) -> bool {
        self.environments_at_work()
    }

    fn poll(&mut self, wait: Duration) -> Result<(), EngineError> {
        self.poll_environments(wait)
    }

    fn record(&mut self, engine: &E, finished: Vec<Finished>) -> Result<(), EngineError> {
        self.discard_turns(engine.discarded());
        for token in engine.sampled() {
            if let Some(rollout) = self.rollouts.get_mut(&(token.ordinal, token.index)) {
                rollout.stream(token.token, &self.context.tokenizer)?;
            }
        }
        if let Some(admission) = &self.context.admission {
            let index = |token: &SampledToken| {
                self.rollouts.get(&(token.ordinal, token.index)).map_or(token.index, Rollout::ledger_index)
            };
            admission.sampled(engine.sampled().iter().map(|token| SampledToken { index: index(token), ..token.clone() }));
        }
        finished.into_iter().try_for_each(|finished| self.add_turn(finished))
    }

    /// Groups are sorted by id, so that their order does not depend on timing.
    fn take_groups(&mut self) -> Vec<Group> {
        let mut groups = std::mem::take(&mut self.complete);
        groups.sort_by_key(Group::id);
        groups
    }
}

impl MultiTurn {
    /// Ends a rollout whose next turn is too long for the engine: after an earlier turn it is graded, a first
    /// turn is refused.
    fn turn_rejected(&mut self, key: Key, reason: &str) -> Result<(), EngineError> {
        let Some(rollout) = self.rollouts.get_mut(&key) else { return Ok(()) };
        if rollout.turns > 0 && !rollout.part.context.is_empty() {
            rollout.stop = Some(StopReason::MaxTokens);
            return self.proceed(key, NextStep::Grade { cut_off: None });
        }
        let answer = rollout.part.answer.clone();
        rollout.refuse(answer, reason.to_owned());
        self.finish(key)
    }

    /// Adds a turn that the engine has ended.
    fn add_turn(&mut self, finished: Finished) -> Result<(), EngineError> {
        let key = (finished.ordinal, finished.index);
        let Some(rollout) = self.rollouts.get_mut(&key) else { return Ok(()) };
        if rollout.expired {
            self.restart(key);
            return Ok(());
        }
        let status = finished.status();
        let Finished { index, tokens, log_probs, versions, routes, finish, .. } = finished;
        let answer = Answer { index, tokens, log_probs, versions, status, routes };
        let finish = match finish {
            Ok(finish) => finish,
            Err(reason) => {
                rollout.refuse(answer, reason);
                return self.finish(key);
            }
        };
        let next = rollout.add_turn(answer, finish == FinishReason::Length, &self.agent, &self.context.tokenizer)?;
        self.proceed(key, next)
    }

    /// Discards rollouts of which the engine restarts a turn. If the turn was not the first, the
    /// rollout restarts as soon as the engine has ended it.
    fn discard_turns(&mut self, keys: &[Key]) {
        for key in keys {
            let Some(rollout) = self.rollouts.get_mut(key) else { continue };
            rollout.turn_discarded();
            rollout.ledger_indices().for_each(|index| self.context.discard(key.0, index));
        }
    }
}
