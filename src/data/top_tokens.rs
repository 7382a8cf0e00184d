//! A teacher's likeliest tokens at the positions of a sample.

use serde::{Deserialize, Serialize};

/// The likeliest tokens of another model at each position of a sample, from its first trained token on.
///
/// Memory: 8 bytes per position and token.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TopTokens {
    /// Position of the first entry among the sample's tokens.
    pub first: usize,
    /// Tokens per position.
    pub k: usize,
    /// Tokens of each position in turn. Unimportant where the sample's token is not trained.
    pub ids: Vec<u32>,
    /// Their log-probabilities.
    pub log_probs: Vec<f32>,
}

/// Selection of a teacher's likeliest tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TopK {
    /// Tokens per position; 0 selects none.
    pub k: usize,
    /// Ids from this on are left out: the policy does not have them.
    pub below: usize,
}

impl TopTokens {
    /// Room for the positions from `first` to `end`, with `k` tokens each.
    pub fn new(first: usize, end: usize, k: usize) -> Self {
        let len = end.saturating_sub(first) * k;
        TopTokens { first, k, ids: vec![0; len], log_probs: vec![0.0; len] }
    }

    /// Tokens and log-probabilities of a position; `None` if they are not there.
    pub fn at(&self, position: usize) -> Option<(&[u32], &[f32])> {
        let range = self.range(position)?;
        Some((self.ids.get(range.clone())?, self.log_probs.get(range)?))
    }

    /// Sets those of a position from a list, of which it takes the first `k` with ids below `below`; `None` if
    /// there are fewer, or no such position.
    pub(crate) fn set_all(&mut self, position: usize, listed: impl IntoIterator<Item = (u32, f32)>, below: usize) -> Option<()> {
        let range = self.range(position).filter(|range| range.end <= self.ids.len())?;
        let mut listed = listed.into_iter().filter(|(id, _)| (*id as usize) < below);
        for at in range {
            (self.ids[at], self.log_probs[at]) = listed.next()?;
        }
        Some(())
    }

    fn range(&self, position: usize) -> Option<std::ops::Range<usize>> {
        let at = position.checked_sub(self.first)? * self.k;
        Some(at..at + self.k)
    }
}
