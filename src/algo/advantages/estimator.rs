//! Estimators of advantages: their input, errors, rules for samples that can't be compared, and
//! statistics.

use crate::data::is_reward;

/// Rewards and lengths of one group.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScoredGroup<'a> {
    /// Reward of each sample; NaN for a sample without one.
    pub rewards: &'a [f64],
    /// Number of trained tokens of each sample.
    pub lengths: &'a [f64],
}

impl ScoredGroup<'_> {
    /// Returns an error for lengths that are not aligned with the rewards.
    pub(in crate::algo) fn check(&self) -> Result<(), AdvantageError> {
        aligned("lengths", self.lengths.len(), self.rewards.len())
    }
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
    /// Any other error, of the library's estimators or of the user's own: columns or numbers of
    /// advantages that are not aligned, a panic.
    #[error("{0}")]
    Custom(String),
}

/// Returns an error for a column of another length than expected.
pub(crate) fn aligned(column: &str, found: usize, expected: usize) -> Result<(), AdvantageError> {
    if found == expected {
        return Ok(());
    }
    Err(AdvantageError::Custom(format!("{column} has {found} entries where {expected} are needed; columns are aligned")))
}

/// Meaning of a NaN reward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Missing {
    /// An error that names the sample (law N4).
    #[default]
    Refuse,
    /// Not scored: left out of means and deviations, advantage 0 (TRL).
    Zero,
}

/// Baseline of the only scored sample of a group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Lone {
    /// The sample's own reward: its advantage is 0 (TRL).
    #[default]
    Itself,
    /// Mean 0 and deviation 1: its advantage is its reward (verl).
    Nothing,
}

/// Rules for samples that can't be compared with siblings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rules {
    /// Samples whose reward is NaN.
    pub missing: Missing,
    /// Only scored samples of their groups.
    pub lone: Lone,
}

/// Places and rewards of a group's scored samples.
pub(in crate::algo) struct Scored {
    pub places: Vec<usize>,
    pub rewards: Vec<f64>,
}

impl Scored {
    /// `baseline` of the rewards, or that of a lone sample.
    pub fn or_lone(&self, lone: Lone, baseline: impl Fn(&[f64]) -> f64) -> f64 {
        match (self.rewards.as_slice(), lone) {
            ([reward], Lone::Itself) => *reward,
            ([_], Lone::Nothing) => 0.0,
            (rewards, _) => baseline(rewards),
        }
    }
}

/// Applies `of` to each group's scored samples: one value for each of them, NaN for the others.
/// Values that can't be rewards are an error, so that no statistic over the others overflows.
pub(in crate::algo) fn each_scored<G: AsRef<[f64]>>(
    groups: &[G],
    missing: Missing,
    of: impl Fn(usize, &Scored) -> Vec<f64>,
) -> Result<Vec<Vec<f64>>, AdvantageError> {
    let refused = |r: &f64| !is_reward(*r) && (!r.is_nan() || missing == Missing::Refuse);
    for (group, rewards) in groups.iter().map(AsRef::as_ref).enumerate() {
        if let Some(sample) = rewards.iter().position(refused) {
            return Err(AdvantageError::NonFinite { group, sample, value: rewards[sample] });
        }
    }
    let of_group = |(group, rewards): (usize, &G)| {
        let rewards = rewards.as_ref();
        let places: Vec<usize> = (0..rewards.len()).filter(|&at| !rewards[at].is_nan()).collect();
        let scored = Scored { rewards: places.iter().map(|&at| rewards[at]).collect(), places };
        let mut values = vec![f64::NAN; rewards.len()];
        scored.places.iter().zip(of(group, &scored)).for_each(|(&at, value)| values[at] = value);
        values
    };
    Ok(groups.iter().enumerate().map(of_group).collect())
}

/// Like [`each_scored`], with 0 for samples that were left out.
pub(in crate::algo) fn over_scored<G: AsRef<[f64]>>(
    groups: &[G],
    missing: Missing,
    of: impl Fn(usize, &Scored) -> Vec<f64>,
) -> Result<Vec<Vec<f64>>, AdvantageError> {
    each_scored(groups, missing, of).map(zero_missing)
}

/// Replaces NaN, the value of samples that were left out, by 0.
pub(in crate::algo) fn zero_missing(mut groups: Vec<Vec<f64>>) -> Vec<Vec<f64>> {
    groups.iter_mut().flatten().filter(|value| value.is_nan()).for_each(|value| *value = 0.0);
    groups
}

/// Rewards that are numbers.
fn scored(rewards: &[f64]) -> impl Iterator<Item = f64> + '_ {
    rewards.iter().copied().filter(|reward| !reward.is_nan())
}

/// Mean of the scored rewards; NaN without any.
pub(in crate::algo) fn mean(rewards: &[f64]) -> f64 {
    scored(rewards).sum::<f64>() / scored(rewards).count() as f64
}

/// Unbiased standard deviation of the scored rewards; 0 for fewer than two.
pub(in crate::algo) fn std(rewards: &[f64]) -> f64 {
    let count = scored(rewards).count();
    if count < 2 {
        return 0.0;
    }
    let mean = mean(rewards);
    (scored(rewards).map(|reward| (reward - mean).powi(2)).sum::<f64>() / (count - 1) as f64).sqrt()
}

/// If true, all scored rewards are equal.
pub(super) fn constant(rewards: &[f64]) -> bool {
    scored(rewards).all(|reward| Some(reward) == scored(rewards).next())
}

/// `(x − mean) / (std + ε)` over all scored values; exact zeros if they are equal, NaN stays NaN.
pub(in crate::algo) fn standardized(groups: Vec<Vec<f64>>, epsilon: f64) -> Vec<Vec<f64>> {
    let all = groups.concat();
    let (mean, divisor, constant) = (mean(&all), std(&all) + epsilon, constant(&all));
    let value = |value: f64| match constant {
        true if !value.is_nan() => 0.0,
        _ => (value - mean) / divisor,
    };
    groups.into_iter().map(|group| group.into_iter().map(value).collect()).collect()
}
