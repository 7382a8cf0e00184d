//! The samples of one prompt: the unit of work (law D2).

use std::sync::Arc;

use super::{Prompt, Sample};
use crate::flow::Message;

/// All samples of one prompt. They travel, are filtered, cached and counted together.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Group {
    /// What they answer. `prompt.ordinal` is the group's id, and the order of batches (law D6).
    pub prompt: Arc<Prompt>,
    /// The answers, by `index`.
    pub samples: Vec<Sample>,
}

impl Group {
    /// The group's id.
    pub fn id(&self) -> u64 {
        self.prompt.ordinal
    }

    /// The samples' rewards; NaN where one was not scored.
    pub fn rewards(&self) -> Vec<f64> {
        self.samples.iter().map(|sample| sample.reward.unwrap_or(f64::NAN)).collect()
    }

    /// Takes out all parts of rollouts ([`Sample::part`]) but their last, which has the rollout's end: the one that is judged.
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

    /// Tokens that were sampled, over all samples.
    pub fn generated(&self) -> usize {
        self.samples.iter().map(Sample::generated).sum()
    }
}

impl Message for Group {
    fn tokens(&self) -> usize {
        self.samples.iter().map(|sample| sample.tokens.len()).sum()
    }
}

impl Message for Prompt {}
