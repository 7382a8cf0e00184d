//! A reward function for each sample, computed on rayon's threads, or on the stage's own if that is
//! faster than waking them (law F6: see [`FailurePolicy`]).

use std::time::Duration;

use super::failures::{FailureHandler, FailurePolicy, OnFailure, RETRIES};
use super::score::score;
use crate::algo::rewards::{IntoReward, RewardOutput};
use crate::data::{Group, Sample, Scored};
use crate::flow::{Io, RunContext, Stage, StageError, StageSpec};

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
        let reward = Box::new(move |sample: &Sample| reward(sample).into_reward());
        Reward { reward, ahead: None, threads: 0, retries: RETRIES, failures: FailureHandler::default() }
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

    /// Sets the policy for failures.
    pub fn failures(mut self, policy: FailurePolicy) -> Self {
        self.failures.policy = policy;
        self
    }

    /// Sets [`FailurePolicy::on_failure`].
    pub fn on_failure(mut self, on_failure: OnFailure) -> Self {
        self.failures.policy.on_failure = on_failure;
        self
    }
}

/// Shortest total time of a group's rewards that is worth waking other threads for.
const WORTH_WAKING: Duration = Duration::from_micros(100);

impl Stage for Reward {
    type In = Group;
    type Out = Scored;

    fn attach(&mut self, context: &mut RunContext) {
        context.fill(&mut self.failures.policy.metrics);
    }

    fn run(&mut self, io: &mut Io<Group, Scored>) -> Result<(), StageError> {
        let mut parallel = true;
        while let Some(mut group) = io.recv()? {
            self.ahead.iter().for_each(|announce| announce(&group));
            let scoring = score(&mut group, self.reward.as_ref(), self.retries, parallel);
            parallel = scoring.time >= WORTH_WAKING;
            let scored = self.failures.apply(io.stage(), group, scoring)?;
            io.send(scored)?;
        }
        Ok(())
    }

    fn spec(&self) -> StageSpec {
        StageSpec::default().threads(self.threads)
    }
}
