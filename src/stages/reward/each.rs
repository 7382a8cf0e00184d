//! A reward for each sample by itself, computed apart from the runtime and the tensor threads: on rayon's threads where that takes longer than
//! to wake them, else on the stage's own.
//!
//! Law F6: a sample whose reward fails is tried again at once, and then its whole group (law D2) is a dead letter, dropped and counted,
//! and the run goes on. Only a reward that fails on one group after the other ends it.

use std::fmt;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::algo::rewards::{Earned, Earnings};
use crate::data::{Group, Prompt, Sample, Scored};
use crate::flow::{Io, Stage, StageError, StageSpec};
use crate::observe::logs::{DeadLetter, DeadLetterWriter, Failure};
use crate::observe::{Metric, Metrics};

use super::score::{Scorers, Scoring, score};

/// What becomes of a group when no retry could save the reward of one of its samples (law F6).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnFailure {
    /// It is dropped as [`POISONED`](crate::data::POISONED) and written to the dead letters, to be tried again later.
    #[default]
    DeadLetter,
    /// It is dropped as [`POISONED`](crate::data::POISONED).
    Drop,
    /// The sample earns 0, the others what they earned.
    Zero,
    /// The run ends with a [`RewardError`].
    Fail,
}

/// A reward that failed.
#[derive(Clone, Debug, thiserror::Error)]
#[error("the reward of sample {} of group {group} failed: {failure}; the prompt was {prompt:?}, the response {response:?}", failure.sample)]
pub struct RewardError {
    group: u64,
    prompt: String,
    response: String,
    failure: Failure,
}

/// A reward that failed on so many groups in a row that it is taken for broken.
#[derive(Clone, Debug, thiserror::Error)]
#[error("the reward failed on {in_a_row} groups in a row, where at most {max_poisoned} may (max_poisoned): mend it, or raise the bound{}; the last failure: {last}", kept(.dead_letters))]
pub struct RewardBroken {
    in_a_row: u64,
    max_poisoned: u64,
    dead_letters: Option<PathBuf>,
    last: RewardError,
}

fn kept(dead_letters: &Option<PathBuf>) -> String {
    dead_letters.as_ref().map_or_else(String::new, |path| format!("; the groups are in {}", path.display()))
}

type RewardFn = dyn Fn(&Sample) -> Result<Earnings, String> + Send + Sync;
type AheadFn = dyn Fn(&Group) + Send + Sync;

/// Scores every sample of a group and passes the group on.
pub struct Reward {
    reward: Box<RewardFn>,
    ahead: Option<Box<AheadFn>>,
    threads: usize,
    retries: u32,
    on_failure: OnFailure,
    max_poisoned: u64,
    dead_letters: Option<DeadLetterWriter>,
    metrics: Option<Metrics>,
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
            on_failure: OnFailure::default(),
            max_poisoned: 64,
            dead_letters: None,
            metrics: None,
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
        Reward { on_failure, ..self }
    }

    /// Ends the run with [`RewardBroken`] when it fails on more than this many groups in a row, whatever becomes of them: 64 unless
    /// told otherwise, so that a broken reward does not burn a night.
    pub fn max_poisoned(self, groups: u64) -> Self {
        Reward { max_poisoned: groups, ..self }
    }

    /// Writes dead letters there. Without it they are logged as errors, and their samples are lost.
    pub fn dead_letters(self, writer: DeadLetterWriter) -> Self {
        Reward { dead_letters: Some(writer), ..self }
    }

    /// Counts rewards, failures and dead letters there.
    pub fn metrics(self, metrics: &Metrics) -> Self {
        Reward { metrics: Some(metrics.clone()), ..self }
    }

    /// What becomes of a group with at least one failure.
    fn give_up(
        &mut self,
        stage: &str,
        mut group: Group,
        failures: Vec<Failure>,
        error: &RewardError,
    ) -> Result<Scored, StageError> {
        match self.on_failure {
            OnFailure::Fail => return Err(error.clone().into()),
            OnFailure::Zero => {
                group.samples.iter_mut().for_each(|sample| sample.reward = sample.reward.or(Some(0.0)));
                return Ok(Scored::new(group)?);
            }
            OnFailure::Drop => {}
            OnFailure::DeadLetter => {
                if let Some(metrics) = &self.metrics {
                    metrics.add(Metric::DeadLetters, &[stage], 1.0);
                }
                match &mut self.dead_letters {
                    Some(writer) => {
                        writer.write(&letter(stage, &group, failures))?;
                        tracing::warn!(stage, "{error}; its group is in {}", writer.path().display());
                    }
                    None => tracing::error!(stage, "{error}; its group is lost, since there is no file for dead letters"),
                }
            }
        }
        Ok(Scored::poisoned(group))
    }

    fn count(&self, scored: &Scored, failed_calls: u64) {
        let Some(metrics) = &self.metrics else { return };
        metrics.add(Metric::RewardFailures, &[], failed_calls as f64);
        for reward in scored.group().samples.iter().filter_map(|sample| sample.reward) {
            metrics.observe(Metric::SampleReward, &[], reward);
        }
    }
}

fn letter(stage: &str, group: &Group, failures: Vec<Failure>) -> DeadLetter {
    DeadLetter {
        time: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64()),
        stage: stage.to_owned(),
        failures,
        prompt: Prompt::clone(&group.prompt),
        samples: group.samples.clone(),
    }
}

impl RewardError {
    fn new(group: &Group, failure: &Failure) -> Self {
        let sample = group.samples.iter().find(|sample| sample.index == failure.sample);
        let response = sample.map(|sample| sample.response.clone()).unwrap_or_default();
        RewardError { group: group.id(), prompt: group.prompt.text.render(), response, failure: failure.clone() }
    }
}

impl Stage for Reward {
    type In = Group;
    type Out = Scored;

    fn run(&mut self, io: &mut Io<Group, Scored>) -> Result<(), StageError> {
        let (mut in_a_row, mut scorers) = (0, Scorers::Threads);
        while let Some(mut group) = io.recv()? {
            if let Some(announce) = &self.ahead {
                announce(&group);
            }
            let scoring = score(&mut group, self.reward.as_ref(), self.retries, scorers);
            scorers = Scorers::after(&scoring);
            let Scoring { failures, failed_calls, .. } = scoring;
            let scored = match failures.first().map(|first| RewardError::new(&group, first)) {
                None => {
                    in_a_row = 0;
                    Scored::new(group)?
                }
                Some(error) => {
                    in_a_row += 1;
                    let scored = self.give_up(io.stage(), group, failures, &error)?;
                    if in_a_row > self.max_poisoned {
                        let dead_letters = match self.on_failure {
                            OnFailure::DeadLetter => self.dead_letters.as_ref().map(|writer| writer.path().to_owned()),
                            _ => None,
                        };
                        return Err(RewardBroken { in_a_row, max_poisoned: self.max_poisoned, dead_letters, last: error }.into());
                    }
                    scored
                }
            };
            self.count(&scored, failed_calls);
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
        f.debug_struct("Reward").field("on_failure", &self.on_failure).finish_non_exhaustive()
    }
}
