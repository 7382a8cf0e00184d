//! Tokens that were sampled so far for one sample: a generator's working state, and the part of
//! interrupted work that need not be sampled again (law D7).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Routes, Spans, Status, Version, number};

/// An answer, finished or not (law D3). Columns have one entry a token.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Answer {
    /// Place within the group, from 0.
    pub index: u32,
    /// Sampled tokens, including the end token, and tokens that were given between turns.
    pub tokens: Vec<u32>,
    /// Behaviour log-probability of each; 0 for given ones.
    #[serde(with = "number")]
    pub log_probs: Vec<f32>,
    /// The weights that sampled each.
    pub versions: Spans,
    /// `Pending` until it has ended, or, where it has several turns, until the newest has.
    pub status: Status,
    /// Experts that computed the prompt and the tokens, as of its newest turn, if the engine records them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub routes: Option<Routes>,
}

impl Answer {
    /// Nothing yet.
    pub fn new(index: u32) -> Self {
        Answer { index, ..Answer::default() }
    }

    /// One more token.
    pub fn push(&mut self, token: u32, log_prob: f32, version: Version) {
        self.tokens.push(token);
        self.log_probs.push(log_prob);
        self.versions.push(version);
    }

    /// Appends tokens that no policy sampled, such as tool output. The next sampled tokens are a
    /// new turn.
    pub fn give(&mut self, tokens: &[u32]) {
        self.tokens.extend(tokens);
        self.log_probs.resize(self.tokens.len(), 0.0);
        self.versions.extend(None, tokens.len());
        self.status = Status::Pending;
    }

    /// Appends all tokens of another answer, and takes its status.
    pub(crate) fn extend(&mut self, other: &Answer) {
        self.tokens.extend(&other.tokens);
        self.log_probs.extend(&other.log_probs);
        other.versions.iter().for_each(|(version, len)| self.versions.extend(version, len));
        self.status = other.status;
        self.routes = other.routes.clone();
    }

    /// Tokens of its newest turn: those that were sampled since the last given one.
    pub fn turn(&self) -> usize {
        self.versions.sampled_last()
    }

    /// Returns true if nothing more will be sampled.
    pub fn has_ended(&self) -> bool {
        matches!(self.status, Status::Completed | Status::Truncated)
    }
}

/// One token as it was sampled.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SampledToken {
    /// The prompt's ordinal.
    pub ordinal: u64,
    /// The answer's place in its group.
    pub index: u32,
    /// The token.
    pub token: u32,
    /// Behaviour log-probability of the token.
    pub log_prob: f32,
    /// The weights that sampled it.
    pub version: Version,
    /// `Pending`, or how the answer ended with it.
    pub status: Status,
    /// Experts that computed the prompt and the answer, with the token that ended it, if the engine records them.
    pub routes: Option<Routes>,
}

/// Completions that a prompt re-enters with after a resume, an abort or a pause. A generator
/// returns those that have ended as they are and continues the others; it samples no token twice.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Partial {
    /// Tokens, behaviour log-probabilities and version spans, at most one entry an index, in any
    /// order. Completions that have not begun are missing.
    pub completions: Vec<Answer>,
    /// Saved states of the environments of rollouts with several turns, by the rollout's index, as
    /// of the newest token that the rollout was given.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub environments: BTreeMap<u32, Value>,
}

impl Partial {
    /// Returns true if there is no completion and no state.
    pub fn is_empty(&self) -> bool {
        self.completions.is_empty() && self.environments.is_empty()
    }

    /// Number of tokens over all completions, sampled and given ones.
    pub fn tokens(&self) -> usize {
        self.completions.iter().map(|completion| completion.tokens.len()).sum()
    }

    /// Keeps the completions for which `keep` returns true, drops the environments' states of the
    /// others, and returns the indices of the dropped completions.
    pub fn retain(&mut self, mut keep: impl FnMut(&Answer) -> bool) -> Vec<u32> {
        let dropped: Vec<u32> =
            self.completions.extract_if(.., |completion| !keep(completion)).map(|dropped| dropped.index).collect();
        dropped.iter().for_each(|index| drop(self.environments.remove(index)));
        dropped
    }
}
