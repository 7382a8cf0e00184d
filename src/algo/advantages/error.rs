//! What advantages can't be computed from.

/// Rewards that can't be compared.
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
    /// Reward functions and weights don't match up.
    #[error("sample {sample} has {found} rewards for {weights} weights; give one weight per reward function")]
    Weights {
        /// The sample's place.
        sample: usize,
        /// Rewards it has.
        found: usize,
        /// Weights given.
        weights: usize,
    },
    /// Columns that belong together have different lengths.
    #[error("{column} has {found} entries where {expected} are needed; columns are aligned")]
    Length {
        /// The column.
        column: &'static str,
        /// Its length.
        found: usize,
        /// The length of what it belongs to.
        expected: usize,
    },
    /// An estimator of the user's own gave advantages for other samples than it was shown.
    #[error("the estimator gave {found} advantages for {what}; give one per sample, group by group")]
    Count {
        /// What it was shown.
        what: String,
        /// How many it gave.
        found: usize,
    },
    /// An estimator of the user's own panicked.
    #[error("the advantage function panicked: {0}")]
    Panicked(String),
    /// An estimator of the user's own found its inputs unusable.
    #[error("{0}")]
    Custom(String),
}

/// Refuses a column that is not as long as what it belongs to.
pub(in crate::algo) fn aligned(column: &'static str, found: usize, expected: usize) -> Result<(), AdvantageError> {
    if found == expected { Ok(()) } else { Err(AdvantageError::Length { column, found, expected }) }
}
