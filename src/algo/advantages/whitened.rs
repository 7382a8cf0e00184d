//! REINFORCE++: returns or centred rewards, whitened over all trained tokens of the batch.

use std::ops::Range;

use super::estimator::{AdvantageError, Rules, ScoredGroup, each_scored, mean, zero_missing};
use super::returns::{Returns, rewards_to_go};
use crate::algo::masked::whiten;

/// `A = whiten(G)`, where `G_t = r_t + γ G_{t+1}` are the discounted rewards to go (Hu,
/// REINFORCE++, 2025).
///
/// Shapes: columns with one entry per token, tiled by `sequences`. Equals verl 0.9's
/// `reinforce_plus_plus`.
pub fn reinforce_plus_plus(
    rewards: &[f64],
    mask: &[f32],
    sequences: &[Range<usize>],
    gamma: f64,
) -> Result<Returns, AdvantageError> {
    let returns = rewards_to_go(rewards, mask, sequences, gamma)?;
    let advantages = trained(whiten(&returns, mask, true), mask);
    Ok(Returns { advantages, returns })
}

/// `A = whiten(r)` for one reward per sample: [`reinforce_plus_plus`] with γ = 1, where every
/// token's return is its sample's reward. Samples weigh in the batch's mean and deviation by their
/// trained tokens.
pub fn reinforce_plus_plus_outcome(groups: &[ScoredGroup], rules: Rules) -> Result<Vec<Vec<f64>>, AdvantageError> {
    whiten_samples(groups, each_scored(groups, rules.missing, |_, group| group.rewards.clone())?)
}

/// `A = whiten(r − mean_group)` (REINFORCE++-baseline). Samples weigh in the batch's mean and
/// deviation by their trained tokens. Equals verl 0.9's `reinforce_plus_plus_baseline` with
/// [`Lone::Nothing`](super::Lone::Nothing).
pub fn reinforce_plus_plus_baseline(groups: &[ScoredGroup], rules: Rules) -> Result<Vec<Vec<f64>>, AdvantageError> {
    let centred = each_scored(groups, rules.missing, |_, group| {
        let mean = group.or_lone(rules.lone, mean);
        group.rewards.iter().map(|reward| reward - mean).collect()
    })?;
    whiten_samples(groups, centred)
}

/// Whitens one value per sample, repeated for each of its tokens; NaN is left out and becomes 0.
fn whiten_samples(groups: &[ScoredGroup], values: Vec<Vec<f64>>) -> Result<Vec<Vec<f64>>, AdvantageError> {
    groups.iter().try_for_each(ScoredGroup::check)?;
    let flat = values.concat();
    let lengths = groups.iter().flat_map(|group| group.lengths);
    let weights: Vec<f32> = lengths.zip(&flat).map(|(&length, value)| if value.is_nan() { 0.0 } else { length as f32 }).collect();
    let mut whitened = whiten(&flat, &weights, true).into_iter();
    Ok(zero_missing(values.iter().map(|group| whitened.by_ref().take(group.len()).collect()).collect()))
}

/// Multiplies values by the mask; 0 for tokens that are not trained.
fn trained(values: Vec<f64>, mask: &[f32]) -> Vec<f64> {
    values.into_iter().zip(mask).map(|(value, &mask)| if mask > 0.0 { value * f64::from(mask) } else { 0.0 }).collect()
}
