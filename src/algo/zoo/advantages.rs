//! Advantages that few use: other baselines of a reward (a constant, OPO, GPG), the best sample
//! alone (pass@k), ranks, z-scores over the batch, and several reward functions.

use crate::algo::advantages::{
    AdvantageError, GroupMean, Missing, Rules, Scale, ScoredGroup, each_scored, group_mean, mean, over_scored, standardized, std,
    zero_missing,
};
use crate::settings::declare::section;
use crate::settings::setting::POSITIVE;

section! {
    /// Difference between best and second best.
    pub struct BestOfGroup {
        /// If true, it is divided by the group's standard deviation.
        scale: bool = true;
        /// ε added to that standard deviation.
        epsilon: f64 = 1e-6, POSITIVE;
    }
}

section! {
    /// Difference from the batch's mean.
    pub struct Normalized {
        /// ε added to the batch's standard deviation.
        epsilon: f64 = 1e-4, POSITIVE;
    }
}

/// `A_i = r_i − baseline`.
pub fn subtract_baseline(rewards: &[f64], baseline: f64) -> Vec<f64> {
    rewards.iter().map(|reward| reward - baseline).collect()
}

/// `A_i = r_i − Σ_j l_j r_j / Σ_j l_j` within a group (Hao et al., On-Policy RL with Optimal Reward
/// Baseline, 2025). The baseline has the least variance if a sample's gradient grows with its
/// length.
///
/// Equals verl 0.9's `opo` with [`Lone::Nothing`](crate::algo::Lone::Nothing). A group without
/// trained tokens takes the plain mean.
pub fn optimal_baseline(groups: &[ScoredGroup], rules: Rules) -> Result<Vec<Vec<f64>>, AdvantageError> {
    groups.iter().try_for_each(ScoredGroup::check)?;
    over_scored(groups, rules.missing, |at, group| {
        let lengths: Vec<f64> = group.places.iter().map(|&place| groups[at].lengths[place]).collect();
        let total: f64 = lengths.iter().sum();
        let baseline = group.or_lone(rules.lone, |rewards| match total > 0.0 {
            true => rewards.iter().zip(&lengths).map(|(reward, length)| reward * length).sum::<f64>() / total,
            false => mean(rewards),
        });
        subtract_baseline(&group.rewards, baseline)
    })
}

/// `A_i = (r_i − mean_group) · N / N_{r ≠ 0} / norm` (Chu et al., GPG, 2025): the difference from
/// the group's mean, divided by the share of the batch's rewards that are not 0.
///
/// Shapes: groups × samples in, the same out. Equals verl 0.9's `gpg` with
/// [`Lone::Nothing`](crate::algo::Lone::Nothing); its `f_norm` is `norm`, 1 by default.
pub fn gpg<G: AsRef<[f64]>>(groups: &[G], rules: Rules, norm: f64) -> Result<Vec<Vec<f64>>, AdvantageError> {
    let scored = || groups.iter().flat_map(|group| group.as_ref()).filter(|reward| !reward.is_nan());
    let stretch = scored().count() as f64 / scored().filter(|reward| **reward != 0.0).count().max(1) as f64 / norm;
    over_scored(groups, rules.missing, |_, group| {
        let mean = group.or_lone(rules.lone, mean);
        group.rewards.iter().map(|reward| (reward - mean) * stretch).collect()
    })
}

/// `r_max − r_second` for the best sample of a group and 0 for all others, with `scale = Some(ε)`
/// divided by `std_group + ε` (Walder and Karkhanis, Pass@K Policy Optimization, 2025).
///
/// Shapes: groups × samples in, the same out. Equal best samples get 0, and so does a lone sample.
/// Equals verl 0.9's `grpo_passk` (`norm_adv_by_std_in_grpo` off: `None`), which rejects groups of
/// one.
pub fn best_of_group<G: AsRef<[f64]>>(
    groups: &[G],
    missing: Missing,
    scale: Option<f64>,
) -> Result<Vec<Vec<f64>>, AdvantageError> {
    over_scored(groups, missing, |_, group| {
        let mut values = vec![0.0; group.rewards.len()];
        let mut order: Vec<usize> = (0..group.rewards.len()).collect();
        order.sort_by(|&a, &b| group.rewards[b].total_cmp(&group.rewards[a]));
        if let [best, second, ..] = order[..] {
            let divisor = scale.map_or(1.0, |epsilon| std(&group.rewards) + epsilon);
            values[best] = (group.rewards[best] - group.rewards[second]) / divisor;
        }
        values
    })
}

/// `A = (r − mean) / (std + ε)` over the whole batch, with the unbiased standard deviation; equal
/// rewards give exact zeros.
///
/// Shapes: groups × samples in, the same out; a single group normalises a list.
pub fn normalized<G: AsRef<[f64]>>(groups: &[G], missing: Missing, epsilon: f64) -> Result<Vec<Vec<f64>>, AdvantageError> {
    let rewards = each_scored(groups, missing, |_, group| group.rewards.clone())?;
    Ok(zero_missing(standardized(rewards, epsilon)))
}

/// `A = 2 · rank / (n − 1) − 1` within a group: the worst gets −1, the best 1. Equal rewards share
/// the mean of their ranks, so that a group of equal rewards gets zeros; so does a lone sample.
///
/// Shapes: groups × samples in, the same out.
pub fn rank_based<G: AsRef<[f64]>>(groups: &[G], missing: Missing) -> Result<Vec<Vec<f64>>, AdvantageError> {
    over_scored(groups, missing, |_, group| {
        let others = group.rewards.len().saturating_sub(1).max(1) as f64;
        let count = |which: &dyn Fn(f64) -> bool| group.rewards.iter().filter(|other| which(**other)).count() as f64;
        // Twice the mean rank: rewards below, plus other rewards that are not above.
        let twice_rank = |reward: f64| count(&|other| other < reward) + count(&|other| other <= reward) - 1.0;
        match group.rewards.len() {
            1 => vec![0.0],
            _ => group.rewards.iter().map(|&reward| twice_rank(reward) / others - 1.0).collect(),
        }
    })
}

/// Weighted sum over reward functions, one reward per sample. A NaN is left out of the sum; a
/// sample with NaN alone stays NaN. Shapes: samples × functions in, samples out. Equals TRL's
/// `sum_then_normalize`.
pub fn combine_rewards<R: AsRef<[f64]>>(per_function: &[R], weights: &[f64]) -> Result<Vec<f64>, AdvantageError> {
    let combine = |(sample, rewards): (usize, &R)| {
        let rewards = rewards.as_ref();
        has_weights(sample, rewards, weights)?;
        let judged = rewards.iter().zip(weights).filter(|(reward, _)| !reward.is_nan());
        Ok(judged.map(|(reward, weight)| reward * weight).reduce(|a, b| a + b).unwrap_or(f64::NAN))
    };
    per_function.iter().enumerate().map(combine).collect()
}

/// Reward functions standardised within their group, summed by weight, then standardised over the
/// batch (GDPO; TRL's `normalize_then_sum`). A sample with NaN alone is left out of the batch's
/// statistics and gets 0.
///
/// Shapes: groups × samples × functions in, groups × samples out.
pub fn normalize_then_sum(
    groups: &[Vec<Vec<f64>>],
    weights: &[f64],
    epsilon: f64,
    rules: Rules,
) -> Result<Vec<Vec<f64>>, AdvantageError> {
    for (sample, rewards) in groups.iter().flatten().enumerate() {
        has_weights(sample, rewards, weights)?;
    }
    let within_group = GroupMean { std: Scale::Group, epsilon };
    let unjudged = |rewards: &Vec<f64>| if rewards.iter().all(|reward| reward.is_nan()) { f64::NAN } else { 0.0 };
    let mut sums: Vec<Vec<f64>> = groups.iter().map(|samples| samples.iter().map(unjudged).collect()).collect();
    for (function, weight) in weights.iter().enumerate() {
        let column: Vec<Vec<f64>> =
            groups.iter().map(|samples| samples.iter().map(|rewards| rewards[function]).collect()).collect();
        for (sums, values) in sums.iter_mut().zip(group_mean(&column, &within_group, rules)?) {
            sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += weight * value);
        }
    }
    Ok(zero_missing(standardized(sums, epsilon)))
}

fn has_weights(sample: usize, rewards: &[f64], weights: &[f64]) -> Result<(), AdvantageError> {
    if rewards.len() == weights.len() {
        return Ok(());
    }
    let (found, weights) = (rewards.len(), weights.len());
    let problem = format!("sample {sample} has {found} rewards for {weights} weights; give one weight per reward function");
    Err(AdvantageError::Custom(problem))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::algo::Lone;

    #[test]
    fn a_baseline_is_subtracted_elementwise() {
        assert_eq!(subtract_baseline(&[1.0, 0.0, 0.5], 0.5), [0.5, -0.5, 0.0]);
    }

    #[test]
    fn long_answers_weigh_in_the_optimal_baseline_by_their_tokens() {
        let of = |lengths: &[f64]| optimal_baseline(&[ScoredGroup { rewards: &[1.0, 0.0], lengths }], Rules::default());
        assert_eq!((of(&[3.0, 1.0]).unwrap(), of(&[0.0, 0.0]).unwrap()), (vec![vec![0.25, -0.75]], vec![vec![0.5, -0.5]]));
        assert_eq!(of(&[3.0]).unwrap_err().to_string(), "lengths has 1 entries where 2 are needed; columns are aligned");
    }

    #[test]
    fn unscored_and_lone_samples_follow_the_rules() {
        let rules = Rules { missing: Missing::Zero, lone: Lone::Nothing };
        let groups = [ScoredGroup { rewards: &[1.0, f64::NAN], lengths: &[2.0, 5.0] }];
        assert_eq!(optimal_baseline(&groups, rules).unwrap(), [[1.0, 0.0]]);
        assert_eq!(gpg(&groups, rules, 1.0).unwrap(), [[1.0, 0.0]]);
        let rules = Rules { missing: Missing::Zero, lone: Lone::Itself };
        assert_eq!(optimal_baseline(&groups, rules).unwrap(), [[0.0, 0.0]]);
        assert!(gpg(&groups, Rules::default(), 1.0).is_err());
    }

    #[test]
    fn only_a_sole_best_earns() {
        let groups = [vec![0.1, 0.7, 0.3], vec![1.0, 0.0, 1.0], vec![0.5], vec![]];
        let values = best_of_group(&groups, Missing::Refuse, None).unwrap();
        assert_eq!(values, [vec![0.0, 0.7 - 0.3, 0.0], vec![0.0; 3], vec![0.0], vec![]]);
        assert_eq!(best_of_group(&[[0.1; 4]], Missing::Refuse, Some(1e-6)).unwrap(), [[0.0; 4]]);
        assert_eq!(best_of_group(&[[f64::NAN, 2.0, 1.0]], Missing::Zero, None).unwrap(), [[0.0, 1.0, 0.0]]);
        assert!(best_of_group(&[[f64::NAN, 2.0]], Missing::Refuse, None).is_err());
    }

    #[test]
    fn ranks_run_from_minus_one_to_one_and_equals_share_theirs() {
        let groups = [vec![10.0, -3.0, 0.0], vec![1.0, 0.0, 1.0, 1.0], vec![0.1; 5], vec![9.0], vec![]];
        let ranks = rank_based(&groups, Missing::Refuse).unwrap();
        let shared = 4.0 / 3.0 - 1.0;
        assert_eq!(ranks, [vec![1.0, -1.0, 0.0], vec![shared, -1.0, shared, shared], vec![0.0; 5], vec![0.0], vec![]]);
        assert_eq!(rank_based(&[[1.0, f64::NAN, 0.0]], Missing::Zero).unwrap(), [[1.0, 0.0, -1.0]]);
        assert!(rank_based(&[[1.0, f64::NAN]], Missing::Refuse).is_err());
    }

    #[test]
    fn a_batch_is_normalised_as_one() {
        let values = normalized(&[vec![1.0, 0.0], vec![2.0]], Missing::Refuse, 0.0).unwrap();
        assert_eq!(values, [vec![0.0, -1.0], vec![1.0]]);
        assert_eq!(normalized(&[[0.1; 3], [0.1; 3]], Missing::Refuse, 0.0).unwrap(), [[0.0; 3]; 2]);
        assert_eq!(normalized(&[[f64::NAN, 4.0]], Missing::Zero, 0.0).unwrap(), [[0.0; 2]]);
    }

    #[test]
    fn a_weight_per_reward_function_is_demanded() {
        let refused = combine_rewards(&[[1.0, 2.0]], &[1.0]).unwrap_err();
        assert_eq!(refused.to_string(), "sample 0 has 2 rewards for 1 weights; give one weight per reward function");
        assert_eq!(normalize_then_sum(&[vec![vec![1.0, 2.0]]], &[1.0], 1e-4, Rules::default()), Err(refused));
    }

    #[test]
    fn what_nobody_judges_stays_out_of_sums_and_statistics() {
        let unscored = combine_rewards(&[[1.0, f64::NAN], [f64::NAN, f64::NAN]], &[2.0, 5.0]).unwrap();
        assert_eq!(unscored[0], 2.0);
        assert!(unscored[1].is_nan());

        let rules = Rules { missing: Missing::Zero, ..Rules::default() };
        let nobody = vec![f64::NAN, f64::NAN];
        let group = vec![vec![1.0, 3.0], vec![0.0, 1.0], nobody, vec![0.5, -1.0]];
        let with = normalize_then_sum(std::slice::from_ref(&group), &[1.0, 0.5], 1e-4, rules).unwrap();
        let judged: Vec<Vec<f64>> = group.iter().filter(|rewards| !rewards[0].is_nan()).cloned().collect();
        let without = normalize_then_sum(&[judged], &[1.0, 0.5], 1e-4, rules).unwrap();
        assert_eq!(with[0][2], 0.0);
        assert_eq!([with[0][0], with[0][1], with[0][3]], without[0][..]);
    }

    #[test]
    fn a_reward_that_says_nothing_changes_nothing() {
        let rules = Rules::default();
        let one = normalize_then_sum(&[vec![vec![1.0], vec![0.0], vec![0.25]]], &[1.0], 1e-4, rules).unwrap();
        let both = vec![vec![1.0, 7.0], vec![0.0, 7.0], vec![0.25, 7.0]];
        assert_eq!(normalize_then_sum(&[both], &[1.0, 3.0], 1e-4, rules).unwrap(), one);
        assert_eq!(normalize_then_sum(&[vec![vec![0.1]; 3]], &[1.0], 1e-4, rules).unwrap(), [[0.0; 3]]);
    }

    proptest! {
        #[test]
        fn with_equal_lengths_the_optimal_baseline_is_the_mean(rewards in prop::collection::vec(-5.0f64..5.0, 1..12), length in 1.0f64..9.0) {
            let mean = rewards.iter().sum::<f64>() / rewards.len() as f64;
            let lengths = vec![length; rewards.len()];
            let values = optimal_baseline(&[ScoredGroup { rewards: &rewards, lengths: &lengths }], Rules::default()).unwrap();
            for (value, reward) in values[0].iter().zip(&rewards) {
                prop_assert!((value - (reward - mean)).abs() < 1e-12);
            }
        }

        #[test]
        fn ranks_sum_to_zero_and_ignore_any_rising_transform(rewards in prop::collection::vec(-3i32..3, 2..12)) {
            let plain: Vec<f64> = rewards.iter().map(|&reward| f64::from(reward)).collect();
            let warped: Vec<f64> = plain.iter().map(|reward| reward.exp() * 7.0 - 2.0).collect();
            let ranks = rank_based(&[&plain[..], &warped[..]], Missing::Refuse).unwrap();
            prop_assert!(ranks[0].iter().sum::<f64>().abs() < 1e-12);
            prop_assert_eq!(&ranks[0], &ranks[1]);
        }
    }
}
