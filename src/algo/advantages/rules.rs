//! What is settled before rewards are compared: samples without a reward, and samples without siblings.

use serde::{Deserialize, Serialize};

use super::error::AdvantageError;
use crate::data::is_reward;

/// What a NaN reward means.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Missing {
    /// An error that names the sample (law N4).
    #[default]
    Refuse,
    /// "Not scored": left out of means and deviations, advantage 0 (TRL).
    Zero,
}

/// What the only scored sample of a group is compared with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Lone {
    /// Itself: its advantage is 0, it teaches nothing (TRL).
    #[default]
    Itself,
    /// Nothing: mean 0 and deviation 1, as if its reward were an advantage already (verl).
    Nothing,
}

/// What becomes of samples that can't be compared with siblings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Rules {
    /// Samples whose reward is NaN.
    pub missing: Missing,
    /// Samples that are alone.
    pub lone: Lone,
}

/// A group's scored samples: their places, and their rewards.
pub(super) struct Scored {
    pub places: Vec<usize>,
    pub rewards: Vec<f64>,
}

impl Scored {
    /// What a lone sample's reward is measured from.
    pub fn or_lone(&self, lone: Lone, baseline: impl Fn(&[f64]) -> f64) -> f64 {
        match (self.rewards.as_slice(), lone) {
            ([reward], Lone::Itself) => *reward,
            ([_], Lone::Nothing) => 0.0,
            (rewards, _) => baseline(rewards),
        }
    }
}

/// Rejects values that can't be rewards, so that no statistic over the others overflows. `missing` says whether NaN is allowed.
pub(super) fn check<G: AsRef<[f64]>>(groups: &[G], missing: Missing) -> Result<(), AdvantageError> {
    for (group, rewards) in groups.iter().enumerate() {
        let refused = |r: &f64| !is_reward(*r) && (!r.is_nan() || missing == Missing::Refuse);
        if let Some(sample) = rewards.as_ref().iter().position(refused) {
            return Err(AdvantageError::NonFinite { group, sample, value: rewards.as_ref()[sample] });
        }
    }
    Ok(())
}

/// `of` each group's scored samples, one value for each of them; NaN for the others.
pub(super) fn over_scored<G: AsRef<[f64]>>(
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

/// Samples that were left out get advantage 0.
pub(super) fn zero_missing(mut groups: Vec<Vec<f64>>) -> Vec<Vec<f64>> {
    groups.iter_mut().flatten().filter(|value| value.is_nan()).for_each(|value| *value = 0.0);
    groups
}
