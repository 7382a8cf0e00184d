//! The function that a kind of reward builds.

use crate::data::Sample;

/// A reward that is one number; the error is the reason why the sample has none.
pub type PartReward = Box<dyn Fn(&Sample) -> Result<f64, String> + Send + Sync>;

/// Settings of a reward that no completion could meet, or that every completion would meet.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
#[error("{0}")]
pub struct RuleError(String);

impl RuleError {
    pub(super) fn new(problem: impl std::fmt::Display) -> Self {
        RuleError(problem.to_string())
    }
}

/// Returns the prompt's reference answer, or an error if it has none.
pub(super) fn reference_answer(sample: &Sample) -> Result<&str, String> {
    sample.answer().ok_or_else(|| "the prompt has no ground truth, metadata[\"answer\"]".to_owned())
}
