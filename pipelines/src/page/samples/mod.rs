//! Samples of a run, found in `rollouts.jsonl` by an index of its lines, so that a file of any size is
//! neither held in memory nor parsed for each request.

mod index;
mod search;
mod shown;

use serde::Deserialize;

pub(super) use index::SampleIndex;
pub(super) use search::{Query, search};
pub(super) use shown::{group, tokens};

/// Name of one sample in an address: `STEP-GROUP-INDEX`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SampleKey {
    pub step: u64,
    pub group: u64,
    pub index: u32,
}

impl SampleKey {
    /// Reads a name; `None` if it is none.
    pub fn parse(name: &str) -> Option<Self> {
        let mut parts = name.splitn(3, '-');
        let mut next = || parts.next()?.parse::<u64>().ok();
        Some(SampleKey { step: next()?, group: next()?, index: next()?.try_into().ok()? })
    }
}

/// Place among the tokens of a sample.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct TokenPlace {
    /// Part of the rollout.
    pub part: u32,
    /// First token; by default, the first after the prompt.
    pub from: Option<usize>,
}
