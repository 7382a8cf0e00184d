//! Rewards against the mean of their group (GRPO, Dr. GRPO).

use crate::settings::declare::choices;
use serde::{Deserialize, Serialize};

use super::error::AdvantageError;
use super::rules::{Lone, Missing, over_scored, zero_missing};
use super::statistics::{constant, mean, std};

choices! {
    /// Divisor of differences from the group's mean.
    pub enum Scale {
        /// the standard deviation of the group (GRPO).
        "group" => Group,
        /// the standard deviation of the batch.
        "batch" => Batch,
        /// no divisor (Dr. GRPO).
        "none" => None,
    }
}

/// Settings of [`advantages`].
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdvantageConfig {
    /// The divisor.
    pub scale: Scale,
    /// Added to the standard deviation, so that near-equal rewards don't explode. TRL takes 1e-4, verl 1e-6.
    pub epsilon: f64,
    /// What to do about NaN.
    pub missing: Missing,
    /// What a group of one is compared with.
    pub lone: Lone,
}

impl Default for AdvantageConfig {
    fn default() -> Self {
        AdvantageConfig { scale: Scale::Group, epsilon: 1e-4, missing: Missing::Refuse, lone: Lone::Itself }
    }
}

/// `A = (r − mean_group) / (std + ε)`, with the unbiased (n − 1) standard deviation of the group or of the batch.
///
/// Shapes: groups × samples in, the same out. A group whose rewards are all equal gets exact zeros, and so does a group of one, unless
/// `lone` says otherwise. Equals TRL 1.16's `GRPOTrainer` (`scale_rewards` group, batch, none); with ε = 1e-6 and [`Lone::Nothing`],
/// verl 0.9's `grpo` and `grpo_vectorized` (`norm_adv_by_std_in_grpo` on: `Scale::Group`, off: `Scale::None`).
pub fn advantages<G: AsRef<[f64]>>(groups: &[G], config: &AdvantageConfig) -> Result<Vec<Vec<f64>>, AdvantageError> {
    let batch: Vec<f64> = groups.iter().flat_map(|rewards| rewards.as_ref()).copied().collect();
    let batch_std = std(&batch);
    let values = over_scored(groups, config.missing, |_, group| {
        let alone = group.rewards.len() == 1 && config.lone == Lone::Nothing;
        let divisor = match config.scale {
            Scale::Group if alone => 1.0 + config.epsilon,
            Scale::Group => std(&group.rewards) + config.epsilon,
            Scale::Batch => batch_std + config.epsilon,
            Scale::None => 1.0,
        };
        if !alone && constant(&group.rewards) {
            return vec![0.0; group.rewards.len()];
        }
        let mean = group.or_lone(config.lone, mean);
        group.rewards.iter().map(|reward| (reward - mean) / divisor).collect()
    })?;
    Ok(zero_missing(values))
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
    fn a_lone_sample_may_count_by_its_reward() {
        let config = AdvantageConfig { lone: Lone::Nothing, scale: Scale::None, ..Default::default() };
        assert_eq!(advantages(&[vec![3.0], vec![1.0, 0.0]], &config).unwrap(), [vec![3.0], vec![0.5, -0.5]]);
    }

    #[test]
    fn a_nan_reward_is_refused_by_name_or_left_out() {
        let refused = advantages(&[vec![1.0, 0.0], vec![0.5, f64::NAN]], &AdvantageConfig::default()).unwrap_err();
        assert_eq!(
            refused.to_string(),
            "the reward of sample 1 in group 1 is NaN; rewards are finite numbers of at most 1e100 either way"
        );
        let config = AdvantageConfig { missing: Missing::Zero, scale: Scale::None, ..Default::default() };
        assert_eq!(advantages(&[[1.0, f64::NAN, 0.0]], &config).unwrap(), [[0.5, 0.0, -0.5]]);
        assert_eq!(advantages(&[[f64::NAN; 2]], &config).unwrap(), [[0.0; 2]]);
        assert!(advantages(&[[f64::INFINITY, 0.0]], &config).is_err());
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
