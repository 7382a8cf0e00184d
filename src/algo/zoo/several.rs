//! Advantages of several reward functions.

use crate::algo::advantages::{AdvantageError, GroupMean, Rules, Scale, group_mean, standardized, zero_missing};

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
    Err(AdvantageError::Weights { sample, found: rewards.len(), weights: weights.len() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algo::Missing;

    #[test]
    fn a_weight_per_reward_function_is_demanded() {
        let refused = Err(AdvantageError::Weights { sample: 0, found: 2, weights: 1 });
        assert_eq!(combine_rewards(&[[1.0, 2.0]], &[1.0]), refused);
        let summed = normalize_then_sum(&[vec![vec![1.0, 2.0]]], &[1.0], 1e-4, Rules::default());
        assert!(matches!(summed, Err(AdvantageError::Weights { .. })));
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
}
