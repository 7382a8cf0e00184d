//! What becomes of a scored group: it goes on, perhaps without the samples that were lost, or is given up by the policy for rewards that
//! fail (law F6).
//!
//! A sample is *lost* where an engine, an environment, a sandbox or a service failed on it, again and again: that says nothing of the
//! completion, and costs the sample alone. A completion that is cut off, or that takes too long to judge, is none of these: it has a
//! verdict. Samples that disappear for being slow would bias training towards short completions.

use crate::settings::declare::choices;
use std::collections::BTreeSet;
use std::fmt;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::data::{Group, Prompt, Scored};
use crate::flow::StageError;
use crate::observe::logs::{DeadLetter, DeadLetterWriter, Failure, FailureKind};
use crate::observe::{Metric, Metrics};

use super::score::Scoring;
use crate::rollout::LOST;
use crate::rollout::why_lost;

choices! {
    /// Policy for a group that lost samples to an engine, an environment, a sandbox or a service.
    pub enum OnLostSample {
        /// the lost samples are dropped as *lost*, and the group continues without them; a group with fewer than two others is dropped.
        "drop_sample" => DropSample,
        /// the whole group is dropped as *lost*.
        "drop_group" => DropGroup,
    }
}

/// Fewest rollouts that a group goes on with when it lost some.
const FEWEST: usize = 2;

choices! {
    /// Policy for a group whose reward still fails after all retries (law F6).
    pub enum OnFailure {
        /// the group is written to `dead_letters.jsonl`, for `rollflow replay`, and dropped; of lost samples, as `on_lost_sample` says.
        "dead_letter" => DeadLetter,
        /// the group is dropped, or the samples that it lost are.
        "drop" => Drop,
        /// the sample earns 0.
        "zero" => Zero,
        /// the run ends.
        "fail" => Fail,
    }
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

/// The policy, where it writes to, and how many groups failed since the last that did not.
pub(super) struct Settling {
    pub(super) on_failure: OnFailure,
    pub(super) on_lost_sample: OnLostSample,
    pub(super) max_poisoned: u64,
    pub(super) dead_letters: Option<DeadLetterWriter>,
    pub(super) metrics: Option<Metrics>,
    pub(super) in_a_row: u64,
}

impl Default for Settling {
    fn default() -> Self {
        Settling {
            on_failure: OnFailure::default(),
            on_lost_sample: OnLostSample::default(),
            max_poisoned: 64,
            dead_letters: None,
            metrics: None,
            in_a_row: 0,
        }
    }
}

impl Settling {
    /// The group as the next stage gets it, or why the run ends. May wait for a disk.
    pub(super) fn settle(&mut self, stage: &str, mut group: Group, scoring: Scoring) -> Result<Scored, StageError> {
        let Scoring { mut failures, failed_calls, .. } = scoring;
        // There is no whole answer that could earn anything.
        for sample in &mut group.samples {
            if let Some(text) = why_lost(sample).map(str::to_owned) {
                (sample.reward, sample.reward_parts) = Default::default();
                failures.retain(|failure| failure.sample != sample.index);
                failures.push(Failure { sample: sample.index, attempts: 1, kind: FailureKind::Lost, text });
            }
        }
        failures.sort_by_key(|failure| failure.sample);
        let scored = match failures.first().map(|first| RewardError::new(&group, first)) {
            None => {
                self.in_a_row = 0;
                Scored::new(group)?
            }
            Some(error) => {
                self.in_a_row += 1;
                let scored = self.give_up(stage, group, failures, &error)?;
                if self.on_failure != OnFailure::Zero && scored.dropped().is_none() {
                    self.in_a_row = 0;
                }
                if self.in_a_row > self.max_poisoned {
                    return Err(self.broken(error).into());
                }
                scored
            }
        };
        self.count(&scored, failed_calls);
        Ok(scored)
    }

    fn broken(&self, last: RewardError) -> RewardBroken {
        let dead_letters = match self.on_failure {
            OnFailure::DeadLetter => self.dead_letters.as_ref().map(|writer| writer.path().to_owned()),
            _ => None,
        };
        RewardBroken { in_a_row: self.in_a_row, max_poisoned: self.max_poisoned, dead_letters, last }
    }

    /// The group without what it lost, or as much of it as the policy drops.
    fn without_lost(&self, mut group: Group, failures: &[Failure]) -> Result<Scored, StageError> {
        if !failures.iter().all(|failure| failure.kind.is_loss()) {
            return Ok(Scored::poisoned(group));
        }
        let lost: BTreeSet<u32> = failures.iter().map(|failure| failure.sample).collect();
        let left: BTreeSet<u32> = group.samples.iter().map(|sample| sample.index).filter(|index| !lost.contains(index)).collect();
        if self.on_lost_sample == OnLostSample::DropGroup || left.len() < FEWEST {
            return Ok(Scored::poisoned(group).drop_for(LOST.into()));
        }
        group.drop_samples(LOST, |sample| lost.contains(&sample.index));
        Ok(Scored::new(group)?)
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
                        writer.write(&letter(stage, &group, failures.clone()))?;
                        tracing::warn!(stage, "{error}; its group is in {}", writer.path().display());
                    }
                    None => tracing::error!(stage, "{error}; its group is lost, since there is no file for dead letters"),
                }
            }
        }
        self.without_lost(group, &failures)
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
        let sample = group.samples.iter().rfind(|sample| sample.index == failure.sample);
        let response = sample.map(|sample| sample.response.clone()).unwrap_or_default();
        RewardError { group: group.id(), prompt: group.prompt.text.render(), response, failure: failure.clone() }
    }
}

impl fmt::Debug for Settling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Settling").field("on_failure", &self.on_failure).finish_non_exhaustive()
    }
}
