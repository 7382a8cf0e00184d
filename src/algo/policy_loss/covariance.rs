//! Tokens that stand out in a whole batch: by the covariance of their advantage and log-probability, and by their entropy.
//!
//! Tokens of high covariance are those that lose entropy fastest (Cui et al., The Entropy Mechanism of Reinforcement Learning, 2025).

use std::cmp::Ordering;

use super::surrogate::{Clip, Surrogate};
use crate::algo::LossInputs;
use crate::algo::correction::mean;
use crate::util::rng;

/// Which tokens a surrogate treats apart; empty where it treats none so.
pub(super) fn singled_out(surrogate: &Surrogate, inputs: &LossInputs) -> Vec<bool> {
    match surrogate {
        Surrogate::ClipCov { clip, share, min, max } => drawn(clip, *share, *min..*max, inputs),
        Surrogate::KlCov { share, .. } => largest(*share, inputs),
        _ => Vec::new(),
    }
}

/// `(A − mean A)(θ − mean θ)`.
fn covariances(inputs: &LossInputs) -> Vec<f64> {
    let (advantage, log_prob) = (mean(inputs.advantages), mean(inputs.log_probs));
    inputs.advantages.iter().zip(inputs.log_probs).map(|(a, theta)| (a - advantage) * (theta - log_prob)).collect()
}

fn count(share: f64, tokens: usize) -> usize {
    ((share * tokens as f64) as usize).max(1)
}

/// The tokens of largest covariance.
fn largest(share: f64, inputs: &LossInputs) -> Vec<bool> {
    let covariances = covariances(inputs);
    let mut order: Vec<usize> = (0..covariances.len()).collect();
    order.sort_by(|&a, &b| covariances[b].total_cmp(&covariances[a]));
    mark(&order, count(share, covariances.len()), covariances.len())
}

/// Some of the tokens in the range that are not clipped anyway. verl draws them by a random permutation. Here the draw follows from the tokens
/// themselves, from what was recorded when they were sampled, so that it is the same however a batch is cut or ordered (law N1).
fn drawn(clip: &Clip, share: f64, range: std::ops::Range<f64>, inputs: &LossInputs) -> Vec<bool> {
    let covariances = covariances(inputs);
    let mut eligible: Vec<(u64, usize)> = Vec::new();
    for sequence in inputs.sequences {
        for t in sequence.clone() {
            let ratio = (inputs.log_probs[t] - inputs.anchor()[t]).exp();
            let advantage = inputs.advantages[t];
            let clipped = (ratio < 1.0 - clip.low && advantage < 0.0) || (ratio > 1.0 + clip.high && advantage > 0.0);
            if !clipped && covariances[t] > range.start && covariances[t] < range.end {
                eligible.push((lot(inputs, sequence.start, t), t));
            }
        }
    }
    let by_lot = |&(a, t): &(u64, usize), &(b, u): &(u64, usize)| -> Ordering {
        a.cmp(&b).then(inputs.advantages[t].total_cmp(&inputs.advantages[u]))
    };
    eligible.sort_by(by_lot);
    let order: Vec<usize> = eligible.into_iter().map(|(_, t)| t).collect();
    mark(&order, count(share, covariances.len()), covariances.len())
}

/// A token's place in the draw: its position, and the recorded log-probabilities of itself and of its sequence's first token, mixed.
fn lot(inputs: &LossInputs, first: usize, t: usize) -> u64 {
    let recorded = inputs.behaviour.unwrap_or(inputs.anchor());
    [recorded[first].to_bits(), recorded[t].to_bits(), (t - first) as u64]
        .into_iter()
        .fold(0, |key, word| rng::mix(rng::state(key ^ word, 1)))
}

fn mark(order: &[usize], most: usize, tokens: usize) -> Vec<bool> {
    let mut marked = vec![false; tokens];
    order.iter().take(most).for_each(|&t| marked[t] = true);
    marked
}

/// The entropy from which on a token is trained: the `1 − share` quantile, interpolated linearly (torch's `quantile`).
pub(super) fn entropy_floor(share: f64, entropies: &[f64]) -> f64 {
    if share >= 1.0 || entropies.is_empty() {
        return f64::NEG_INFINITY;
    }
    let mut sorted = entropies.to_vec();
    sorted.sort_by(f64::total_cmp);
    let at = (1.0 - share) * (sorted.len() - 1) as f64;
    let (below, above) = (sorted[at.floor() as usize], sorted[at.ceil() as usize]);
    // Entropies come from single-precision tensors, and so does TRL's threshold; a double would cut the median token itself.
    f64::from((below + (above - below) * at.fract()) as f32)
}
