//! Partial completions: the part of an interrupted prompt that need not be sampled again (law D7).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::Answer;

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
