//! Multi-turn rollouts: a model and an [`Environment`] alternate until the task is done or a limit
//! ends the rollout.
//!
//! Laws: D1 and D3 (sampled tokens are never tokenised again, and only they are trained), D4 (the
//! ledger records tokens as they are sampled or given, so that an interrupted rollout resumes
//! between two turns), N2 (no two turns of a rollout use the same random numbers), V3 (in lockstep,
//! what is computed together does not depend on timing).
//!
//! This file holds the environments' half of a rollout; `turns` holds the engine's half.

mod dialogue;
mod replay;
mod rollout;
mod turns;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::Value;

pub(super) use dialogue::text_of;
use replay::SavedRollout;
use rollout::{NextStep, Rollout, ledger_index, split_ledger_index};

use super::agent::StopReason;
use super::{Agent, RolloutContext, rejects_conversation};
use crate::data::{Answer, ChatMessage, DataError, Group, Partial, Prompt, Sample, Version};
use crate::engine::{EngineError, SamplingParams};
use crate::env::{EnvError, Environment, Episode, Grade, Pool, Step, ToolSpec};
use crate::observe::Metric;

/// Prompt's ordinal and rollout's index in its group.
type Key = (u64, u32);

/// Pause before the first retry of a failed environment; it doubles with each retry.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// Rollouts in flight per slot: while some wait for environments, the engine computes others.
const IN_FLIGHT_PER_SLOT: usize = 2;

/// All rollouts in flight. Waiting is left to the loop that drives them.
pub(super) struct MultiTurn {
    context: RolloutContext,
    agent: Agent,
    pool: Pool<Returned>,
    /// Rollout of each job in the pool.
    jobs: BTreeMap<u64, Key>,
    next_job: u64,
    open: BTreeMap<u64, PendingGroup>,
    rollouts: BTreeMap<Key, Rollout>,
    /// Rollouts whose next turn is to be submitted to the engine.
    ready: BTreeSet<Key>,
    /// Number of failures of each rollout's environments.
    failures: BTreeMap<Key, u32>,
    /// Time of the next retry of each rollout whose environment failed.
    paused: BTreeMap<Key, Instant>,
    complete: Vec<Group>,
    /// Most rollouts in flight.
    limit: usize,
    /// The newest weights.
    version: Version,
}

/// An environment after a job, and the job's result.
type Returned = (Box<dyn Environment>, Result<JobResult, EnvError>);

enum JobResult {
    Opened(Vec<ChatMessage>, Vec<ToolSpec>),
    Stepped(Step),
    Graded(Grade),
}

struct PendingGroup {
    prompt: Arc<Prompt>,
    params: Arc<SamplingParams>,
    missing: u32,
    samples: BTreeMap<u32, Vec<Sample>>,
}

impl MultiTurn {
    pub fn new(context: RolloutContext, agent: Agent, slots: usize) -> Self {
        MultiTurn {
            pool: Pool::new(agent.limits.workers.max(1)),
            context,
            agent,
            jobs: BTreeMap::new(),
            next_job: 0,
            open: BTreeMap::new(),
            rollouts: BTreeMap::new(),
            ready: BTreeSet::new(),
            failures: BTreeMap::new(),
            paused: BTreeMap::new(),
            complete: Vec::new(),
            limit: IN_FLIGHT_PER_SLOT * slots,
            version: 0,
        }
    }

    /// Opens a group of `size` rollouts and continues the prompt's partial completions (law D7).
    fn open(&mut self, mut prompt: Prompt, size: u32, params: SamplingParams) {
        let ordinal = prompt.ordinal;
        let Partial { completions, mut environments } = std::mem::take(&mut prompt.partial);
        let mut by_rollout: BTreeMap<u32, BTreeMap<usize, Answer>> = BTreeMap::new();
        for answer in completions {
            let (index, part) = split_ledger_index(answer.index);
            by_rollout.entry(index).or_default().insert(part, answer);
        }
        let group = PendingGroup { prompt: Arc::new(prompt), params: Arc::new(params), missing: size, samples: BTreeMap::new() };
        self.open.insert(ordinal, group);
        for index in 0..size {
            let parts = by_rollout.remove(&index).unwrap_or_default();
            // A rollout with a missing part cannot be replayed.
            let whole = parts.keys().copied().eq(0..parts.len());
            if !whole {
                self.discard(ordinal, index, parts.keys());
            }
            let recorded: Vec<Answer> = if whole { parts.into_values().collect() } else { Vec::new() };
            let saved = environments.remove(&index).filter(|_| !recorded.is_empty());
            self.begin((ordinal, index), recorded, saved);
        }
        for (index, parts) in by_rollout {
            self.discard(ordinal, index, parts.keys());
        }
    }

    fn discard<'a>(&self, ordinal: u64, index: u32, parts: impl IntoIterator<Item = &'a usize>) {
        parts.into_iter().for_each(|part| self.context.discard(ordinal, ledger_index(index, *part)));
    }

    fn begin(&mut self, key: Key, recorded: Vec<Answer>, saved: Option<Value>) {
        let saved: Option<SavedRollout> = saved.and_then(|saved| serde_json::from_value(saved).ok());
        self.rollouts.insert(key, Rollout::new(key.1, recorded, saved));
        self.reset(key);
    }

    /// Creates a rollout's environment and submits its reset.
    fn reset(&mut self, key: Key) {
        let (Some(open), Some(rollout)) = (self.open.get(&key.0), self.rollouts.get(&key)) else { return };
        let episode = Episode { prompt: (*open.prompt).clone(), seed: self.agent.seed, index: key.1 };
        let state = rollout.saved.as_ref().map(|saved| saved.environment.clone());
        let environment = (self.agent.make)();
        self.job(key, environment, move |environment, deadline| {
            let opening = environment.reset(&episode, deadline)?;
            if let Some(state) = &state {
                environment.restore(state)?;
            }
            Ok(JobResult::Opened(opening, environment.tools()))
        });
    }

    /// Discards a rollout and begins it from its prompt.
    fn restart(&mut self, key: Key) {
        if let Some(rollout) = self.rollouts.remove(&key) {
            rollout.ledger_indices().for_each(|index| self.context.discard(key.0, index));
            self.begin(key, Vec::new(), None);
        }
    }

    /// Schedules a replay in a fresh environment, or gives the rollout up after the last retry.
    fn environment_failed(&mut self, key: Key, reason: String) -> Result<(), EngineError> {
        let failures = self.failures.get(&key).copied().unwrap_or(0) + 1;
        self.failures.insert(key, failures);
        let Some(rollout) = self.rollouts.get_mut(&key) else { return Ok(()) };
        if failures > self.agent.limits.replays {
            rollout.fail(reason);
            return self.finish(key);
        }
        let pause = FIRST_PAUSE.saturating_mul(1_u32.checked_shl(failures - 1).unwrap_or(u32::MAX)).min(LONGEST_PAUSE);
        tracing::debug!("rollout {} of group {}: {reason}; retrying in {pause:?}", key.1, key.0);
        // A saved state is valid until the environment has begun; later, all turns are replayed.
        let saved = if rollout.has_begun() { None } else { rollout.saved.clone() };
        *rollout = Rollout::new(key.1, rollout.to_record(), saved);
        self.paused.insert(key, Instant::now() + pause);
        self.context.count(Metric::EnvironmentRetries, &[], 1.0);
        Ok(())
    }

    /// Ends a rollout whose messages the chat template rejects. A replay would meet the same messages.
    fn rejected(&mut self, key: Key, error: DataError) -> Result<(), EngineError> {
        if !rejects_conversation(&error) {
            return Err(error.into());
        }
        if let Some(rollout) = self.rollouts.get_mut(&key) {
            rollout.fail(error.to_string());
        }
        self.finish(key)
    }

    fn job(
        &mut self,
        key: Key,
        mut environment: Box<dyn Environment>,
        work: impl FnOnce(&mut dyn Environment, Instant) -> Result<JobResult, EnvError> + Send + 'static,
    ) {
        self.jobs.insert(self.next_job, key);
        let timeout = Duration::try_from_secs_f64(self.agent.limits.step_timeout).unwrap_or(Duration::MAX);
        self.pool.submit(self.next_job, timeout, move |begin| {
            let result = environment.room().and_then(|_room| work(&mut *environment, begin()?));
            (environment, result)
        });
        self.next_job += 1;
    }

    /// Processes the results of environments. Waits for the first at most `wait`.
    fn poll_environments(&mut self, mut wait: Duration) -> Result<(), EngineError> {
        let now = Instant::now();
        let due: Vec<Key> = self.paused.iter().filter(|(_, at)| **at <= now).map(|(key, _)| *key).collect();
        for key in due {
            self.paused.remove(&key);
            self.reset(key);
        }
        if self.pool.pending() == 0
            && let Some(next) = self.paused.values().min()
        {
            std::thread::sleep(wait.min(next.saturating_duration_since(Instant::now())));
        }
        while self.pool.pending() > 0 {
            let Some((job, outcome)) = self.pool.next(wait) else { return Ok(()) };
            wait = Duration::ZERO;
            if let Some(key) = self.jobs.remove(&job) {
                self.returned(key, outcome)?;
            }
        }
        Ok(())
    }

    fn environments_at_work(&self) -> bool {
        self.pool.pending() > 0 || !self.paused.is_empty()
    }

    fn returned(&mut self, key: Key, outcome: Result<Returned, EnvError>) -> Result<(), EngineError> {
        let Some(rollout) = self.rollouts.get_mut(&key) else { return Ok(()) };
        let tokenizer = &self.context.tokenizer;
        let result = outcome.and_then(|(environment, result)| {
            rollout.environment = Some(environment);
            result
        });
        let next = match result {
            // The duration of a step depends on the completion: dropping slow rollouts would favour
            // short completions.
            Err(error) if error.is_late() && rollout.has_begun() => {
                tracing::debug!("rollout {} of group {}: {error}", key.1, key.0);
                rollout.time_out();
                return self.finish(key);
            }
            Err(error) => return self.environment_failed(key, error.to_string()),
            Ok(JobResult::Graded(grade)) => {
                rollout.grade = Some(grade);
                return self.finish(key);
            }
            Ok(JobResult::Opened(opening, tools)) => match rollout.begin(opening, tools, tokenizer) {
                Ok(()) => None,
                Err(error) => return self.rejected(key, error),
            },
            Ok(JobResult::Stepped(step)) => {
                let parts = rollout.done.len();
                let (next, given) = match rollout.add_step(step, tokenizer) {
                    Ok(stepped) => stepped,
                    Err(error) => return self.rejected(key, error),
                };
                let forks = rollout.done.len() - parts;
                rollout.call_hook(key.0, &self.agent);
                if let (Some(admission), Some((index, tokens))) = (&self.context.admission, given) {
                    let saved = rollout.save().map(|saved| (key.1, saved));
                    admission.ledger().given(key.0, index, &tokens, saved);
                }
                self.context.count(Metric::RolloutForks, &[], forks as f64);
                next
            }
        };
        match next {
            Some(next) => self.proceed(key, next),
            None => self.next_turn(key),
        }
    }

    fn next_turn(&mut self, key: Key) -> Result<(), EngineError> {
        let (Some(rollout), Some(open)) = (self.rollouts.get_mut(&key), self.open.get(&key.0)) else { return Ok(()) };
        let oldest = rollout.oldest();
        if self.context.admission.as_ref().is_some_and(|admission| admission.expires(key.0, &oldest, self.version)) {
            self.restart(key);
            return Ok(());
        }
        let next = rollout.next_turn(&self.agent, open.params.max_new_tokens, &self.context.tokenizer)?;
        self.proceed(key, next)
    }

    fn proceed(&mut self, key: Key, next: NextStep) -> Result<(), EngineError> {
        match next {
            NextStep::Turn => drop(self.ready.insert(key)),
            NextStep::Restart => self.restart(key),
            NextStep::Environment(action) => {
                let metrics = self.context.metrics.clone();
                self.work(key, move |environment, deadline| {
                    let began = Instant::now();
                    let step = environment.step(&action, deadline);
                    metrics.iter().for_each(|of| of.observe(Metric::EnvironmentTime, &[], began.elapsed().as_secs_f64()));
                    step.map(JobResult::Stepped)
                })
            }
            NextStep::Grade { cut_off } => self.work(key, move |environment, deadline| {
                cut_off.iter().for_each(|turn| environment.cut_off(turn));
                environment.grade(deadline).map(JobResult::Graded)
            }),
        }
        Ok(())
    }

    /// Submits work of a rollout's environment.
    fn work(
        &mut self,
        key: Key,
        work: impl FnOnce(&mut dyn Environment, Instant) -> Result<JobResult, EnvError> + Send + 'static,
    ) {
        if let Some(environment) = self.rollouts.get_mut(&key).and_then(|rollout| rollout.environment.take()) {
            self.job(key, environment, work);
        }
    }

    /// Turns a rollout that has ended into samples, and completes its group if it was the last.
    fn finish(&mut self, key: Key) -> Result<(), EngineError> {
        let (ordinal, index) = key;
        let (Some(mut rollout), Some(open)) = (self.rollouts.remove(&key), self.open.get_mut(&ordinal)) else { return Ok(()) };
        rollout.take_over_record();
        self.failures.remove(&key);
        let (turns, reason, calls) = (rollout.turns, rollout.stop, rollout.tool_calls.clone());
        let samples = rollout.into_samples(&open.prompt, open.params.temperature, &self.context)?;
        open.samples.insert(index, samples);
        open.missing -= 1;
        if open.missing == 0
            && let Some(PendingGroup { prompt, samples, .. }) = self.open.remove(&ordinal)
        {
            self.complete.push(Group { prompt, samples: samples.into_values().flatten().collect(), ..Group::default() });
        }
        self.context.count(Metric::RolloutStops, &[reason.map_or("", StopReason::label)], 1.0);
        for (outcome, calls) in [("succeeded", calls.succeeded), ("failed", calls.failed), ("malformed", calls.malformed)] {
            self.context.count(Metric::ToolCalls, &[outcome], calls as f64);
        }
        if let Some(metrics) = &self.context.metrics {
            metrics.observe(Metric::RolloutTurns, &[], turns as f64);
        }
        Ok(())
    }
}
