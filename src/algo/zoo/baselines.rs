//! Other baselines of a reward: a constant, the length-weighted mean of the group (OPO), and GPG's
//! scaled mean.

use crate::algo::advantages::{AdvantageError, Rules, mean, over_scored, same_shape, zero_missing};

/// `A_i = r_i − baseline`.
pub fn subtract_baseline(rewards: &[f64], baseline: f64) -> Vec<f64> {
    rewards.iter().map(|reward| reward - baseline).collect()
}

/// `A_i = r_i − Σ_j l_j r_j / Σ_j l_j` within a group (Hao et al., On-Policy RL with Optimal Reward
/// Baseline, 2025). The baseline has the least variance if a sample's gradient grows with its
/// length.
///
/// Shapes: groups × samples in, with `lengths` in trained tokens aligned to them; the same out.
/// Equals verl 0.9's `opo` with [`Lone::Nothing`](crate::algo::Lone::Nothing). A group without
/// trained tokens takes the plain mean.
pub fn optimal_baseline<G: AsRef<[f64]>, L: AsRef<[f64]>>(
    groups: &[G],
    lengths: &[L],
    rules: Rules,
) -> Result<Vec<Vec<f64>>, AdvantageError> {
    same_shape(groups, lengths)?;
    let values = over_scored(groups, rules.missing, |at, group| {
        let lengths: Vec<f64> = group.places.iter().map(|&place| lengths[at].as_ref()[place]).collect();
        let total: f64 = lengths.iter().sum();
        let baseline = group.or_lone(rules.lone, |rewards| match total > 0.0 {
            true => rewards.iter().zip(&lengths).map(|(reward, length)| reward * length).sum::<f64>() / total,
            false => mean(rewards),
        });
        subtract_baseline(&group.rewards, baseline)
    })?;
    Ok(zero_missing(values))
}

/// `A_i = (r_i − mean_group) · N / N_{r ≠ 0} / norm` (Chu et al., GPG, 2025): the difference from
/// the group's mean, divided by the share of the batch's rewards that are not 0.
///
/// Shapes: groups × samples in, the same out. Equals verl 0.9's `gpg` with
/// [`Lone::Nothing`](crate::algo::Lone::Nothing); its `f_norm` is `norm`, 1 by default.
pub fn gpg<G: AsRef<[f64]>>(groups: &[G], rules: Rules, norm: f64) -> Result<Vec<Vec<f64>>, AdvantageError> {
    let scored = || groups.iter().flat_map(|group| group.as_ref()).filter(|reward| !reward.is_nan());
    let stretch = scored().count() as f64 / scored().filter(|reward| **reward != 0.0).count().max(1) as f64 / norm;
    let values = over_scored(groups, rules.missing, |_, group| {
        let mean = group.or_lone(rules.lone, mean);
        group.rewards.iter().map(|reward| (reward - mean) * stretch).collect()
    })?;
    Ok(zero_missing(values))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::algo::{Lone, Missing};

    #[test]
    fn a_baseline_is_subtracted_elementwise() {
        assert_eq!(subtract_baseline(&[1.0, 0.0, 0.5], 0.5), [0.5, -0.5, 0.0]);
    }

    #[test]
    fn long_answers_weigh_in_the_optimal_baseline_by_their_tokens() {
        let values = optimal_baseline(&[[1.0, 0.0]], &[[3.0, 1.0]], Rules::default()).unwrap();
        assert_eq!(values, [[0.25, -0.75]]);
        assert_eq!(optimal_baseline(&[[1.0, 0.0]], &[[0.0, 0.0]], Rules::default()).unwrap(), [[0.5, -0.5]]);
        let refused = optimal_baseline(&[[1.0, 0.0]], &[[3.0]], Rules::default()).unwrap_err();
        assert_eq!(refused.to_string(), "lengths has 1 entries where 2 are needed; columns are aligned");
    }

    #[test]
    fn rewards_of_zero_stretch_the_others() {
        let groups = [[1.0, 0.0], [0.0, 0.0]];
        assert_eq!(gpg(&groups, Rules::default(), 1.0).unwrap(), [[2.0, -2.0], [0.0, 0.0]]);
        assert_eq!(gpg(&groups, Rules::default(), 4.0).unwrap(), [[0.5, -0.5], [0.0, 0.0]]);
        assert_eq!(gpg(&[[0.0, 0.0]], Rules::default(), 1.0).unwrap(), [[0.0, 0.0]]);
    }

    #[test]
    fn unscored_and_lone_samples_follow_the_rules() {
        let rules = Rules { missing: Missing::Zero, lone: Lone::Nothing };
        let groups = [[1.0, f64::NAN]];
        assert_eq!(optimal_baseline(&groups, &[[2.0, 5.0]], rules).unwrap(), [[1.0, 0.0]]);
        assert_eq!(gpg(&groups, rules, 1.0).unwrap(), [[1.0, 0.0]]);
        let rules = Rules { missing: Missing::Zero, lone: Lone::Itself };
        assert_eq!(optimal_baseline(&groups, &[[2.0, 5.0]], rules).unwrap(), [[0.0, 0.0]]);
        assert!(gpg(&groups, Rules::default(), 1.0).is_err());
    }

    proptest! {
        #[test]
        fn with_equal_lengths_the_optimal_baseline_is_the_mean(rewards in prop::collection::vec(-5.0f64..5.0, 1..12), length in 1.0f64..9.0) {
            let mean = rewards.iter().sum::<f64>() / rewards.len() as f64;
            let values = optimal_baseline(&[&rewards[..]], &[vec![length; rewards.len()]], Rules::default()).unwrap();
            for (value, reward) in values[0].iter().zip(&rewards) {
                prop_assert!((value - (reward - mean)).abs() < 1e-12);
            }
        }
    }
}
