//! Group-relative advantages: what a sample earned above its group.

use serde::{Deserialize, Serialize};

/// What differences from the group's mean are divided by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scale {
    /// The group's own standard deviation (GRPO).
    #[default]
    Group,
    /// The standard deviation over all rewards of the batch.
    Batch,
    /// Nothing (Dr. GRPO).
    None,
}

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

/// Settings of [`advantages`].
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdvantageConfig {
    /// The divisor.
    pub scale: Scale,
    /// Added to the standard deviation, so that near-equal rewards don't explode.
    pub epsilon: f64,
    /// What to do about NaN.
    pub missing: Missing,
}

impl Default for AdvantageConfig {
    fn default() -> Self {
        AdvantageConfig { scale: Scale::Group, epsilon: 1e-4, missing: Missing::Refuse }
    }
}

/// Rewards that can't be compared.
#[derive(Clone, Debug, thiserror::Error, PartialEq)]
pub enum AdvantageError {
    /// NaN or infinite.
    #[error("the reward of sample {sample} in group {group} is {value}; rewards are finite numbers")]
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
}

/// `A = (r − mean_group) / (std + ε)`, with the unbiased (n − 1) standard deviation of the group or of the batch.
///
/// Shapes: groups × samples in, the same out. A group whose rewards are all equal gets exact zeros, and so does a group of one.
/// Equals TRL 1.16's `GRPOTrainer` (`scale_rewards` group, batch, none).
pub fn advantages<G: AsRef<[f64]>>(groups: &[G], config: &AdvantageConfig) -> Result<Vec<Vec<f64>>, AdvantageError> {
    for (group, rewards) in groups.iter().enumerate() {
        let refused = |r: &f64| r.is_infinite() || (r.is_nan() && config.missing == Missing::Refuse);
        if let Some(sample) = rewards.as_ref().iter().position(refused) {
            return Err(AdvantageError::NonFinite { group, sample, value: rewards.as_ref()[sample] });
        }
    }
    let batch: Vec<f64> = groups.iter().flat_map(|rewards| rewards.as_ref()).copied().collect();
    let batch_std = std(&batch);
    let of_group = |rewards: &[f64]| {
        let divisor = match config.scale {
            Scale::Group => std(rewards) + config.epsilon,
            Scale::Batch => batch_std + config.epsilon,
            Scale::None => 1.0,
        };
        let mean = mean(rewards);
        let constant = scored(rewards).all(|r| Some(r) == scored(rewards).next());
        rewards.iter().map(|r| if r.is_nan() || constant { 0.0 } else { (r - mean) / divisor }).collect()
    };
    Ok(groups.iter().map(|rewards| of_group(rewards.as_ref())).collect())
}

/// `A_i = r_i − baseline`.
pub fn subtract_baseline(rewards: &[f64], baseline: f64) -> Vec<f64> {
    rewards.iter().map(|reward| reward - baseline).collect()
}

/// One reward per sample: the weighted sum over reward functions. A NaN says that a function does not judge this sample; a sample
/// that nobody judges stays NaN. Shapes: samples × functions in, samples out. Equals TRL's `sum_then_normalize`.
pub fn combine_rewards<R: AsRef<[f64]>>(per_function: &[R], weights: &[f64]) -> Result<Vec<f64>, AdvantageError> {
    let combine = |(sample, rewards): (usize, &R)| {
        let rewards = rewards.as_ref();
        if rewards.len() != weights.len() {
            return Err(AdvantageError::Weights { sample, found: rewards.len(), weights: weights.len() });
        }
        let judged = rewards.iter().zip(weights).filter(|(reward, _)| !reward.is_nan());
        Ok(judged.map(|(reward, weight)| reward * weight).reduce(|a, b| a + b).unwrap_or(f64::NAN))
    };
    per_function.iter().enumerate().map(combine).collect()
}

/// Each reward function standardised within its group, summed by weight, then standardised over the batch (GDPO; TRL's
/// `normalize_then_sum`), so that one function's scale can't drown another's.
///
/// Shapes: groups × samples × functions in, groups × samples out.
pub fn normalize_then_sum(
    groups: &[Vec<Vec<f64>>],
    weights: &[f64],
    config: &AdvantageConfig,
) -> Result<Vec<Vec<f64>>, AdvantageError> {
    let within_group = AdvantageConfig { scale: Scale::Group, ..*config };
    let mut sums: Vec<Vec<f64>> = groups.iter().map(|samples| vec![0.0; samples.len()]).collect();
    for (function, weight) in weights.iter().enumerate() {
        let column: Vec<Vec<f64>> = groups
            .iter()
            .map(|samples| samples.iter().map(|rewards| rewards.get(function).copied().unwrap_or(f64::NAN)).collect())
            .collect();
        for (sums, values) in sums.iter_mut().zip(advantages(&column, &within_group)?) {
            sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += weight * value);
        }
    }
    let batch: Vec<f64> = sums.iter().flatten().copied().collect();
    let (mean, divisor) = (mean(&batch), std(&batch) + config.epsilon);
    Ok(sums.iter().map(|group| group.iter().map(|value| (value - mean) / divisor).collect()).collect())
}

fn scored(rewards: &[f64]) -> impl Iterator<Item = f64> + '_ {
    rewards.iter().copied().filter(|reward| !reward.is_nan())
}

fn mean(rewards: &[f64]) -> f64 {
    scored(rewards).sum::<f64>() / scored(rewards).count() as f64
}

/// Unbiased, over the scored rewards; 0 for fewer than two.
fn std(rewards: &[f64]) -> f64 {
    let count = scored(rewards).count();
    if count < 2 {
        return 0.0;
    }
    let mean = mean(rewards);
    (scored(rewards).map(|reward| (reward - mean).powi(2)).sum::<f64>() / (count - 1) as f64).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn of(rewards: &[f64]) -> Vec<f64> {
        advantages(&[rewards], &AdvantageConfig::default()).unwrap().remove(0)
    }

    #[test]
    fn equal_rewards_and_lone_samples_teach_nothing() {
        assert_eq!(of(&[0.1; 7]), [0.0; 7]);
        assert_eq!(of(&[3.0]), [0.0]);
        assert_eq!(of(&[]), [0.0; 0]);
    }

    #[test]
    fn a_nan_reward_is_refused_by_name_or_left_out() {
        let refused = advantages(&[vec![1.0, 0.0], vec![0.5, f64::NAN]], &AdvantageConfig::default()).unwrap_err();
        assert_eq!(refused.to_string(), "the reward of sample 1 in group 1 is NaN; rewards are finite numbers");
        let config = AdvantageConfig { missing: Missing::Zero, scale: Scale::None, ..Default::default() };
        assert_eq!(advantages(&[[1.0, f64::NAN, 0.0]], &config).unwrap(), [[0.5, 0.0, -0.5]]);
        assert!(advantages(&[[f64::INFINITY, 0.0]], &config).is_err());
    }

    #[test]
    fn a_baseline_is_subtracted_elementwise() {
        assert_eq!(subtract_baseline(&[1.0, 0.0, 0.5], 0.5), [0.5, -0.5, 0.0]);
    }

    #[test]
    fn a_weight_per_reward_function_is_demanded() {
        assert!(matches!(
            combine_rewards(&[[1.0, 2.0]], &[1.0]),
            Err(AdvantageError::Weights { sample: 0, found: 2, weights: 1 })
        ));
    }

    proptest! {
        #[test]
        fn advantages_sum_to_zero_keep_order_and_ignore_shifts(rewards in prop::collection::vec(-5.0f64..5.0, 2..12), shift in -3.0f64..3.0) {
            let values = of(&rewards);
            prop_assert!(values.iter().sum::<f64>().abs() < 1e-6);
            for (i, j) in (0..rewards.len()).flat_map(|i| (0..rewards.len()).map(move |j| (i, j))) {
                prop_assert!(rewards[i] <= rewards[j] || values[i] >= values[j]);
            }
            let shifted: Vec<f64> = rewards.iter().map(|reward| reward + shift).collect();
            for (a, b) in values.iter().zip(of(&shifted)) {
                prop_assert!((a - b).abs() < 1e-6);
            }
        }
    }
}
