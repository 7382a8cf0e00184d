//! Sums, means and deviations over masked tokens. Shapes: values and mask aligned, one entry per
//! token.
//!
//! Equal to verl 0.9's `masked_sum`, `masked_mean`, `masked_var` and `masked_whiten`. Values with
//! mask 0 may be NaN.

/// Guard that verl adds to every count and variance that it divides by; its numbers depend on it.
const GUARD: f64 = 1e-8;

/// `Σ m x`.
pub fn masked_sum(values: &[f64], mask: &[f32]) -> f64 {
    seen(values, mask).map(|(value, mask)| value * mask).sum()
}

/// `Σ m x / (Σ m + 1e-8)`; 0 for an empty mask.
pub fn masked_mean(values: &[f64], mask: &[f32]) -> f64 {
    masked_sum(values, mask) / (mass(mask) + GUARD)
}

/// `Σ m (x − mean)² / (Σ m + 1e-8)`, times `Σ m / (Σ m − 1)` if unbiased. 0 if `Σ m ≤ 1`, which
/// verl rejects.
pub fn masked_variance(values: &[f64], mask: &[f32], unbiased: bool) -> f64 {
    let (mean, count) = (masked_mean(values, mask), mass(mask));
    let squares: f64 = seen(values, mask).map(|(value, mask)| (value - mean).powi(2) * mask).sum();
    let biased = squares / (count + GUARD);
    match unbiased {
        false => biased,
        true if count > 1.0 => biased * count / (count - 1.0),
        true => 0.0,
    }
}

/// `(x − mean) / √(var + 1e-8)` with the mask's mean and unbiased variance, for every value, masked
/// or not. Without `shift_mean` the mean is added again.
///
/// Equal values become exactly 0, or the mean; verl's guards leave about 1e-4 of the mean. An empty
/// mask whitens everything to 0, which verl rejects.
pub fn whiten(values: &[f64], mask: &[f32], shift_mean: bool) -> Vec<f64> {
    let (mean, deviation) = (masked_mean(values, mask), (masked_variance(values, mask, true) + GUARD).sqrt());
    let kept = if shift_mean { 0.0 } else { mean };
    let Some((first, _)) = seen(values, mask).next() else { return vec![0.0; values.len()] };
    let constant = seen(values, mask).all(|(value, _)| value == first);
    let white = |value: f64| if constant && value == first { kept } else { (value - mean) / deviation + kept };
    values.iter().map(|&value| white(value)).collect()
}

fn mass(mask: &[f32]) -> f64 {
    mask.iter().map(|&mask| f64::from(mask)).sum()
}

fn seen<'a>(values: &'a [f64], mask: &'a [f32]) -> impl Iterator<Item = (f64, f64)> + 'a {
    values.iter().zip(mask).filter(|(_, mask)| **mask > 0.0).map(|(value, mask)| (*value, f64::from(*mask)))
}
