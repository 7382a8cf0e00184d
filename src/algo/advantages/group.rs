//! Difference of a reward from its group's mean (GRPO, Dr. GRPO), or from the mean of the others
//! (RLOO).

use super::estimator::{
    AdvantageError, Estimator, Lone, Rules, ScoredGroup, constant, each_scored, mean, over_scored, standardized, std,
    zero_missing,
};
use crate::settings::declare::{choices, section};
use crate::settings::setting::POSITIVE;

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

section! {
    /// Difference from the group's mean.
    pub struct GroupMean {
        /// Divisor of the difference.
        std: Scale = Scale::default();
        /// ε added to the divisor.
        epsilon: f64 = 1e-4, POSITIVE;
    }
}

section! {
    /// Difference from the mean of the others.
    pub struct LeaveOneOut {
        /// If true, advantages are divided by their standard deviation over the batch.
        normalize: bool = false;
        /// ε added to that standard deviation.
        epsilon: f64 = 1e-4, POSITIVE;
    }
}

/// `A = (r − mean_group) / (std + ε)`, with the unbiased (n − 1) standard deviation of the group or
/// of the batch.
///
/// Shapes: groups × samples in, the same out. A group with equal rewards gets exact zeros, and so
/// does a group of one with [`Lone::Itself`]. Equals TRL 1.16's `GRPOTrainer` (`scale_rewards`
/// group, batch, none). With ε = 1e-6 and [`Lone::Nothing`] it equals verl 0.9's `grpo` and
/// `grpo_vectorized`, whose `norm_adv_by_std_in_grpo` is `Scale::Group` if on and `Scale::None` if
/// off.
pub fn group_mean<G: AsRef<[f64]>>(groups: &[G], config: &GroupMean, rules: Rules) -> Result<Vec<Vec<f64>>, AdvantageError> {
    let batch: Vec<f64> = groups.iter().flat_map(|rewards| rewards.as_ref()).copied().collect();
    let batch_std = std(&batch);
    over_scored(groups, rules.missing, |_, group| {
        let alone = group.rewards.len() == 1 && rules.lone == Lone::Nothing;
        let divisor = match config.std {
            Scale::Group if alone => 1.0 + config.epsilon,
            Scale::Group => std(&group.rewards) + config.epsilon,
            Scale::Batch => batch_std + config.epsilon,
            Scale::None => 1.0,
        };
        if !alone && constant(&group.rewards) {
            return vec![0.0; group.rewards.len()];
        }
        let mean = group.or_lone(rules.lone, mean);
        group.rewards.iter().map(|reward| (reward - mean) / divisor).collect()
    })
}

impl Estimator for GroupMean {
    fn estimate(&self, groups: &[ScoredGroup]) -> Result<Vec<Vec<f64>>, AdvantageError> {
        group_mean(groups, self, Rules::default())
    }

    fn is_by_group(&self) -> bool {
        self.std != Scale::Batch
    }
}

/// `A_i = r_i − mean_{j ≠ i} r_j`, an unbiased baseline (Ahmadian et al., Back to Basics, 2024).
/// With `normalize = Some(ε)`, `(A − mean_batch A) / (std_batch A + ε)` over the whole batch.
///
/// Shapes: groups × samples in, the same out. Equals TRL 1.16's `RLOOTrainer`, whose ε is 1e-4 and
/// whose KL penalty is [`rewards_less_kl`](crate::algo::rewards_less_kl), summed over a sequence.
/// Equals verl 0.9's `rloo` with [`Lone::Nothing`], and its `rloo_vectorized` with
/// [`Lone::Itself`].
pub fn leave_one_out<G: AsRef<[f64]>>(
    groups: &[G],
    rules: Rules,
    normalize: Option<f64>,
) -> Result<Vec<Vec<f64>>, AdvantageError> {
    let values = each_scored(groups, rules.missing, |_, group| {
        let (sum, count) = (group.rewards.iter().sum::<f64>(), group.rewards.len());
        match (count, rules.lone) {
            (1, Lone::Nothing) => group.rewards.clone(),
            // Without siblings there is no estimate, and the batch's statistics leave it out.
            (1, Lone::Itself) => vec![f64::NAN],
            _ => group.rewards.iter().map(|reward| reward - (sum - reward) / (count - 1) as f64).collect(),
        }
    })?;
    Ok(zero_missing(match normalize {
        Some(epsilon) => standardized(values, epsilon),
        None => values,
    }))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::Missing;
    use super::*;

    const PLAIN: GroupMean = GroupMean { std: Scale::None, epsilon: 1e-4 };

    fn of(rewards: &[f64]) -> Vec<f64> {
        group_mean(&[rewards], &GroupMean::default(), Rules::default()).unwrap().remove(0)
    }

    #[test]
    fn equal_rewards_and_lone_samples_teach_nothing() {
        assert_eq!(of(&[0.1; 7]), [0.0; 7]);
        assert_eq!(of(&[3.0]), [0.0]);
        assert_eq!(of(&[]), [0.0; 0]);
    }

    #[test]
    fn a_nan_reward_is_refused_by_name_or_left_out() {
        let groups = [&[1.0, 0.0][..], &[0.5, f64::NAN]].map(|rewards| ScoredGroup { rewards, lengths: &[] });
        let refused = GroupMean::default().estimate(&groups).unwrap_err();
        assert_eq!(
            refused.to_string(),
            "the reward of sample 1 in group 1 is NaN; rewards are finite numbers of at most 1e100 either way"
        );
        let rules = Rules { missing: Missing::Zero, ..Rules::default() };
        assert_eq!(group_mean(&[[1.0, f64::NAN, 0.0]], &PLAIN, rules).unwrap(), [[0.5, 0.0, -0.5]]);
        assert_eq!(group_mean(&[[f64::NAN; 2]], &PLAIN, rules).unwrap(), [[0.0; 2]]);
        assert!(group_mean(&[[f64::INFINITY, 0.0]], &PLAIN, rules).is_err());
    }

    #[test]
    fn a_sample_is_compared_with_its_scored_siblings() {
        assert_eq!(leave_one_out(&[[1.0, 0.0, 0.5]], Rules::default(), None).unwrap(), [[0.75, -0.75, 0.0]]);
        let rules = Rules { missing: Missing::Zero, ..Rules::default() };
        let groups = [vec![1.0, f64::NAN, 0.0], vec![f64::NAN, 2.0]];
        assert_eq!(leave_one_out(&groups, rules, None).unwrap(), [vec![1.0, 0.0, -1.0], vec![0.0, 0.0]]);
        assert!(leave_one_out(&groups, Rules::default(), None).is_err());
    }

    #[test]
    fn without_siblings_a_reward_is_its_own_baseline_or_has_none() {
        assert_eq!(leave_one_out(&[[3.0]], Rules::default(), None).unwrap(), [[0.0]]);
        assert_eq!(leave_one_out(&[[3.0]], Rules { lone: Lone::Nothing, ..Rules::default() }, None).unwrap(), [[3.0]]);
        assert_eq!(leave_one_out::<[f64; 0]>(&[], Rules::default(), Some(1e-4)).unwrap(), [[0.0; 0]; 0]);
    }

    proptest! {
        #[test]
        fn it_is_the_distance_from_the_mean_stretched(rewards in prop::collection::vec(-5.0f64..5.0, 2..12)) {
            let n = rewards.len() as f64;
            let mean = rewards.iter().sum::<f64>() / n;
            let values = leave_one_out(&[&rewards[..]], Rules::default(), None).unwrap().remove(0);
            for (value, reward) in values.iter().zip(&rewards) {
                prop_assert!((value - (reward - mean) * n / (n - 1.0)).abs() < 1e-12);
            }
        }

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
