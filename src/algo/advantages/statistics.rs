//! Means and deviations over the rewards that are numbers.

pub(super) fn scored(rewards: &[f64]) -> impl Iterator<Item = f64> + '_ {
    rewards.iter().copied().filter(|reward| !reward.is_nan())
}

/// NaN where nothing is scored.
pub(super) fn mean(rewards: &[f64]) -> f64 {
    scored(rewards).sum::<f64>() / scored(rewards).count() as f64
}

/// Unbiased, over the scored rewards; 0 for fewer than two.
pub(super) fn std(rewards: &[f64]) -> f64 {
    let count = scored(rewards).count();
    if count < 2 {
        return 0.0;
    }
    let mean = mean(rewards);
    (scored(rewards).map(|reward| (reward - mean).powi(2)).sum::<f64>() / (count - 1) as f64).sqrt()
}

/// Whether there is nothing to tell the scored rewards apart by.
pub(super) fn constant(rewards: &[f64]) -> bool {
    scored(rewards).all(|reward| Some(reward) == scored(rewards).next())
}

/// `(x − mean) / (std + ε)` over all scored values; exact zeros where they are equal, NaN stays NaN.
pub(super) fn standardized(groups: Vec<Vec<f64>>, epsilon: f64) -> Vec<Vec<f64>> {
    let all = groups.concat();
    let (mean, divisor, constant) = (mean(&all), std(&all) + epsilon, constant(&all));
    let value = |value: f64| match constant {
        true if !value.is_nan() => 0.0,
        _ => (value - mean) / divisor,
    };
    groups.into_iter().map(|group| group.into_iter().map(value).collect()).collect()
}
