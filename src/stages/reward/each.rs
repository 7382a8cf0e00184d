//! A reward for each sample by itself, computed apart from the runtime and the tensor threads: on rayon's threads where that takes longer than
//! to wake them, else on the stage's own.
//!
//! Law F6: a sample whose reward fails is tried again at once, and then its group is a dead letter, and the run goes on: without the sample
//! where that was lost, without the whole group where the reward has a defect. Only a reward that fails on one group after the other ends it.

use std::fmt;

use crate::algo::rewards::{Earned, Earnings};
use crate::data::{Group, Sample, Scored};
use crate::flow::{Io, RunContext, Stage, StageError, StageSpec};
use crate::observe::Metrics;
use crate::observe::logs::DeadLetterWriter;

use super::score::{Scorers, score};
use super::settle::{OnFailure, OnLostSample, Settling};

type RewardFn = dyn Fn(&Sample) -> Result<Earnings, String> + Send + Sync;
type AheadFn = dyn Fn(&Group) + Send + Sync;

/// Scores every sample of a group and passes the group on.
pub struct Reward {
    reward: Box<RewardFn>,
    ahead: Option<Box<AheadFn>>,
    threads: usize,
    retries: u32,
    settling: Settling,
}

impl Reward {
    /// `reward` is called once a sample, from several threads. It sees the prompt, the response and the metadata, and returns a number,
    /// [`Earnings`] or a result. Where it fails it is called twice more, at once; a reward over a network should pause by itself.
    pub fn each<R: Earned>(reward: impl Fn(&Sample) -> R + Send + Sync + 'static) -> Self {
        Reward {
            reward: Box::new(move |sample| reward(sample).earned()),
            ahead: None,
            threads: 0,
            retries: 2,
            settling: Settling::default(),
        }
    }

    /// Shows each group to `announce` before its samples are scored one by one, for whoever can begin with all of them at once, such as a
    /// [`Scorer`](super::Scorer).
    pub fn ahead(self, announce: impl Fn(&Group) + Send + Sync + 'static) -> Self {
        Reward { ahead: Some(Box::new(announce)), ..self }
    }

    /// Cores that the reward computes with beside the stage's own thread, for the thread budget.
    pub fn threads(self, threads: usize) -> Self {
        Reward { threads, ..self }
    }

    /// How often it is called again for a sample on which it panics, errs or gives no finite number: 2 unless told otherwise.
    pub fn retries(self, retries: u32) -> Self {
        Reward { retries, ..self }
    }

    /// What to do when no retry helps.
    pub fn on_failure(self, on_failure: OnFailure) -> Self {
        Reward { settling: Settling { on_failure, ..self.settling }, ..self }
    }

    /// What becomes of a group whose samples an engine, an environment, a sandbox or a service lost; the sample is dropped by default. A reward
    /// that returns an error has lost its sample, too; one that panics or gives no finite number has a defect, and its group is poisoned.
    pub fn on_lost_sample(self, on_lost_sample: OnLostSample) -> Self {
        Reward { settling: Settling { on_lost_sample, ..self.settling }, ..self }
    }

    /// Ends the run with [`RewardBroken`](super::RewardBroken) when it fails on more than this many groups in a row, whatever becomes of them: 64
    /// unless told otherwise, so that a broken reward does not burn a night.
    pub fn max_poisoned(self, groups: u64) -> Self {
        Reward { settling: Settling { max_poisoned: groups, ..self.settling }, ..self }
    }

    /// Writes dead letters there. Without it they are logged as errors, and their samples are lost.
    pub fn dead_letters(self, writer: DeadLetterWriter) -> Self {
        Reward { settling: Settling { dead_letters: Some(writer), ..self.settling }, ..self }
    }

    /// Counts rewards, failures and dead letters there.
    pub fn metrics(self, metrics: &Metrics) -> Self {
        Reward { settling: Settling { metrics: Some(metrics.clone()), ..self.settling }, ..self }
    }
}

impl Stage for Reward {
    type In = Group;
    type Out = Scored;

    fn attach(&mut self, context: &mut RunContext) {
        context.fill(&mut self.settling.metrics);
    }

    fn run(&mut self, io: &mut Io<Group, Scored>) -> Result<(), StageError> {
        let mut scorers = Scorers::Threads;
        while let Some(mut group) = io.recv()? {
            if let Some(announce) = &self.ahead {
                announce(&group);
            }
            let scoring = score(&mut group, self.reward.as_ref(), self.retries, scorers);
            scorers = Scorers::after(&scoring);
            let scored = self.settling.settle(io.stage(), group, scoring)?;
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
        f.debug_struct("Reward").field("settling", &self.settling).finish_non_exhaustive()
    }
}
