//! Scoring one group: each sample by itself on rayon's threads, with a bounded number of retries, and panics caught (law F6).

use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};

use rayon::prelude::*;

use crate::data::{Group, Sample};
use crate::flow::panic_message;
use crate::observe::logs::{Failure, FailureKind};

/// What a reward may return: a number, or a result whose error says why there is none.
pub trait Earned {
    /// The number, or why there is none.
    fn earned(self) -> Result<f64, String>;
}

impl Earned for f64 {
    fn earned(self) -> Result<f64, String> {
        Ok(self)
    }
}

impl<E: Display> Earned for Result<f64, E> {
    fn earned(self) -> Result<f64, String> {
        self.map_err(|error| format!("{error:#}"))
    }
}

/// How scoring a group went.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Scoring {
    /// Samples that no retry could save, by their place; empty where every sample has its reward.
    pub failures: Vec<Failure>,
    /// Calls that failed, those that a retry made good included.
    pub failed_calls: u64,
}

/// Gives every sample of `group` its reward, or none where `reward` fails `retries` + 1 times. A panic, an error and a number that is not
/// finite are failures. Costs one call a sample and one a retry, on all of rayon's threads; returns when all are done.
pub fn score<R: Earned>(group: &mut Group, reward: impl Fn(&Sample) -> R + Sync, retries: u32) -> Scoring {
    let outcome = |sample: &mut Sample| {
        sample.reward = None;
        let mut attempts = 0;
        loop {
            attempts += 1;
            match call(&reward, sample) {
                Ok(reward) => {
                    sample.reward = Some(reward);
                    return (None, u64::from(attempts) - 1);
                }
                Err((kind, text)) if attempts > retries => {
                    return (Some(Failure { sample: sample.index, attempts, kind, text }), u64::from(attempts));
                }
                Err(_) => {}
            }
        }
    };
    let outcomes: Vec<(Option<Failure>, u64)> = group.samples.par_iter_mut().map(outcome).collect();
    let failed_calls = outcomes.iter().map(|outcome| outcome.1).sum();
    Scoring { failures: outcomes.into_iter().filter_map(|outcome| outcome.0).collect(), failed_calls }
}

fn call<R: Earned>(reward: impl Fn(&Sample) -> R, sample: &Sample) -> Result<f64, (FailureKind, String)> {
    match catch_unwind(AssertUnwindSafe(|| reward(sample).earned())) {
        Ok(Ok(reward)) if reward.is_finite() => Ok(reward),
        Ok(Ok(reward)) => Err((FailureKind::NotFinite, reward.to_string())),
        Ok(Err(text)) => Err((FailureKind::Refused, text)),
        Err(panic) => Err((FailureKind::Panicked, panic_message(panic.as_ref()))),
    }
}
