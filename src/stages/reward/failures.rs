//! Policy for groups whose reward failed or that lost samples (law F6).
//!
//! A sample is *lost* if an engine, an environment, a sandbox or a service failed on it after all
//! retries. That says nothing about the completion, and costs the sample alone. A completion that
//! was truncated, or that exceeded a time limit, is not lost: it has a reward. Dropping slow samples
//! would bias training towards short completions.

use std::collections::BTreeSet;
use std::time::{SystemTime, UNIX_EPOCH};

use super::each::Scoring;
use crate::data::{Group, Prompt, Scored};
use crate::flow::StageError;
use crate::observe::logs::{DeadLetter, Failure, FailureKind, JsonLines};
use crate::observe::{Metric, Metrics};
use crate::rollout::{LOST, why_lost};
use crate::settings::declare::choices;
use crate::util::untrusted;

choices! {
    /// Policy for a group that lost samples to an engine, an environment, a sandbox or a service.
    pub enum OnLostSample {
        /// the lost samples are dropped as *lost*, and the group continues without them; a group
        /// with fewer than two others is dropped.
        "drop_sample" => DropSample,
        /// the whole group is dropped as *lost*.
        "drop_group" => DropGroup,
    }
}

/// Default number of retries of a failed reward.
pub(crate) const RETRIES: u32 = 2;
/// Default for the largest number of groups in a row whose rewards fail.
pub(crate) const MAX_POISONED: u64 = 64;

/// Characters of a prompt and of a response in an error.
const SHOWN: usize = 200;

/// Fewest rollouts with which a group continues after it lost some.
const FEWEST: usize = 2;

choices! {
    /// Policy for a group whose reward still fails after all retries (law F6).
    pub enum OnFailure {
        /// the group is written to `dead_letters.jsonl`, for `rollflow replay`, and dropped; of
        /// lost samples, as `on_lost_sample` says.
        "dead_letter" => DeadLetter,
        /// the group is dropped, or the samples that it lost are.
        "drop" => Drop,
        /// the sample earns 0.
        "zero" => Zero,
        /// the run ends.
        "fail" => Fail,
    }
}

/// Policy of a reward stage for failures.
pub struct FailurePolicy {
    /// Policy for a group whose reward still fails after all retries.
    pub on_failure: OnFailure,
    /// Policy for a group that lost samples. A reward that returns an error lost its sample; one
    /// that panics or returns no finite number is defective, and its group is poisoned.
    pub on_lost_sample: OnLostSample,
    /// Most groups in a row that may fail; one more ends the run. Default: 64.
    pub max_poisoned: u64,
    /// Writer of dead letters. If none, they are logged as errors and their samples are lost.
    pub dead_letters: Option<JsonLines<DeadLetter>>,
    /// Metrics that count rewards, failures and dead letters.
    pub metrics: Option<Metrics>,
}

impl Default for FailurePolicy {
    fn default() -> Self {
        FailurePolicy {
            on_failure: OnFailure::default(),
            on_lost_sample: OnLostSample::default(),
            max_poisoned: MAX_POISONED,
            dead_letters: None,
            metrics: None,
        }
    }
}

/// Applies a [`FailurePolicy`], and counts the groups that failed in a row.
#[derive(Default)]
pub(super) struct FailureHandler {
    pub(super) policy: FailurePolicy,
    /// If true, the run has no rewards, and only losses are failures.
    pub(super) unrewarded: bool,
    failed_in_a_row: u64,
}

impl FailureHandler {
    /// Begins the count of dead letters at 0: an alert on its growth needs a value before the first one.
    pub(super) fn begin(&self, stage: &str) {
        let writes = self.policy.on_failure == OnFailure::DeadLetter;
        self.policy.metrics.iter().filter(|_| writes).for_each(|metrics| metrics.begin(Metric::DeadLetters, &[stage]));
    }

    /// Applies the policy to a group: returns it as the next stage receives it, or the error that
    /// ends the run. May block on the disk.
    pub(super) fn apply(&mut self, stage: &str, mut group: Group, scoring: Scoring) -> Result<Scored, StageError> {
        let Scoring { mut failures, failed_calls, time } = scoring;
        if let Some(metrics) = self.policy.metrics.as_ref().filter(|_| !self.unrewarded) {
            metrics.observe_of(Metric::RewardTime, &[], time.as_secs_f64(), Some(group.id()));
        }
        // A lost sample has no whole completion that could earn anything.
        for sample in &mut group.samples {
            if let Some(text) = why_lost(sample).map(str::to_owned) {
                (sample.reward, sample.reward_parts) = Default::default();
                failures.retain(|failure| failure.sample != sample.index);
                failures.push(Failure { sample: sample.index, attempts: 1, kind: FailureKind::Lost, text });
            }
        }
        failures.sort_by_key(|failure| failure.sample);
        let Some(error) = failures.first().map(|first| message(&group, first)) else {
            self.failed_in_a_row = 0;
            let scored = self.scored(group)?;
            self.count(&scored, failed_calls);
            return Ok(scored);
        };
        self.failed_in_a_row += 1;
        let scored = self.drop_failed(stage, group, failures, &error)?;
        if self.policy.on_failure != OnFailure::Zero && scored.dropped().is_none() {
            self.failed_in_a_row = 0;
        }
        let FailurePolicy { max_poisoned, on_failure, dead_letters, .. } = &self.policy;
        if self.failed_in_a_row > *max_poisoned {
            let writer = dead_letters.as_ref().filter(|_| *on_failure == OnFailure::DeadLetter);
            return Err(StageError::new(format!(
                "the reward failed on {} groups in a row, where at most {max_poisoned} may (max_poisoned): fix it, or raise the bound{}; \
                 the last failure: {error}",
                self.failed_in_a_row,
                writer.map_or_else(String::new, |writer| format!("; the groups are in {}", writer.path().display())),
            )));
        }
        self.count(&scored, failed_calls);
        Ok(scored)
    }

    /// Drops the lost samples, or the whole group, as the policy says.
    fn without_lost(&self, mut group: Group, failures: &[Failure]) -> Result<Scored, StageError> {
        if !failures.iter().all(|failure| failure.kind.is_loss()) {
            return Ok(Scored::poisoned(group));
        }
        let lost: BTreeSet<u32> = failures.iter().map(|failure| failure.sample).collect();
        let kept: BTreeSet<u32> = group.samples.iter().map(|sample| sample.index).filter(|index| !lost.contains(index)).collect();
        if self.policy.on_lost_sample == OnLostSample::DropGroup || kept.len() < if self.unrewarded { 1 } else { FEWEST } {
            return Ok(Scored::poisoned(group).drop_for(LOST.into()));
        }
        group.drop_samples(LOST, |sample| lost.contains(&sample.index));
        self.scored(group)
    }

    fn scored(&self, group: Group) -> Result<Scored, StageError> {
        Ok(if self.unrewarded { Scored::unrewarded(group) } else { Scored::new(group)? })
    }

    fn drop_failed(&mut self, stage: &str, mut group: Group, failures: Vec<Failure>, error: &str) -> Result<Scored, StageError> {
        match self.policy.on_failure {
            OnFailure::Fail => return Err(StageError::new(error)),
            OnFailure::Zero => {
                group.samples.iter_mut().for_each(|sample| sample.reward = sample.reward.or(Some(0.0)));
                return Ok(Scored::new(group)?);
            }
            OnFailure::Drop => {}
            OnFailure::DeadLetter => {
                if let Some(metrics) = &self.policy.metrics {
                    metrics.add(Metric::DeadLetters, &[stage], 1.0);
                }
                match &mut self.policy.dead_letters {
                    Some(writer) => {
                        writer.write(&dead_letter(stage, &group, failures.clone()))?;
                        writer.sync()?;
                        tracing::warn!(stage, "{error}; its group is in {}", writer.path().display());
                    }
                    None => tracing::error!(stage, "{error}; its group is lost, since there is no file for dead letters"),
                }
            }
        }
        self.without_lost(group, &failures)
    }

    fn count(&self, scored: &Scored, failed_calls: u64) {
        let Some(metrics) = &self.policy.metrics else { return };
        metrics.add(Metric::RewardFailures, &[], failed_calls as f64);
        for reward in scored.group().samples.iter().filter_map(|sample| sample.reward) {
            metrics.observe_of(Metric::SampleReward, &[], reward, Some(scored.group().id()));
        }
    }
}

fn dead_letter(stage: &str, group: &Group, failures: Vec<Failure>) -> DeadLetter {
    DeadLetter {
        time: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64()),
        stage: stage.to_owned(),
        failures,
        prompt: Prompt::clone(&group.prompt),
        samples: group.samples.clone(),
    }
}

fn message(group: &Group, failure: &Failure) -> String {
    let sample = group.samples.iter().rfind(|sample| sample.index == failure.sample);
    let (prompt, response) = (group.prompt.text.render(), sample.map_or("", |sample| sample.response.as_str()));
    let [prompt, response] = [&prompt, response].map(|text| untrusted::line_of(text, SHOWN));
    let (index, group) = (failure.sample, group.id());
    let failure = Failure { text: untrusted::line(&failure.text), ..failure.clone() };
    format!(
        "the reward of sample {index} of group {group} failed: {failure}; the prompt was \"{prompt}\", the response \
         \"{response}\""
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_shows_the_beginnings_of_long_texts_in_one_line() {
        let long = "\u{1b}[2J\n".repeat(1 << 18);
        let sample = crate::data::Sample { response: long.clone(), ..Default::default() };
        let failure = Failure { sample: 0, attempts: 1, kind: FailureKind::Refused, text: long };
        let error = message(&Group { samples: vec![sample], ..Group::default() }, &failure);
        assert!(error.len() < 20_000 && error.matches("more characters").count() == 2, "{error}");
        assert!(!error.contains(char::is_control), "{error:?}");
    }
}
