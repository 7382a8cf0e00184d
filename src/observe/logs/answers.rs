//! Judged completions of an evaluation: rows of a [`JsonLines`](super::JsonLines), written as they
//! are judged, so that an interrupted evaluation can resume.

use serde::{Deserialize, Serialize};

use crate::data::{PromptText, Status, Version, number};

/// One answer, judged. Non-finite numbers are the strings `"NaN"`, `"inf"` and `"-inf"`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct JudgedAnswer {
    /// The weights that answered.
    pub version: Version,
    /// Index of the prompt in the evaluation, from 0.
    pub question: usize,
    /// If true, it was sampled greedily.
    pub greedy: bool,
    /// The answer's place among those to the same prompt.
    pub index: u32,
    /// Prompt.
    pub prompt: PromptText,
    /// Completion.
    pub response: String,
    /// Reward; `None` if the reward failed.
    #[serde(with = "number")]
    pub reward: Option<f64>,
    /// State in which its generation ended.
    pub status: Status,
    /// Number of sampled tokens.
    pub tokens: usize,
    /// Why it has no reward.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}
