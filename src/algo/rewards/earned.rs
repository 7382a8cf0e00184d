//! What a reward returns, and calling one or several of them.

use std::fmt::Display;

use rayon::prelude::*;

use crate::data::{RewardParts, Sample, is_reward};

/// A reward, and the parts that it was made of.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Earnings {
    /// What counts.
    pub reward: f64,
    /// Named values that are written down beside it; empty for a reward that is one value.
    pub parts: RewardParts,
}

/// What a reward may return: a number, [`Earnings`], or a result whose error says why there is neither.
pub trait Earned {
    /// The value with its parts, or why there is none.
    fn earned(self) -> Result<Earnings, String>;
}

impl Earned for f64 {
    fn earned(self) -> Result<Earnings, String> {
        Ok(Earnings { reward: self, parts: RewardParts::new() })
    }
}

impl Earned for Earnings {
    fn earned(self) -> Result<Earnings, String> {
        Ok(self)
    }
}

impl<R: Earned, E: Display> Earned for Result<R, E> {
    fn earned(self) -> Result<Earnings, String> {
        self.map_err(|error| format!("{error:#}"))?.earned()
    }
}

/// A sample without a reward (law N4).
#[derive(Clone, Debug, thiserror::Error, PartialEq)]
pub enum ScoreError {
    /// The reward says why.
    #[error("the reward of sample {sample} of group {group} failed: {why}")]
    Refused {
        /// The group's id.
        group: u64,
        /// The sample's place in its group.
        sample: u32,
        /// What the reward said.
        why: String,
    },
    /// The reward is NaN, infinite, or beyond [`REWARD_LIMIT`](crate::data::REWARD_LIMIT).
    #[error("the reward of sample {sample} of group {group} is {value}; it must be a finite number of at most {limit:e} either way", limit = crate::data::REWARD_LIMIT)]
    NotFinite {
        /// The group's id.
        group: u64,
        /// The sample's place in its group.
        sample: u32,
        /// What it gave.
        value: f64,
    },
}

/// What `reward` gives for the sample; a number that can't be a reward is an error.
pub fn compute_scalar_reward<R: Earned>(sample: &Sample, reward: impl Fn(&Sample) -> R) -> Result<f64, ScoreError> {
    let (group, index) = (sample.group_index, sample.index);
    let earned = reward(sample).earned().map_err(|why| ScoreError::Refused { group, sample: index, why })?;
    finite(sample, earned.reward)
}

/// Returns `value` if it can be a reward.
pub(super) fn finite(sample: &Sample, value: f64) -> Result<f64, ScoreError> {
    if is_reward(value) {
        Ok(value)
    } else {
        Err(ScoreError::NotFinite { group: sample.group_index, sample: sample.index, value })
    }
}

/// One value per function, in their order.
pub fn compute_vector_reward<R: Earned, F: Fn(&Sample) -> R>(sample: &Sample, rewards: &[F]) -> Result<Vec<f64>, ScoreError> {
    rewards.iter().map(|reward| compute_scalar_reward(sample, reward)).collect()
}

/// One value per sample, in their order, computed on all of rayon's threads; or the error of the first sample that has one.
pub fn compute_batch_rewards<R: Earned>(
    samples: &[Sample],
    reward: impl Fn(&Sample) -> R + Sync,
) -> Result<Vec<f64>, ScoreError> {
    let rewards: Vec<Result<f64, ScoreError>> = samples.par_iter().map(|sample| compute_scalar_reward(sample, &reward)).collect();
    rewards.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(index: u32) -> Sample {
        Sample { group_index: 7, index, ..Sample::default() }
    }

    #[test]
    fn a_reward_is_a_finite_number_or_an_error_that_names_the_sample() {
        assert_eq!(compute_scalar_reward(&sample(3), |sample| f64::from(sample.index)), Ok(3.0));
        let refused = compute_scalar_reward(&sample(3), |_| Err::<f64, _>("no key")).unwrap_err();
        assert_eq!(refused.to_string(), "the reward of sample 3 of group 7 failed: no key");
        let infinite = compute_scalar_reward(&sample(3), |_| f64::INFINITY).unwrap_err();
        assert_eq!(
            infinite.to_string(),
            "the reward of sample 3 of group 7 is inf; it must be a finite number of at most 1e100 either way"
        );
    }

    #[test]
    fn vectors_and_batches_keep_their_order() {
        let functions: [fn(&Sample) -> f64; 3] = [|_| 1.0, |sample| f64::from(sample.index), |_| -1.0];
        assert_eq!(compute_vector_reward(&sample(5), &functions), Ok(vec![1.0, 5.0, -1.0]));
        let samples: Vec<Sample> = (0..200).map(sample).collect();
        let rewards = compute_batch_rewards(&samples, |sample| f64::from(sample.index)).unwrap();
        assert!(rewards.iter().enumerate().all(|(at, reward)| *reward == at as f64));
        let failing = |sample: &Sample| if sample.index % 50 == 49 { f64::NAN } else { 0.0 };
        let error = compute_batch_rewards(&samples, failing).unwrap_err();
        assert!(matches!(error, ScoreError::NotFinite { sample: 49, .. }), "{error}");
    }
}
