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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_random_number_depends_on_its_key_alone_and_on_all_of_it() {
        let number = uniform(1, 2, 3, 4);
        assert_eq!(number, uniform(1, 2, 3, 4));
        for other in [uniform(2, 2, 3, 4), uniform(1, 3, 3, 4), uniform(1, 2, 4, 4), uniform(1, 2, 3, 5)] {
            assert_ne!(number, other);
        }
        let mean = (0..2000).map(|position| uniform(0, 0, 0, position)).sum::<f64>() / 2000.0;
        assert!((mean - 0.5).abs() < 0.03, "{mean}");
    }

    #[test]
    fn draws_follow_the_distribution_they_report() {
        let logits = [0.0f32, 1.0, -2.0, 3.0, 0.5];
        let params = SamplingParams { temperature: 1.5, top_k: 4, ..Default::default() };
        let mut counts = [0usize; 5];
        let mut reported = [f64::NEG_INFINITY; 5];
        for position in 0..20_000 {
            let (token, log_prob) = choose(&mut logits.clone(), &params, uniform(7, 0, 0, position)).unwrap();
            counts[token as usize] += 1;
            reported[token as usize] = f64::from(log_prob);
        }
        assert_eq!(counts[2], 0, "dropped by top-k");
        assert!((reported.iter().map(|log| log.exp()).sum::<f64>() - 1.0).abs() < 1e-6);
        for (count, log) in counts.iter().zip(reported) {
            assert!((*count as f64 / 20_000.0 - log.exp()).abs() < 0.015, "{counts:?} {reported:?}");
        }
    }

    #[test]
    fn a_greedy_choice_carries_the_models_own_log_probability() {
        let choice = choose(&mut [0.0, 2.0, 2.0], &SamplingParams { temperature: 0.0, ..Default::default() }, 0.9);
        let expected = -(1.0f64 + 1.0 + (-2.0f64).exp()).ln();
        assert_eq!(choice, Some((1, expected as f32)));
    }

    #[test]
    fn logits_that_are_not_finite_give_no_token() {
        for greedy in [0.0, 1.0] {
            let params = SamplingParams { temperature: greedy, ..Default::default() };
            for logits in [[0.0, f32::NAN], [f32::INFINITY, 0.0], [f32::NEG_INFINITY; 2]] {
                assert_eq!(choose(&mut logits.clone(), &params, 0.5), None, "{logits:?} at {greedy}");
            }
        }
    }

    proptest! {
        #[test]
        fn a_token_that_was_dropped_is_never_drawn(
            logits in prop::collection::vec(-8f32..8.0, 1..40), u in 0.0f64..1.0, top_k in 0usize..8, top_p in 0.05f32..1.0, min_p in 0f32..0.9,
        ) {
            let params = SamplingParams { top_k, top_p, min_p, ..Default::default() };
            let mut warped = logits.clone();
            warp(&mut warped, &params);
            let (token, log_prob) = choose(&mut logits.clone(), &params, u).expect("finite logits");
            prop_assert!(warped[token as usize] > f32::NEG_INFINITY);
            prop_assert!(log_prob <= 0.0 && log_prob.is_finite());
        }
    }
}
