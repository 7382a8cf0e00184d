//! A reward function for each sample, computed on rayon's threads, or on the stage's own if that is
//! faster than waking them (law F6: see [`FailurePolicy`]).

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use rayon::prelude::*;

use super::failures::{FailureHandler, FailurePolicy, OnFailure, RETRIES};
use crate::algo::rewards::{IntoReward, RewardOutput};
use crate::data::{Group, RewardParts, Sample, Scored, is_reward};
use crate::flow::{Io, RunContext, Stage, StageError, StageSpec, panic_message};
use crate::observe::logs::{Failure, FailureKind};

type RewardFn = dyn Fn(&Sample) -> Result<RewardOutput, String> + Send + Sync;
type AheadFn = dyn Fn(&Group) + Send + Sync;

/// Reward stage: scores every sample of a group by a function.
pub struct Reward {
    reward: Option<Box<RewardFn>>,
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
        Reward { reward: Some(reward), failures: FailureHandler::default(), ..Reward::none() }
    }

    /// Passes groups on without rewards, for runs that learn from a teacher alone. Lost samples are dropped
    /// as in other runs.
    pub fn none() -> Self {
        let mut failures = FailureHandler::default();
        failures.unrewarded = true;
        Reward { reward: None, ahead: None, threads: 0, retries: RETRIES, failures }
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
        self.failures.begin(io.stage());
        let mut parallel = true;
        while let Some(mut group) = io.recv()? {
            self.ahead.iter().for_each(|announce| announce(&group));
            let scoring = match &self.reward {
                Some(reward) => scoring(&mut group, reward.as_ref(), self.retries, parallel),
                None => Scoring::default(),
            };
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

/// Outcome of scoring a group.
#[derive(Default)]
pub(super) struct Scoring {
    /// Samples without a reward after all retries, in the group's order.
    pub failures: Vec<Failure>,
    /// Failed calls, including those that a retry recovered.
    pub failed_calls: u64,
    /// Total time of all calls.
    pub time: Duration,
}

/// Sets the reward of every sample of `group`, or none if `reward` fails `retries` + 1 times. If
/// `parallel` is true, samples are scored on all of rayon's threads, else on the calling thread: for
/// rewards that cost less than waking another one.
///
/// A panic, an error and a number that is no valid reward are failures. Of a rollout with several
/// parts only the last is scored; the others get the same reward. Returns the failures in the group's
/// order.
pub fn score<R: IntoReward>(
    group: &mut Group,
    reward: impl Fn(&Sample) -> R + Sync,
    retries: u32,
    parallel: bool,
) -> Vec<Failure> {
    scoring(group, reward, retries, parallel).failures
}

pub(super) fn scoring<R: IntoReward>(
    group: &mut Group,
    reward: impl Fn(&Sample) -> R + Sync,
    retries: u32,
    parallel: bool,
) -> Scoring {
    let earlier = group.set_earlier_parts_aside();
    let attempt = |sample: &mut Sample| {
        (sample.reward, sample.reward_parts) = (None, RewardParts::new());
        let (started, mut attempts) = (Instant::now(), 1);
        loop {
            match call(&reward, sample) {
                Ok(RewardOutput { reward, parts }) => {
                    (sample.reward, sample.reward_parts) = (Some(reward), parts);
                    return (None, attempts - 1, started.elapsed());
                }
                Err((kind, text)) if attempts > retries => {
                    return (Some(Failure { sample: sample.index, attempts, kind, text }), attempts, started.elapsed());
                }
                Err(_) => attempts += 1,
            }
        }
    };
    let outcomes: Vec<(Option<Failure>, u32, Duration)> = match parallel {
        true => group.samples.par_iter_mut().map(attempt).collect(),
        false => group.samples.iter_mut().map(attempt).collect(),
    };
    group.put_parts_back(earlier);
    Scoring {
        failed_calls: outcomes.iter().map(|outcome| u64::from(outcome.1)).sum(),
        time: outcomes.iter().map(|outcome| outcome.2).sum(),
        failures: outcomes.into_iter().filter_map(|outcome| outcome.0).collect(),
    }
}

fn call<R: IntoReward>(reward: impl Fn(&Sample) -> R, sample: &Sample) -> Result<RewardOutput, (FailureKind, String)> {
    match catch_unwind(AssertUnwindSafe(|| reward(sample).into_reward())) {
        Ok(Ok(output)) => {
            match std::iter::once(output.reward).chain(output.parts.values().copied()).find(|value| !is_reward(*value)) {
                None => Ok(output),
                Some(value) if value.is_finite() => Err((FailureKind::TooLarge, format!("{value:e}"))),
                Some(value) => Err((FailureKind::NotFinite, value.to_string())),
            }
        }
        Ok(Err(text)) => Err((FailureKind::Refused, text)),
        Err(panic) => Err((FailureKind::Panicked, panic_message(panic.as_ref()))),
    }
}
