//! Scoring one group: each sample by itself, with a bounded number of retries, and panics caught (law F6).

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use rayon::prelude::*;

use crate::algo::rewards::{Earned, Earnings};
use crate::data::{Group, RewardParts, Sample, is_reward};
use crate::flow::panic_message;
use crate::observe::logs::{Failure, FailureKind};

/// How scoring a group went.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Scoring {
    /// Samples that no retry could save, by their place; empty where every sample has its reward.
    pub failures: Vec<Failure>,
    /// Calls that failed, those that a retry made good included.
    pub failed_calls: u64,
    /// The time that all calls took together.
    pub time: Duration,
}

/// Who computes a group's rewards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scorers {
    /// All of rayon's threads.
    Threads,
    /// The thread that asks: for rewards that cost less than to wake another one.
    Caller,
}

impl Scorers {
    /// For the next group, by what the last one took.
    pub fn after(scoring: &Scoring) -> Self {
        const WORTH_WAKING: Duration = Duration::from_micros(100);
        if scoring.time < WORTH_WAKING { Scorers::Caller } else { Scorers::Threads }
    }
}

/// Gives every sample of `group` its reward, or none where `reward` fails `retries` + 1 times. A panic, an error and a number that
/// can't be a reward are failures. Of a rollout that has several parts the last is judged, and the others earn the same. Costs one call a rollout and one a
/// retry; returns when all are done.
pub fn score<R: Earned>(group: &mut Group, reward: impl Fn(&Sample) -> R + Sync, retries: u32, scorers: Scorers) -> Scoring {
    let earlier = group.set_earlier_parts_aside();
    let attempt = |sample: &mut Sample| {
        (sample.reward, sample.reward_parts) = (None, RewardParts::new());
        let mut attempts = 0;
        loop {
            attempts += 1;
            match call(&reward, sample) {
                Ok(Earnings { reward, parts }) => {
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

fn call<R: Earned>(reward: impl Fn(&Sample) -> R, sample: &Sample) -> Result<Earnings, (FailureKind, String)> {
    match catch_unwind(AssertUnwindSafe(|| reward(sample).earned())) {
        Ok(Ok(earned)) => {
            match std::iter::once(earned.reward).chain(earned.parts.values().copied()).find(|value| !is_reward(*value)) {
                None => Ok(earned),
                Some(value) if value.is_finite() => Err((FailureKind::TooLarge, format!("{value:e}"))),
                Some(value) => Err((FailureKind::NotFinite, value.to_string())),
            }
        }
        Ok(Err(text)) => Err((FailureKind::Refused, text)),
        Err(panic) => Err((FailureKind::Panicked, panic_message(panic.as_ref()))),
    }
}
