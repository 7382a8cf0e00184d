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
