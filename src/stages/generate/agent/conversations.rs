//! All rollouts under way: those that wait for their environment, and those that the engine works on. It owns no wait: who drives it does.
//!
//! Here is what they have to do with environments and with the ledger; `turns` has what they have to do with the engine.

mod turns;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::rollout::{Ahead, Rollout, Saved, Stepped, of_slot, slot};
use super::{Agent, StopReason};
use crate::data::{Answer, Group, Partial, Prompt, Sample, Tokenizer, Version};
use crate::engine::SamplingParams;
use crate::env::{Action, Deadline, EnvError, Environment, Episode, Grade, Pool, PoolError, Step, ToolSpec};
use crate::flow::StageError;
use crate::observe::{Metric, Metrics};
use crate::rollout::{Admission, Fate};

/// A rollout: the prompt's ordinal, and its place in the group.
type Key = (u64, u32);

/// The pause before a rollout whose environment failed is played again; each further one is twice as long.
const PAUSE: Duration = Duration::from_millis(250);
/// No such pause is longer.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// What an environment gave, and the environment itself.
struct Came {
    environment: Box<dyn Environment>,
    what: Result<What, EnvError>,
}

enum What {
    Began(Vec<crate::data::ChatMessage>, Vec<ToolSpec>),
    Stepped(Step),
    Graded(Grade),
}

struct Open {
    prompt: Arc<Prompt>,
    params: Arc<SamplingParams>,
    missing: u32,
    samples: BTreeMap<u32, Vec<Sample>>,
}

/// What all of them share.
pub struct Setup {
    pub agent: Agent,
    pub tokenizer: Arc<Tokenizer>,
    pub mask_older: bool,
    pub admission: Option<Admission>,
    pub metrics: Option<Metrics>,
}

pub struct Conversations {
    setup: Setup,
    pool: Pool<Came>,
    /// Which rollout a job of the pool is for.
    jobs: BTreeMap<u64, Key>,
    next: u64,
    open: BTreeMap<u64, Open>,
    rollouts: BTreeMap<Key, Rollout>,
    /// Those that the engine is to be asked for.
    ready: BTreeSet<Key>,
    /// How often the environments of rollouts failed.
    failures: BTreeMap<Key, u32>,
    /// When those whose environment failed are played again.
    paused: BTreeMap<Key, Instant>,
    groups: Vec<Group>,
    /// The newest weights.
    version: Version,
}

impl Conversations {
    pub fn new(setup: Setup) -> Self {
        let pool = Pool::new(setup.agent.workers);
        Conversations {
            setup,
            pool,
            jobs: BTreeMap::new(),
            next: 0,
            open: BTreeMap::new(),
            rollouts: BTreeMap::new(),
            ready: BTreeSet::new(),
            failures: BTreeMap::new(),
            paused: BTreeMap::new(),
            groups: Vec::new(),
            version: 0,
        }
    }

    /// Rollouts that are not over.
    pub fn under_way(&self) -> usize {
        self.rollouts.len()
    }

    /// Groups all of whose rollouts are over.
    pub fn take_groups(&mut self) -> Vec<Group> {
        std::mem::take(&mut self.groups)
    }

    /// A prompt enters, for a group of so many rollouts. Its partial completions are continued (law D7).
    pub fn admit(&mut self, mut prompt: Prompt, size: u32, params: SamplingParams) {
        let ordinal = prompt.ordinal;
        let Partial { completions, mut environments } = std::mem::take(&mut prompt.partial);
        let mut by_rollout: BTreeMap<u32, BTreeMap<usize, Answer>> = BTreeMap::new();
        for answer in completions {
            let (index, part) = of_slot(answer.index);
            by_rollout.entry(index).or_default().insert(part, answer);
        }
        let open = Open { prompt: Arc::new(prompt), params: Arc::new(params), missing: size, samples: BTreeMap::new() };
        self.open.insert(ordinal, open);
        for index in 0..size {
            let parts = by_rollout.remove(&index).unwrap_or_default();
            // A rollout is there whole or not at all.
            let whole = parts.keys().copied().eq(0..parts.len());
            if !whole {
                parts.keys().for_each(|part| self.discard(ordinal, slot(index, *part)));
            }
            let recorded: Vec<Answer> = if whole { parts.into_values().collect() } else { Vec::new() };
            let saved = environments.remove(&index).filter(|_| !recorded.is_empty());
            self.begin((ordinal, index), recorded, saved);
        }
        for (index, parts) in by_rollout {
            parts.keys().for_each(|part| self.discard(ordinal, slot(index, *part)));
        }
    }

    fn begin(&mut self, key: Key, recorded: Vec<Answer>, saved: Option<Value>) {
        let saved: Option<Saved> = saved.and_then(|saved| serde_json::from_value(saved).ok());
        self.rollouts.insert(key, Rollout::new(key.1, recorded, saved));
        self.reset(key);
    }

    /// Gives a rollout its environment.
    fn reset(&mut self, key: Key) {
        let (Some(open), Some(rollout)) = (self.open.get(&key.0), self.rollouts.get(&key)) else { return };
        let episode = Episode { prompt: (*open.prompt).clone(), seed: self.setup.agent.seed, index: key.1 };
        let state = rollout.saved().map(|saved| saved.environment.clone());
        let environment = (self.setup.agent.make)();
        self.job(key, environment, move |environment, deadline| {
            let opening = environment.reset(&episode, deadline)?;
            if let Some(state) = &state {
                environment.restore(state)?;
            }
            Ok(What::Began(opening, environment.tools()))
        });
    }

    fn restart_expired(&mut self, key: Key) {
        if let Some(rollout) = self.rollouts.remove(&key) {
            rollout.slots().collect::<Vec<_>>().into_iter().for_each(|slot| self.discard(key.0, slot));
            self.begin(key, Vec::new(), None);
        }
    }

    /// An environment failed: its rollout is played again in another one, or lost.
    fn lost(&mut self, key: Key, why: String) -> Result<(), StageError> {
        let failures = self.failures.get(&key).copied().unwrap_or(0) + 1;
        self.failures.insert(key, failures);
        let Some(rollout) = self.rollouts.get_mut(&key) else { return Ok(()) };
        if failures > self.setup.agent.retries {
            rollout.failed(why);
            return self.over(key);
        }
        let pause = PAUSE.saturating_mul(1_u32.checked_shl(failures - 1).unwrap_or(u32::MAX)).min(LONGEST_PAUSE);
        tracing::debug!("rollout {} of group {}: {why}; it is played again in {pause:?}", key.1, key.0);
        // What was saved before it began is still as good; later, all turns are played again.
        let saved = if rollout.has_begun() { None } else { rollout.saved().cloned() };
        *rollout = Rollout::new(key.1, rollout.to_record(), saved);
        self.paused.insert(key, Instant::now() + pause);
        self.count(Metric::EnvironmentRetries, &[], 1.0);
        Ok(())
    }

    /// Plays again what has paused for long enough.
    fn play_again(&mut self) {
        let now = Instant::now();
        let due: Vec<Key> = self.paused.iter().filter(|(_, at)| **at <= now).map(|(key, _)| *key).collect();
        for key in due {
            self.paused.remove(&key);
            self.reset(key);
        }
    }

    fn discard(&self, ordinal: u64, slot: u32) {
        let tokens = self.setup.admission.as_ref().map_or(0, |admission| admission.discard(ordinal, slot));
        self.count(Metric::Tokens, &[Fate::Truncated.label()], tokens as f64);
    }

    fn count(&self, metric: Metric, labels: &[&str], value: f64) {
        if let Some(metrics) = self.setup.metrics.as_ref().filter(|_| value > 0.0) {
            metrics.add(metric, labels, value);
        }
    }

    fn job(
        &mut self,
        key: Key,
        mut environment: Box<dyn Environment>,
        work: impl FnOnce(&mut dyn Environment, Deadline) -> Result<What, EnvError> + Send + 'static,
    ) {
        self.jobs.insert(self.next, key);
        self.pool.submit(self.next, self.setup.agent.step_timeout, move |deadline| {
            let what = work(&mut *environment, deadline);
            Came { environment, what }
        });
        self.next += 1;
    }

    /// Takes what environments gave, waiting for the first as long as told.
    pub fn environments(&mut self, wait: Duration) -> Result<(), StageError> {
        let mut wait = wait;
        self.play_again();
        if self.pool.pending() == 0
            && let Some(next) = self.paused.values().min()
        {
            std::thread::sleep(wait.min(next.saturating_duration_since(Instant::now())));
        }
        while self.pool.pending() > 0 {
            let Some((job, outcome)) = self.pool.next(wait) else { return Ok(()) };
            wait = Duration::ZERO;
            if let Some(key) = self.jobs.remove(&job) {
                self.came(key, outcome)?;
            }
        }
        Ok(())
    }

    /// Whether some environment is at work, or will be.
    pub fn wait_for_environments(&self) -> bool {
        self.pool.pending() > 0 || !self.paused.is_empty()
    }

    fn came(&mut self, key: Key, outcome: Result<Came, PoolError>) -> Result<(), StageError> {
        let Some(rollout) = self.rollouts.get_mut(&key) else { return Ok(()) };
        let tokenizer = &self.setup.tokenizer;
        let what = match outcome {
            Ok(Came { environment, what }) => {
                rollout.environment = Some(environment);
                what.map_err(|error| (error.is_late(), error.to_string()))
            }
            Err(error) => Err((matches!(error, PoolError::Overdue(_)), error.to_string())),
        };
        let ahead = match what {
            // How long a step takes depends on what the model said: dropping what takes long would favour short completions.
            Err((true, why)) if rollout.has_begun() => {
                tracing::debug!("rollout {} of group {}: {why}", key.1, key.0);
                rollout.overran();
                return self.over(key);
            }
            Err((_, why)) => return self.lost(key, why),
            Ok(What::Graded(grade)) => {
                rollout.graded(grade);
                return self.over(key);
            }
            Ok(What::Began(opening, tools)) => {
                rollout.began(opening, tools, tokenizer)?;
                None
            }
            Ok(What::Stepped(step)) => {
                let parts = rollout.parts();
                let Stepped { ahead, given } = rollout.stepped(step, tokenizer)?;
                let forks = rollout.parts() - parts;
                rollout.show(key.0, &self.setup.agent);
                if let (Some(admission), Some((slot, tokens))) = (&self.setup.admission, given) {
                    admission.given(key.0, slot, &tokens, rollout.save().map(|saved| (key.1, saved)));
                }
                self.count(Metric::RolloutForks, &[], forks as f64);
                ahead
            }
        };
        match ahead {
            Some(ahead) => self.go(key, ahead),
            None => self.ask(key),
        }
    }

    fn ask(&mut self, key: Key) -> Result<(), StageError> {
        let (Some(rollout), Some(open)) = (self.rollouts.get_mut(&key), self.open.get(&key.0)) else { return Ok(()) };
        let tokenizer = &self.setup.tokenizer;
        let room = open.params.max_new_tokens;
        let oldest = rollout.oldest();
        if self.setup.admission.as_ref().is_some_and(|admission| admission.expires(key.0, &oldest, self.version)) {
            self.restart_expired(key);
            return Ok(());
        }
        let ahead = rollout.ask(&self.setup.agent, room, tokenizer.eos_token_ids(), tokenizer)?;
        self.go(key, ahead)
    }

    fn go(&mut self, key: Key, ahead: Ahead) -> Result<(), StageError> {
        match ahead {
            Ahead::Turn => drop(self.ready.insert(key)),
            Ahead::Diverged => self.restart_expired(key),
            Ahead::Step(action) => {
                if let Some(environment) = self.rollouts.get_mut(&key).and_then(|rollout| rollout.environment.take()) {
                    self.job(key, environment, move |environment, deadline| {
                        environment.step(&action, deadline).map(What::Stepped)
                    });
                }
            }
            Ahead::Over => self.grade(key, None),
            Ahead::Cut(action) => self.grade(key, Some(action)),
        }
        Ok(())
    }

    /// Has the environment grade what is over, perhaps because a turn was cut off.
    fn grade(&mut self, key: Key, cut: Option<Action>) {
        if let Some(environment) = self.rollouts.get_mut(&key).and_then(|rollout| rollout.environment.take()) {
            self.job(key, environment, move |environment, deadline| {
                cut.iter().for_each(|turn| environment.cut_off(turn));
                environment.grade(deadline).map(What::Graded)
            });
        }
    }

    fn over(&mut self, key: Key) -> Result<(), StageError> {
        let (ordinal, index) = key;
        let (Some(rollout), Some(open)) = (self.rollouts.remove(&key), self.open.get_mut(&ordinal)) else { return Ok(()) };
        self.failures.remove(&key);
        let (turns, reason, used) = (rollout.turns(), rollout.stopped(), rollout.used().clone());
        let samples = rollout.samples(&open.prompt, open.params.temperature, self.setup.mask_older, &self.setup.tokenizer)?;
        open.samples.insert(index, samples);
        open.missing -= 1;
        if open.missing == 0
            && let Some(Open { prompt, samples, .. }) = self.open.remove(&ordinal)
        {
            self.groups.push(Group { prompt, samples: samples.into_values().flatten().collect(), ..Group::default() });
        }
        self.count(Metric::RolloutStops, &[reason.map_or("", StopReason::label)], 1.0);
        let outcomes = [("succeeded", used.succeeded), ("failed", used.failed), ("malformed", used.malformed)];
        outcomes.into_iter().for_each(|(outcome, calls)| self.count(Metric::ToolCalls, &[outcome], calls as f64));
        if let Some(metrics) = &self.setup.metrics {
            metrics.observe(Metric::RolloutTurns, &[], turns as f64);
        }
        Ok(())
    }
}
