//! Difference of a reward from the mean of the others of its group (RLOO).

use super::estimator::{AdvantageError, Lone, Rules, each_scored, standardized, zero_missing};
use crate::settings::declare::section;
use crate::settings::setting::POSITIVE;

section! {
    /// Difference from the mean of the others.
    pub struct LeaveOneOut {
        /// If true, advantages are divided by their standard deviation over the batch.
        normalize: bool = false;
        /// ε added to that standard deviation.
        epsilon: f64 = 1e-4, POSITIVE;
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
    use super::super::Missing;
    use super::*;
    use proptest::prelude::*;

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
    }
}
