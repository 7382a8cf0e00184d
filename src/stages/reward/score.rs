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

/// Sets the reward of every sample of `group`, or none if `reward` fails `retries` + 1 times. If
/// `parallel` is true, samples are scored on all of rayon's threads, else on the calling thread: for
/// rewards that cost less than waking another one.
///
/// A panic, an error and a number that is no valid reward are failures. Of a rollout with several
/// parts only the last is scored; the others get the same reward.
pub fn score<R: IntoReward>(group: &mut Group, reward: impl Fn(&Sample) -> R + Sync, retries: u32, parallel: bool) -> Scoring {
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
