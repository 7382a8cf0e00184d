//! Advantages that few use: other baselines of a reward (a constant, OPO, GPG), the best sample
//! alone (pass@k), ranks, and z-scores over the batch.

use crate::algo::advantages::{
    AdvantageError, Missing, Rules, ScoredGroup, each_scored, mean, over_scored, standardized, std, zero_missing,
};

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
