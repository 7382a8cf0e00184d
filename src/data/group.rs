//! The samples of one prompt: the unit of work (law D2).

use std::collections::BTreeSet;
use std::sync::Arc;

use super::{Prompt, Sample};
use crate::flow::Message;

/// Record of a sample that was dropped from its group, for the ledger.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DroppedSample {
    /// The sample's place in the group.
    pub index: u32,
    /// Why it was dropped, which decides the fate of its tokens: see [`Group::drop_samples`].
    pub reason: String,
    /// The reward that it had, if it was scored.
    pub reward: Option<f64>,
    /// Tokens that were sampled for it.
    pub generated: usize,
}

/// All samples of one prompt. They travel, are filtered, cached and counted together.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Group {
    /// Prompt of all samples. `prompt.ordinal` is the group's id, and the order of batches (law
    /// D6).
    pub prompt: Arc<Prompt>,
    /// The answers, by `index`. Remove some with [`Group::drop_samples`] only: the run ends with an
    /// error where tokens disappear otherwise (law D4).
    pub samples: Vec<Sample>,
    /// The answers that were dropped from it.
    pub dropped: Vec<DroppedSample>,
}

impl Group {
    /// The group's id.
    pub fn id(&self) -> u64 {
        self.prompt.ordinal
    }

    /// First sample of each rollout: the parts of one ([`Sample::part`]) share a reward, which counts once
    /// (law D2).
    pub fn rollouts(&self) -> impl Iterator<Item = &Sample> {
        self.samples.iter().filter(|sample| sample.part == 0)
    }

    /// The samples' rewards; NaN where one was not scored.
    pub fn rewards(&self) -> Vec<f64> {
        self.samples.iter().map(|sample| sample.reward.unwrap_or(f64::NAN)).collect()
    }

    /// Drops the samples for which `unwanted` is true, and returns how many. The others stay, and
    /// advantages are computed over them alone.
    ///
    /// `reason` decides the fate of the dropped tokens in the ledger: `"poisoned"`, `"stale"`,
    /// `"truncated"`, `"surplus"` and `"lost"` name theirs, any other reason counts them as
    /// filtered. If a rollout has several parts ([`Sample::part`]), one unwanted part drops all of
    /// them. A group without samples is dropped as a whole when it is scored.
    ///
    /// ```
    /// use rollflow::data::{Group, Sample};
    ///
    /// let sample = |index| Sample { index, ..Sample::default() };
    /// let mut group = Group { samples: (0..4).map(sample).collect(), ..Group::default() };
    /// assert_eq!(group.drop_samples("duplicate", |sample| sample.index > 2), 1);
    /// assert_eq!((group.samples.len(), group.dropped[0].index), (3, 3));
    /// ```
    pub fn drop_samples(&mut self, reason: impl Into<String>, mut unwanted: impl FnMut(&Sample) -> bool) -> usize {
        let indices: BTreeSet<u32> = self.samples.iter().filter(|sample| unwanted(sample)).map(|sample| sample.index).collect();
        let reason = reason.into();
        let dropped = self.samples.extract_if(.., |sample| indices.contains(&sample.index)).map(|sample| DroppedSample {
            index: sample.index,
            reason: reason.clone(),
            reward: sample.reward.filter(|_| sample.part == 0),
            generated: sample.generated(),
        });
        let before = self.dropped.len();
        self.dropped.extend(dropped);
        self.dropped.len() - before
    }

    /// Removes all parts of rollouts ([`Sample::part`]) except their last, which contains the
    /// rollout's end and is judged.
    pub(crate) fn set_earlier_parts_aside(&mut self) -> Vec<Sample> {
        let goes_on = |at: usize| {
            let next = self.samples.get(at + 1);
            next.is_some_and(|next| next.part > 0 && next.index == self.samples[at].index)
        };
        let goes_on: Vec<bool> = (0..self.samples.len()).map(goes_on).collect();
        let mut goes_on = goes_on.into_iter();
        self.samples.extract_if(.., |_| goes_on.next().unwrap_or(false)).collect()
    }

    /// Puts them back in their places. They earn what the last part of their rollout did.
    pub(crate) fn put_parts_back(&mut self, mut earlier: Vec<Sample>) {
        if earlier.is_empty() {
            return;
        }
        for part in &mut earlier {
            let last = self.samples.iter().find(|last| last.index == part.index);
            (part.reward, part.reward_parts) = last.map(|last| (last.reward, last.reward_parts.clone())).unwrap_or_default();
        }
        self.samples.extend(earlier);
        self.samples.sort_by_key(|sample| (sample.index, sample.part));
    }

    /// Tokens that were sampled, over all samples that are left.
    pub fn generated(&self) -> usize {
        self.samples.iter().map(Sample::generated).sum()
    }
}

impl Message for Group {
    fn tokens(&self) -> usize {
        self.samples.iter().map(|sample| sample.tokens.len()).sum()
    }
}
