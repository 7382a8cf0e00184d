//! Chooses a token from scores: pure functions on slices.
//!
//! Randomness is counter-based (law N2): one uniform number keyed by (run seed, prompt, sample,
//! position) becomes a token by the inverse of the cumulative distribution. The batch has no
//! influence. On CPUs the scores are equal too; GPU kernels depend on the batch size, so there law
//! N2 holds up to rounding.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use super::SamplingParams;

/// Uniform number in [0, 1) for token `position` of sample `index` of prompt `ordinal`.
pub fn uniform(run_seed: u64, ordinal: u64, index: u32, position: usize) -> f64 {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&run_seed.to_le_bytes());
    key[8..16].copy_from_slice(&ordinal.to_le_bytes());
    key[16..20].copy_from_slice(&index.to_le_bytes());
    // Separates these streams from others with the same seed.
    key[24..].copy_from_slice(b"sampling");
    let mut rng = ChaCha8Rng::from_seed(key);
    rng.set_stream(position as u64);
    (rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64
}

/// Applies temperature, top-k, top-p and min-p to scores, in this order, as transformers does.
/// Dropped tokens get minus infinity. At temperature 0 the scores stay undivided.
pub fn warp(scores: &mut [f32], params: &SamplingParams) {
    if !params.greedy() && params.temperature != 1.0 {
        scores.iter_mut().for_each(|score| *score /= params.temperature);
    }
    if params.top_k > 0 && params.top_k < scores.len() {
        keep_top_k(scores, params.top_k);
    }
    if params.top_p < 1.0 {
        keep_top_p(scores, f64::from(params.top_p));
    }
    if params.min_p > 0.0 {
        // p < min_p · max p, as a difference of scores.
        let least = largest(scores) + params.min_p.ln();
        drop_if(scores, |score| score < least);
    }
}

/// Chooses a token from logits, which are overwritten. Returns its id and its log-probability under
/// the sampled distribution, after temperature and truncation; for a greedy choice, under the
/// model's own distribution, at temperature 1. Returns `None` if the logits are not finite (a NaN,
/// or nothing above minus infinity).
pub fn choose(logits: &mut [f32], params: &SamplingParams, uniform: f64) -> Option<(u32, f32)> {
    if params.greedy() {
        let token = (0..logits.len()).reduce(|best, token| if logits[token] > logits[best] { token } else { best })?;
        let chosen = logits[token];
        let total: f64 = logits.iter().map(|&score| f64::from((score - chosen).exp())).sum();
        return total.is_finite().then(|| (token as u32, -total.ln() as f32));
    }
    warp(logits, params);
    let largest = largest(logits);
    let mut total = 0.0;
    for score in logits.iter_mut() {
        *score = (*score - largest).exp();
        total += f64::from(*score);
    }
    if !(total.is_finite() && total > 0.0) {
        return None;
    }
    let (mut left, mut chosen) = (uniform * total, None);
    for (token, &share) in logits.iter().enumerate().filter(|(_, share)| **share > 0.0) {
        chosen = Some((token, share));
        left -= f64::from(share);
        if left < 0.0 {
            break;
        }
    }
    chosen.map(|(token, share)| (token as u32, (f64::from(share) / total).ln() as f32))
}

fn largest(scores: &[f32]) -> f32 {
    scores.iter().copied().fold(f32::NEG_INFINITY, f32::max)
}

fn drop_if(scores: &mut [f32], dropped: impl Fn(f32) -> bool) {
    scores.iter_mut().filter(|score| dropped(**score)).for_each(|score| *score = f32::NEG_INFINITY);
}

/// Keeps the `k` highest scores and ties with the last, as transformers does.
fn keep_top_k(scores: &mut [f32], k: usize) {
    let mut sorted = scores.to_vec();
    let (_, kth, _) = sorted.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a));
    let kth = *kth;
    drop_if(scores, |score| score < kth);
}

/// Keeps the likeliest tokens until their probabilities reach `top_p`. Of equal scores the later
/// token goes first, as in the stable ascending sort of transformers.
fn keep_top_p(scores: &mut [f32], top_p: f64) {
    let largest = largest(scores);
    let share = |score: f32| f64::from((score - largest).exp());
    let total: f64 = scores.iter().map(|&score| share(score)).sum();
    let mut order: Vec<usize> = (0..scores.len()).filter(|&token| scores[token] > f32::NEG_INFINITY).collect();
    order.sort_unstable_by(|&a, &b| scores[b].total_cmp(&scores[a]).then(b.cmp(&a)));
    let mut sum = 0.0;
    let kept = order.iter().take_while(|&&token| {
        let open = sum < top_p * total;
        sum += share(scores[token]);
        open
    });
    let kept = kept.count().max(1);
    for &token in order.iter().skip(kept) {
        scores[token] = f32::NEG_INFINITY;
    }
}
