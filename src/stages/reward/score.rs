//! Scoring one group: each sample alone, with bounded retries, and with panics caught (law F6).

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use rayon::prelude::*;

use crate::algo::rewards::{IntoReward, RewardOutput};
use crate::data::{Group, RewardParts, Sample, is_reward};
use crate::flow::panic_message;
use crate::observe::logs::{Failure, FailureKind};

/// Outcome of scoring a group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Scoring {
    /// Samples without a reward after all retries, in the group's order.
    pub failures: Vec<Failure>,
    /// Failed calls, including those that a retry recovered.
    pub failed_calls: u64,
    /// Total time of all calls.
    pub time: Duration,
}

/// Threads that compute a group's rewards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scorers {
    /// All of rayon's threads.
    Threads,
    /// The calling thread: for rewards that cost less than waking another one.
    Caller,
}

impl Scorers {
    /// Chooses for the next group by the time of the last one.
    pub fn after(scoring: &Scoring) -> Self {
        const WORTH_WAKING: Duration = Duration::from_micros(100);
        if scoring.time < WORTH_WAKING { Scorers::Caller } else { Scorers::Threads }
    }
}

/// Sets the reward of every sample of `group`, or none if `reward` fails `retries` + 1 times.
///
/// A panic, an error and a number that is no valid reward are failures. Of a rollout with several
/// parts only the last is scored; the others get the same reward.
pub fn score<R: IntoReward>(group: &mut Group, reward: impl Fn(&Sample) -> R + Sync, retries: u32, scorers: Scorers) -> Scoring {
    let earlier = group.set_earlier_parts_aside();
    let attempt = |sample: &mut Sample| {
        (sample.reward, sample.reward_parts) = (None, RewardParts::new());
        let mut attempts = 0;
        loop {
            attempts += 1;
            match call(&reward, sample) {
                Ok(RewardOutput { reward, parts }) => {
                    (sample.reward, sample.reward_parts) = (Some(reward), parts);
                    return (None, u64::from(attempts) - 1);
                }
                Err((kind, text)) if attempts > retries => {
                    return (Some(Failure { sample: sample.index, attempts, kind, text }), u64::from(attempts));
                }
                Err(_) => {}
            }
        }
    };
    let outcome = |sample: &mut Sample| {
        let started = Instant::now();
        let (failure, failed_calls) = attempt(sample);
        (failure, failed_calls, started.elapsed())
    };
    let outcomes: Vec<(Option<Failure>, u64, Duration)> = match scorers {
        Scorers::Threads => group.samples.par_iter_mut().map(outcome).collect(),
        Scorers::Caller => group.samples.iter_mut().map(outcome).collect(),
    };
    group.put_parts_back(earlier);
    Scoring {
        failed_calls: outcomes.iter().map(|outcome| outcome.1).sum(),
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
