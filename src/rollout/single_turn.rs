//! Single-turn rollouts: each completion is one rollout.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{REFUSED, RolloutContext, Rollouts, rejects_conversation};
use crate::data::{Group, Partial, Prompt, Sample, Version, scoring_temperature};
use crate::engine::{EngineError, Finished, Request, SamplingParams, TokenEngine};

/// Groups that wait for completions, in whatever order these end.
pub(super) struct SingleTurn {
    context: RolloutContext,
    open: BTreeMap<u64, PendingGroup>,
    complete: Vec<Group>,
}

struct PendingGroup {
    prompt: Arc<Prompt>,
    prompt_tokens: Arc<[u32]>,
    temperature: f32,
    samples: Vec<Option<Sample>>,
}

impl SingleTurn {
    pub fn new(context: RolloutContext) -> Self {
        SingleTurn { context, open: BTreeMap::new(), complete: Vec::new() }
    }

    /// Adds a completion to its group. Completions that were not requested are ignored.
    fn add(&mut self, finished: Finished) -> Result<(), EngineError> {
        let (ordinal, index) = (finished.ordinal, finished.index as usize);
        let Some(open) = self.open.get_mut(&ordinal) else { return Ok(()) };
        if index < open.samples.len() {
            open.samples[index] = Some(open.sample(finished, &self.context)?);
        }
        if open.samples.iter().any(Option::is_none) {
            return Ok(());
        }
        if let Some(PendingGroup { prompt, samples, .. }) = self.open.remove(&ordinal) {
            self.complete.push(Group { prompt, samples: samples.into_iter().flatten().collect(), ..Group::default() });
        }
        Ok(())
    }
}

impl PendingGroup {
    /// Tokens in, tokens out (law D1): the text is decoded for rewards and logs only.
    fn sample(&self, finished: Finished, context: &RolloutContext) -> Result<Sample, EngineError> {
        let mut sample = Sample::begin(&self.prompt, finished.index, &self.prompt_tokens);
        sample.response = context.tokenizer.decode(&finished.tokens)?;
        sample.status = finished.status();
        if let Err(reason) = finished.finish {
            sample.metadata.insert(REFUSED.to_owned(), reason.into());
        }
        sample.answered(&finished.tokens, &finished.log_probs, &finished.versions);
        sample.routes = finished.routes;
        sample.temperature = Some(scoring_temperature(self.temperature));
        if context.mask_older {
            sample.mask_older();
        }
        Ok(sample)
    }
}

impl<E: TokenEngine> Rollouts<E> for SingleTurn {
    fn admit(&mut self, engine: &mut E, mut prompt: Prompt, size: u32, params: SamplingParams) -> Result<(), EngineError> {
        let (ordinal, temperature) = (prompt.ordinal, params.temperature);
        if self.open.contains_key(&ordinal) {
            return Err(EngineError::same_ordinal(ordinal));
        }
        let prompt_tokens: Arc<[u32]> = match self.context.tokenizer.encode_prompt(&prompt) {
            Ok(tokens) => tokens.into(),
            Err(error) if rejects_conversation(&error) => {
                return Err(EngineError::Prompt { ordinal, problem: error.to_string() });
            }
            Err(error) => return Err(error.into()),
        };
        let Partial { completions: answers, .. } = std::mem::take(&mut prompt.partial);
        engine.submit(Request { answers, ..Request::new(ordinal, prompt_tokens.clone(), size, Arc::new(params)) })?;
        let samples = vec![None; size as usize];
        self.open.insert(ordinal, PendingGroup { prompt: Arc::new(prompt), prompt_tokens, temperature, samples });
        Ok(())
    }

    fn is_idle(&self, engine: &E) -> bool {
        engine.is_idle()
    }

    fn room(&self, engine: &E) -> usize {
        engine.free_slots().max(usize::from(engine.is_idle()))
    }

    fn expire(&mut self, engine: &mut E, version: Version) {
        if let Some(admission) = &self.context.admission {
            let expired = engine.restart_expired(&|ordinal, answer| admission.expires(ordinal, answer, version));
            expired.into_iter().for_each(|(ordinal, index)| self.context.discard(ordinal, index));
        }
    }

    fn record(&mut self, engine: &E, finished: Vec<Finished>) -> Result<(), EngineError> {
        engine.discarded().iter().for_each(|(ordinal, index)| self.context.discard(*ordinal, *index));
        if let Some(admission) = &self.context.admission {
            admission.sampled(engine.sampled().iter().cloned());
        }
        finished.into_iter().try_for_each(|finished| self.add(finished))
    }

    fn take_groups(&mut self) -> Vec<Group> {
        std::mem::take(&mut self.complete)
    }
}
