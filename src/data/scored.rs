//! A group after its reward, and what is left of it when a filter dropped it.

use std::borrow::Cow;

use super::{DataError, DroppedSample, Group, RewardParts, Sample};
use crate::flow::Message;

/// Why a group was dropped whose reward failed; its tokens have the fate of the same name (laws D4, F6).
pub const POISONED: &str = "poisoned";

/// Largest absolute value of a reward. Beyond it, squares and sums of finite rewards could
/// overflow, and a step would train on infinite deviations without an error (law N4).
pub const REWARD_LIMIT: f64 = 1e100;

/// Returns true if `value` can be a reward: finite, and at most [`REWARD_LIMIT`] either way.
pub fn is_reward(value: f64) -> bool {
    value.abs() <= REWARD_LIMIT
}

/// A group after its reward: either every sample has a finite reward, or the group is dropped, or the run
/// has no rewards.
/// Filters and batchers accept no other type, so that a filter before the reward does not compile.
/// A dropped group still goes to the batcher, so that its rewards count in the metrics.
#[derive(Clone, Debug, PartialEq)]
pub struct Scored {
    group: Group,
    dropped: Option<Cow<'static, str>>,
    spared: bool,
}

/// Record of a group that will not be trained.
#[derive(Clone, Debug, PartialEq)]
pub struct Dropped {
    /// The group's id.
    pub id: u64,
    /// Reason: a filter's, [`POISONED`], or that of another stage that dropped it.
    pub reason: String,
    /// The rewards of those rollouts that have one.
    pub rewards: Vec<f64>,
    /// The parts of each rollout's reward.
    pub parts: Vec<RewardParts>,
    /// Tokens that were sampled for each sample.
    pub lengths: Vec<usize>,
    /// The samples that were dropped from it before.
    pub samples: Vec<DroppedSample>,
}

impl Dropped {
    /// Makes the record of `group`.
    pub fn new(group: &Group, reason: impl Into<String>) -> Self {
        let lengths = group.samples.iter().map(Sample::generated).collect();
        // Samples that were not scored earned nothing; a NaN would spoil the curves.
        let rewards = group.rollouts().filter_map(|sample| sample.reward).collect();
        let parts = group.rollouts().map(|sample| sample.reward_parts.clone()).collect();
        let samples = group.dropped.clone();
        Dropped { id: group.id(), reason: reason.into(), rewards, parts, lengths, samples }
    }

    /// Tokens that were sampled for the samples that it had when it was dropped.
    pub fn generated(&self) -> usize {
        self.lengths.iter().sum()
    }
}

impl Scored {
    /// Takes a group of which every sample was scored, with a number (laws F6, N4). One whose samples
    /// were all dropped is dropped, for the reason of the last.
    pub fn new(group: Group) -> Result<Self, DataError> {
        if let Some(sample) = group.samples.iter().find(|sample| !sample.reward.is_some_and(is_reward)) {
            let (index, id, reward) =
                (sample.index, group.id(), sample.reward.map_or("none".to_owned(), |reward| reward.to_string()));
            return Err(DataError::Unusable(format!(
                "sample {index} of group {id} has the reward {reward}; every sample needs a finite one of at most {REWARD_LIMIT:e} either way"
            )));
        }
        let mut scored = Scored { group, dropped: None, spared: false };
        scored.drop_if_empty();
        Ok(scored)
    }

    /// Takes a group of a run without rewards.
    pub fn unrewarded(group: Group) -> Self {
        let mut scored = Scored { group, dropped: None, spared: false };
        scored.drop_if_empty();
        scored
    }

    /// Drops the samples for which `unwanted` is true, as [`Group::drop_samples`] does, and returns how
    /// many. A group that has none left is dropped for the same reason.
    pub fn drop_samples(&mut self, reason: impl Into<String>, unwanted: impl FnMut(&Sample) -> bool) -> usize {
        let count = self.group.drop_samples(reason, unwanted);
        self.drop_if_empty();
        count
    }

    fn drop_if_empty(&mut self) {
        if self.dropped.is_none()
            && self.group.samples.is_empty()
            && let Some(last) = self.group.dropped.last()
        {
            self.dropped = Some(last.reason.clone().into());
        }
    }

    /// Drops a group as [`POISONED`]. Samples whose reward failed have none, and the others are
    /// dropped with them (law D2).
    pub fn poisoned(group: Group) -> Self {
        Scored { group, dropped: Some(POISONED.into()), spared: false }
    }

    /// The group.
    pub fn group(&self) -> &Group {
        &self.group
    }

    /// Returns the samples, for stages that add to them. Their rewards must not change.
    pub(crate) fn samples_mut(&mut self) -> &mut [Sample] {
        &mut self.group.samples
    }

    /// Drops the group: it will not be trained.
    pub fn drop_for(self, reason: Cow<'static, str>) -> Self {
        Scored { dropped: Some(reason), ..self }
    }

    /// Keeps a group that a filter rejected, because no better one is available.
    pub fn spare(self) -> Self {
        Scored { spared: true, ..self }
    }

    /// Returns true if it is trained although a filter rejected it.
    pub fn is_spared(&self) -> bool {
        self.spared
    }

    /// Why it was dropped, if it was.
    pub fn dropped(&self) -> Option<&str> {
        self.dropped.as_deref()
    }

    /// The group if it is to be trained, else what is remembered of it.
    pub fn settle(self) -> Result<Group, Box<Dropped>> {
        match self.dropped {
            None => Ok(self.group),
            Some(reason) => Err(Box::new(Dropped::new(&self.group, reason))),
        }
    }
}

impl Message for Scored {
    fn tokens(&self) -> usize {
        self.group.tokens()
    }
}
