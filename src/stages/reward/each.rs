//! A reward function for each sample, computed on rayon's threads, or on the stage's own if that is
//! faster than waking them.
//!
//! Law F6: a failed reward is retried immediately. Then the group is a dead letter, and the run continues
//! without the lost samples, or without the whole group if the reward is defective.

use std::fmt;

use crate::algo::rewards::{IntoReward, RewardOutput};
use crate::data::{Group, Sample, Scored};
use crate::flow::{Io, RunContext, Stage, StageError, StageSpec};
use crate::observe::Metrics;
use crate::observe::logs::DeadLetterWriter;

use super::failures::{FailureHandler, FailurePolicy, OnFailure, OnLostSample, RETRIES};
use super::score::{Scorers, score};

type RewardFn = dyn Fn(&Sample) -> Result<RewardOutput, String> + Send + Sync;
type AheadFn = dyn Fn(&Group) + Send + Sync;

/// Reward stage: scores every sample of a group by a function.
pub struct Reward {
    reward: Box<RewardFn>,
    ahead: Option<Box<AheadFn>>,
    threads: usize,
    retries: u32,
    failures: FailureHandler,
}

impl Reward {
    /// Calls `reward` once per sample, from several threads. It returns a number, a
    /// [`RewardOutput`] or a result. A failed call is retried twice, immediately; a reward over a
    /// network should pause by itself.
    pub fn each<R: IntoReward>(reward: impl Fn(&Sample) -> R + Send + Sync + 'static) -> Self {
        Reward {
            reward: Box::new(move |sample| reward(sample).into_reward()),
            ahead: None,
            threads: 0,
            retries: RETRIES,
            failures: FailureHandler::default(),
        }
    }

    /// Calls `announce` with each group before its samples are scored, so that a
    /// [`Scorer`](super::Scorer) can compute them in one batch.
    pub fn ahead(self, announce: impl Fn(&Group) + Send + Sync + 'static) -> Self {
        Reward { ahead: Some(Box::new(announce)), ..self }
    }

    /// Sets the number of cores that the reward uses in addition to the stage's thread, for the
    /// thread budget.
    pub fn threads(self, threads: usize) -> Self {
        Reward { threads, ..self }
    }

    /// Sets the retries for a sample on which the reward panics, fails or returns no finite number.
    /// Default: 2.
    pub fn retries(self, retries: u32) -> Self {
        Reward { retries, ..self }
    }

    /// Sets the whole policy for failures.
    pub fn failures(mut self, policy: FailurePolicy) -> Self {
        self.failures.policy = policy;
        self
    }

    /// Sets [`FailurePolicy::on_failure`].
    pub fn on_failure(mut self, on_failure: OnFailure) -> Self {
        self.failures.policy.on_failure = on_failure;
        self
    }

    /// Sets [`FailurePolicy::on_lost_sample`].
    pub fn on_lost_sample(mut self, on_lost_sample: OnLostSample) -> Self {
        self.failures.policy.on_lost_sample = on_lost_sample;
        self
    }

    /// Sets [`FailurePolicy::max_poisoned`].
    pub fn max_poisoned(mut self, groups: u64) -> Self {
        self.failures.policy.max_poisoned = groups;
        self
    }

    /// Sets [`FailurePolicy::dead_letters`].
    pub fn dead_letters(mut self, writer: DeadLetterWriter) -> Self {
        self.failures.policy.dead_letters = Some(writer);
        self
    }

    /// Sets [`FailurePolicy::metrics`].
    pub fn metrics(mut self, metrics: &Metrics) -> Self {
        self.failures.policy.metrics = Some(metrics.clone());
        self
    }
}

impl Stage for Reward {
    type In = Group;
    type Out = Scored;

    fn attach(&mut self, context: &mut RunContext) {
        context.fill(&mut self.failures.policy.metrics);
    }

    fn run(&mut self, io: &mut Io<Group, Scored>) -> Result<(), StageError> {
        let mut scorers = Scorers::Threads;
        while let Some(mut group) = io.recv()? {
            if let Some(announce) = &self.ahead {
                announce(&group);
            }
            let scoring = score(&mut group, self.reward.as_ref(), self.retries, scorers);
            scorers = Scorers::after(&scoring);
            let scored = self.failures.apply(io.stage(), group, scoring)?;
            io.send(scored)?;
        }
        Ok(())
    }

    fn spec(&self) -> StageSpec {
        StageSpec::thread().threads(self.threads)
    }
}

impl fmt::Debug for Reward {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reward").field("failures", &self.failures.policy).finish_non_exhaustive()
    }
}
