//! Turns: what the engine is asked for, what it gives, and what new weights make of it.

use super::{Conversations, Key};
use crate::data::{Answer, SampledToken, Version};
use crate::engine::{FinishReason, Finished, Request, TokenEngine};
use crate::flow::StageError;
use crate::stages::generate::agent::rollout::Rollout;

impl Conversations {
    /// Asks the engine for the turns that are ready. Where what is computed together must not depend on timing (law V3), only when every rollout is
    /// ready or over.
    pub fn submit<E: TokenEngine>(&mut self, engine: &mut E, together: bool) -> Result<(), StageError> {
        if together && (self.wait_for_environments() || !engine.is_idle()) {
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
            // Those that have read the same and said nothing yet are one group to the engine, which reads their prompt once.
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
            engine.submit(Request {
                ordinal,
                tokens: tokens.clone(),
                first,
                offset,
                samples: first + count as u32,
                params: open.params.clone(),
                answers: if answer.tokens.is_empty() { Vec::new() } else { vec![answer.clone()] },
            })?;
            at += count;
        }
        Ok(())
    }

    /// The engine ended a turn.
    pub fn finished(&mut self, finished: Finished) -> Result<(), StageError> {
        let key = (finished.ordinal, finished.index);
        let Some(rollout) = self.rollouts.get_mut(&key) else { return Ok(()) };
        if rollout.expired {
            self.restart_expired(key);
            return Ok(());
        }
        let Finished { index, tokens, log_probs, versions, finish, refused, .. } = finished;
        let answer = Answer { index, tokens, log_probs, versions, status: finish.into() };
        if let Some(why) = refused {
            rollout.refused(answer, why);
            return self.over(key);
        }
        let ahead = rollout.sampled(answer, finish == FinishReason::Length, &self.setup.agent, &self.setup.tokenizer)?;
        self.go(key, ahead)
    }

    /// Environments that listen hear what a step sampled.
    pub fn hear(&mut self, sampled: &[SampledToken]) -> Result<(), StageError> {
        for token in sampled {
            if let Some(rollout) = self.rollouts.get_mut(&(token.ordinal, token.index)) {
                rollout.hear(token.token, &self.setup.tokenizer)?;
            }
        }
        Ok(())
    }

    /// The tokens of a step, as the ledger knows them.
    pub fn places<'a>(&'a self, sampled: &'a [SampledToken]) -> impl Iterator<Item = SampledToken> + 'a {
        let place = |token: &SampledToken| self.rollouts.get(&(token.ordinal, token.index)).map_or(token.index, Rollout::slot);
        sampled.iter().map(move |token| SampledToken { index: place(token), ..*token })
    }

    /// Begins rollouts anew whose oldest token would be too old when trained under these weights (law V2): those that the engine works on.
    pub fn expire<E: TokenEngine>(&mut self, engine: &mut E, version: Version) {
        self.version = version;
        let Some(admission) = self.setup.admission.clone() else { return };
        let expired = engine.restart_expired(&|ordinal, answer| {
            self.rollouts
                .get(&(ordinal, answer.index))
                .is_some_and(|rollout| admission.expires(ordinal, &rollout.oldest(), version))
        });
        self.turns_anew(&expired);
    }

    /// The engine forgot what it had of these, and makes it from their prompts again. What it begins anew is a turn; the conversation before it has
    /// to go, too, as soon as the engine gives the turn back.
    pub fn turns_anew(&mut self, keys: &[Key]) {
        for key in keys {
            let Some(rollout) = self.rollouts.get_mut(key) else { continue };
            rollout.forgotten();
            rollout.slots().collect::<Vec<_>>().into_iter().for_each(|slot| self.discard(key.0, slot));
        }
    }
}
