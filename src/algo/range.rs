//! Error of settings out of range.

/// Settings of a filter, a reward or a schedule that no value meets, or that every value meets.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
#[error("{0}")]
pub struct RangeError(String);

impl RangeError {
    pub(super) fn new(problem: impl std::fmt::Display) -> Self {
        RangeError(problem.to_string())
    }

    /// Returns an error for bounds that no length is within.
    pub(super) fn unless_lengths(min: usize, max: usize) -> Result<(), Self> {
        if max > 0 && min <= max {
            return Ok(());
        }
        Err(RangeError::new(format!("length bounds {min}..={max} are empty; give min ≤ max and max ≥ 1")))
    }
}
