//! Errors of advantages.

/// Rewards that have no advantages.
#[derive(Clone, Debug, thiserror::Error, PartialEq)]
pub enum AdvantageError {
    /// NaN, infinite, or beyond [`REWARD_LIMIT`](crate::data::REWARD_LIMIT).
    #[error("the reward of sample {sample} in group {group} is {value}; rewards are finite numbers of at most {limit:e} either way", limit = crate::data::REWARD_LIMIT)]
    NonFinite {
        /// The group's place in the batch.
        group: usize,
        /// The sample's place in the group.
        sample: usize,
        /// The reward.
        value: f64,
    },
    /// Numbers of reward functions and weights differ.
    #[error("sample {sample} has {found} rewards for {weights} weights; give one weight per reward function")]
    Weights {
        /// The sample's place.
        sample: usize,
        /// Rewards it has.
        found: usize,
        /// Weights given.
        weights: usize,
    },
    /// Aligned columns have different lengths.
    #[error("{column} has {found} entries where {expected} are needed; columns are aligned")]
    Length {
        /// The column.
        column: &'static str,
        /// Length of the column.
        found: usize,
        /// The length of the aligned column.
        expected: usize,
    },
    /// An estimator of the user's own returned advantages for other samples than the batch has.
    #[error("the estimator gave {found} advantages for {what}; give one per sample, group by group")]
    Count {
        /// Samples and groups of the batch.
        what: String,
        /// Number of advantages returned.
        found: usize,
    },
    /// A registered estimator, which is looked up by its name and not part of the library.
    #[error("the estimator `{0}` is registered by its name; take it from the registry")]
    Unregistered(String),
    /// An estimator of the user's own panicked.
    #[error("the advantage function panicked: {0}")]
    Panicked(String),
    /// Error of an estimator of the user's own.
    #[error("{0}")]
    Custom(String),
}

/// Returns an error for a column of another length than expected.
pub(in crate::algo) fn aligned(column: &'static str, found: usize, expected: usize) -> Result<(), AdvantageError> {
    if found == expected { Ok(()) } else { Err(AdvantageError::Length { column, found, expected }) }
}

/// Returns an error for lengths that are not aligned with the rewards.
pub(in crate::algo) fn same_shape<G: AsRef<[f64]>, L: AsRef<[f64]>>(groups: &[G], lengths: &[L]) -> Result<(), AdvantageError> {
    aligned("lengths", lengths.len(), groups.len())?;
    groups.iter().zip(lengths).try_for_each(|(group, lengths)| aligned("lengths", lengths.as_ref().len(), group.as_ref().len()))
}
