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
/// whose KL penalty is [`kl_per_token`](crate::algo::kl_per_token), summed over a sequence.
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
