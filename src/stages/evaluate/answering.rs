//! How the prompts of an evaluation come to answers: in one turn each, or as rollouts in an environment.

use std::sync::Arc;
use std::time::Duration;

use super::evaluation::{EvaluationError, Exam};
use crate::data::{Group, Prompt, Tokenizer};
use crate::engine::{Request, SamplingParams, TokenEngine};
use crate::flow::StageError;
use crate::stages::generate::agent::{Conversations, Setup};
use crate::stages::generate::assembly::Assembly;

/// How long a call waits for environments when there is nothing to compute.
const LOOK: Duration = Duration::from_millis(10);

/// Answers under way.
pub(super) enum Answering {
    /// An answer is a turn.
    Turns { open: Assembly, tokenizer: Arc<Tokenizer>, groups: Vec<Group> },
    /// An answer is a rollout. What is computed together, and what enters when, depends on no timing: all wait for the slowest environment.
    Rollouts(Box<Conversations>),
}

impl Answering {
    pub fn new(exam: &Exam, tokenizer: &Arc<Tokenizer>) -> Self {
        let tokenizer = tokenizer.clone();
        match &exam.agent {
            None => Answering::Turns { open: Assembly::new(false), tokenizer, groups: Vec::new() },
            Some(agent) => {
                let agent = agent.clone();
                let setup = Setup { agent, tokenizer, mask_older: false, admission: None, metrics: None };
                Answering::Rollouts(Box::new(Conversations::new(setup)))
            }
        }
    }

    /// How many more answers may begin now.
    pub fn room<E: TokenEngine>(&self, engine: &E) -> usize {
        let free = engine.free_slots().max(usize::from(engine.is_idle()));
        match self {
            Answering::Turns { .. } => free,
            Answering::Rollouts(all) if all.wait_for_environments() || !engine.is_idle() => 0,
            Answering::Rollouts(all) => free.saturating_sub(all.under_way()),
        }
    }

    /// A prompt enters, to be answered so often.
    pub fn ask<E: TokenEngine>(
        &mut self,
        engine: &mut E,
        prompt: Prompt,
        samples: u32,
        params: SamplingParams,
    ) -> Result<(), EvaluationError> {
        match self {
            Answering::Turns { open, tokenizer, .. } => {
                let (ordinal, temperature) = (prompt.ordinal, params.temperature);
                let tokens: Arc<[u32]> = tokenizer.encode_prompt(&prompt)?.into();
                engine.submit(Request::new(ordinal, tokens.clone(), samples, Arc::new(params)))?;
                open.open(prompt, tokens, samples, temperature);
            }
            Answering::Rollouts(all) => all.admit(prompt, samples, params),
        }
        Ok(())
    }

    /// One token of every answer under way, or what environments gave.
    pub fn advance<E: TokenEngine>(&mut self, engine: &mut E) -> Result<(), EvaluationError> {
        match self {
            Answering::Turns { open, tokenizer, groups } => {
                for finished in engine.step()? {
                    groups.extend(open.add(finished, tokenizer)?);
                }
                Ok(())
            }
            Answering::Rollouts(all) => converse(all, engine).map_err(EvaluationError::of_rollouts),
        }
    }

    /// Those whose answers are all there.
    pub fn take_groups(&mut self) -> Vec<Group> {
        match self {
            Answering::Turns { groups, .. } => std::mem::take(groups),
            // In the same order however long each took.
            Answering::Rollouts(all) if all.wait_for_environments() => Vec::new(),
            Answering::Rollouts(all) => {
                let mut groups = all.take_groups();
                groups.sort_by_key(Group::id);
                groups
            }
        }
    }
}

fn converse<E: TokenEngine>(all: &mut Conversations, engine: &mut E) -> Result<(), StageError> {
    all.submit(engine, true)?;
    if engine.is_idle() {
        return all.environments(LOOK);
    }
    let finished = engine.step()?;
    all.hear(engine.sampled())?;
    finished.into_iter().try_for_each(|finished| all.finished(finished))
}
