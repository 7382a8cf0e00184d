//! Rules for samples without a reward, and for samples without siblings.

use super::error::AdvantageError;
use crate::data::is_reward;

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

/// Returns an error for values that can't be rewards, so that no statistic over the others
/// overflows.
pub(super) fn check<G: AsRef<[f64]>>(groups: &[G], missing: Missing) -> Result<(), AdvantageError> {
    for (group, rewards) in groups.iter().enumerate() {
        let refused = |r: &f64| !is_reward(*r) && (!r.is_nan() || missing == Missing::Refuse);
        if let Some(sample) = rewards.as_ref().iter().position(refused) {
            return Err(AdvantageError::NonFinite { group, sample, value: rewards.as_ref()[sample] });
        }
    }
    Ok(())
}

/// Applies `of` to each group's scored samples: one value for each of them, NaN for the others.
pub(in crate::algo) fn over_scored<G: AsRef<[f64]>>(
    groups: &[G],
    missing: Missing,
    of: impl Fn(usize, &Scored) -> Vec<f64>,
) -> Result<Vec<Vec<f64>>, AdvantageError> {
    check(groups, missing)?;
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

/// Replaces NaN, the value of samples that were left out, by 0.
pub(in crate::algo) fn zero_missing(mut groups: Vec<Vec<f64>>) -> Vec<Vec<f64>> {
    groups.iter_mut().flatten().filter(|value| value.is_nan()).for_each(|value| *value = 0.0);
    groups
}
