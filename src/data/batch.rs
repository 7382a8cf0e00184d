//! Batch of one optimizer step.

use std::collections::BTreeMap;

use serde_json::Value;

use super::{Dropped, DroppedSample, Group, Metadata, RewardParts, Sample};
use crate::flow::Message;

/// Whole groups, ordered by id (law D6): one optimizer step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batch {
    /// The groups, by ascending id.
    pub groups: Vec<Group>,
    /// Groups that were dropped while these were collected.
    pub dropped: Vec<Dropped>,
    /// Ids of those among `groups` that a filter had rejected, ascending.
    pub spared: Vec<u64>,
    /// If true, this is a part, and more groups of the same step follow in the next message.
    pub more: bool,
}

impl Batch {
    /// Takes the next part in.
    pub fn append(&mut self, part: Batch) {
        let Batch { mut groups, mut dropped, mut spared, more } = part;
        self.groups.append(&mut groups);
        self.dropped.append(&mut dropped);
        self.spared.append(&mut spared);
        self.more = more;
    }

    /// Orders what was gathered in parts by id, as whole batches are.
    pub fn sort(&mut self) {
        self.groups.sort_by_key(Group::id);
        self.dropped.sort_by_key(|dropped| dropped.id);
        self.spared.sort_unstable();
    }

    /// Every sample, in group order.
    pub fn samples(&self) -> impl Iterator<Item = &Sample> {
        self.groups.iter().flat_map(|group| &group.samples)
    }

    /// Rewards of all rollouts that were scored for this step, those of dropped rollouts and groups included.
    pub fn rewards(&self) -> impl Iterator<Item = f64> + '_ {
        let kept = self.rollouts().filter_map(|sample| sample.reward);
        let groups = self.dropped.iter().flat_map(|dropped| dropped.rewards.iter().copied());
        kept.chain(groups).chain(self.dropped_samples().filter_map(|sample| sample.reward))
    }

    fn rollouts(&self) -> impl Iterator<Item = &Sample> {
        self.groups.iter().flat_map(Group::rollouts)
    }

    /// Samples that were dropped from the groups of this step, from trained and from dropped ones.
    pub fn dropped_samples(&self) -> impl Iterator<Item = &DroppedSample> {
        let kept = self.groups.iter().flat_map(|group| &group.dropped);
        kept.chain(self.dropped.iter().flat_map(|dropped| &dropped.samples))
    }

    /// The mean of each part of the rewards, over all rollouts that have it, dropped ones included.
    pub fn reward_parts(&self) -> RewardParts {
        let kept = self.rollouts().map(|sample| &sample.reward_parts);
        let mut sums: BTreeMap<&str, (f64, f64)> = BTreeMap::new();
        for (name, value) in kept.chain(self.dropped.iter().flat_map(|dropped| &dropped.parts)).flatten() {
            let (sum, count) = sums.entry(name).or_default();
            *sum += value;
            *count += 1.0;
        }
        sums.into_iter().map(|(name, (sum, count))| (name.to_owned(), sum / count)).collect()
    }

    /// Groups and tokens with a weight in the loss, by the data set that they are from, where that is known.
    pub fn by_source(&self) -> BTreeMap<&str, (u64, u64)> {
        let mut sources: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
        for group in self.groups.iter().filter(|group| !group.prompt.source.is_empty()) {
            let (groups, tokens) = sources.entry(&group.prompt.source).or_default();
            *groups += 1;
            *tokens += group.samples.iter().map(|sample| sample.response_length() as u64).sum::<u64>();
        }
        sources
    }

    /// Number of samples.
    pub fn len(&self) -> usize {
        self.groups.iter().map(|group| group.samples.len()).sum()
    }

    /// Returns true if there is no sample.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Message for Batch {
    fn tokens(&self) -> usize {
        self.groups.iter().map(Message::tokens).sum()
    }
}

/// Samples as columns, for code that works on lists.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RolloutBatch {
    /// The samples themselves.
    pub samples: Vec<Sample>,
    /// Token ids, one list a sample.
    pub tokens: Vec<Vec<u32>>,
    /// Loss masks, aligned with `tokens`.
    pub loss_masks: Vec<Vec<f32>>,
    /// Rewards; NaN where a sample was not scored.
    pub rewards: Vec<f64>,
    /// Tokens with a mask above zero, one count a sample.
    pub response_lengths: Vec<usize>,
    /// `epoch_id`, `step_id`, `batch_size`, `prompts`, `responses`, and a column `sample_<key>` for
    /// every metadata key.
    pub metadata: Metadata,
}

impl RolloutBatch {
    /// Turns samples into columns. Pure; keys that a sample lacks become `null` in its row.
    pub fn new(samples: Vec<Sample>, epoch_id: u64, step_id: u64) -> Self {
        let column = |of: &dyn Fn(&Sample) -> Value| Value::Array(samples.iter().map(of).collect());
        let mut metadata = Metadata::new();
        metadata.insert("epoch_id".into(), epoch_id.into());
        metadata.insert("step_id".into(), step_id.into());
        metadata.insert("batch_size".into(), samples.len().into());
        metadata.insert("prompts".into(), column(&|sample| sample.prompt.render().into()));
        metadata.insert("responses".into(), column(&|sample| sample.response.clone().into()));
        let keys: std::collections::BTreeSet<&String> = samples.iter().flat_map(|sample| sample.metadata.keys()).collect();
        for key in keys {
            let values = column(&|sample| sample.metadata.get(key).cloned().unwrap_or(Value::Null));
            metadata.insert(format!("sample_{key}"), values);
        }
        RolloutBatch {
            tokens: samples.iter().map(|sample| sample.tokens.clone()).collect(),
            loss_masks: samples.iter().map(|sample| sample.loss_mask.clone()).collect(),
            rewards: samples.iter().map(|sample| sample.reward.unwrap_or(f64::NAN)).collect(),
            response_lengths: samples.iter().map(Sample::response_length).collect(),
            metadata,
            samples,
        }
    }
}
