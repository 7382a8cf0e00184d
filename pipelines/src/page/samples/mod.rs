//! Samples of a run, found in `rollouts.jsonl` by an index of its lines, so that a file of any size is
//! neither held in memory nor parsed for each request.

mod index;
mod search;
mod shown;

use serde::Deserialize;

pub(super) use index::SampleIndex;
pub(super) use search::{Query, search};
pub(super) use shown::{group, tokens};

/// Name of one sample in an address: `STEP-GROUP-INDEX`, or `STEP-GROUP-INDEX-PART`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SampleKey {
    pub step: u64,
    pub group: u64,
    pub index: u32,
    /// Part of its rollout; any if absent.
    pub part: Option<u32>,
}

impl SampleKey {
    /// Reads a name; `None` if it is none.
    pub fn parse(name: &str) -> Option<Self> {
        let fields: Vec<u64> = name.split('-').map(|field| field.parse().ok()).collect::<Option<_>>()?;
        let (&[step, group, index], part) = fields.split_first_chunk()?;
        let part = match part {
            [] => None,
            [part] => Some(u32::try_from(*part).ok()?),
            _ => return None,
        };
        Some(SampleKey { step, group, index: index.try_into().ok()?, part })
    }

    /// Returns true if this is the line's name.
    pub fn names(&self, entry: &index::Entry) -> bool {
        (entry.step, entry.group, entry.index) == (self.step, self.group, self.index)
            && self.part.is_none_or(|part| part == entry.part)
    }
}

/// Place among the tokens of a sample.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct TokenPlace {
    /// First token; by default, the first after the prompt.
    pub from: Option<usize>,
}
