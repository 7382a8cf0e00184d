//! Means and deviations over the rewards that are numbers.

pub(in crate::algo) fn scored(rewards: &[f64]) -> impl Iterator<Item = f64> + '_ {
    rewards.iter().copied().filter(|reward| !reward.is_nan())
}

/// Mean of the scored rewards; NaN without any.
pub(in crate::algo) fn mean(rewards: &[f64]) -> f64 {
    scored(rewards).sum::<f64>() / scored(rewards).count() as f64
}

/// Unbiased standard deviation of the scored rewards; 0 for fewer than two.
pub(in crate::algo) fn std(rewards: &[f64]) -> f64 {
    let count = scored(rewards).count();
    if count < 2 {
        return 0.0;
    }
    let mean = mean(rewards);
    (scored(rewards).map(|reward| (reward - mean).powi(2)).sum::<f64>() / (count - 1) as f64).sqrt()
}

/// If true, all scored rewards are equal.
pub(in crate::algo) fn constant(rewards: &[f64]) -> bool {
    scored(rewards).all(|reward| Some(reward) == scored(rewards).next())
}

/// `(x − mean) / (std + ε)` over all scored values; exact zeros if they are equal, NaN stays NaN.
pub(in crate::algo) fn standardized(groups: Vec<Vec<f64>>, epsilon: f64) -> Vec<Vec<f64>> {
    let all = groups.concat();
    let (mean, divisor, constant) = (mean(&all), std(&all) + epsilon, constant(&all));
    let value = |value: f64| match constant {
        true if !value.is_nan() => 0.0,
        _ => (value - mean) / divisor,
    };
    groups.into_iter().map(|group| group.into_iter().map(value).collect()).collect()
}
