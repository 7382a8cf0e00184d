//! Estimator of advantages: one number per sample, from the rewards and lengths of a batch.

use super::error::AdvantageError;

/// Rewards and lengths of one group.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScoredGroup<'a> {
    /// Reward of each sample; NaN for a sample without one.
    pub rewards: &'a [f64],
    /// Number of trained tokens of each sample.
    pub lengths: &'a [f64],
}

impl AsRef<[f64]> for ScoredGroup<'_> {
    fn as_ref(&self) -> &[f64] {
        self.rewards
    }
}

/// Computes one advantage per sample from the rewards of a batch. Pure: same inputs, same output.
///
/// Closures `Fn(&[ScoredGroup]) -> Result<Vec<Vec<f64>>, AdvantageError>` are estimators too.
pub trait Estimator: Send + Sync {
    /// Advantages by group, aligned with the rewards.
    fn estimate(&self, groups: &[ScoredGroup]) -> Result<Vec<Vec<f64>>, AdvantageError>;

    /// If true, a group's advantages depend on that group alone, and a batch can be trained in
    /// parts.
    fn is_by_group(&self) -> bool {
        false
    }
}

impl<F> Estimator for F
where
    F: Fn(&[ScoredGroup]) -> Result<Vec<Vec<f64>>, AdvantageError> + Send + Sync,
{
    fn estimate(&self, groups: &[ScoredGroup]) -> Result<Vec<Vec<f64>>, AdvantageError> {
        self(groups)
    }
}
