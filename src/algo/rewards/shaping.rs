//! What is added to a reward for how an answer was given, not for what it says.

use std::collections::HashSet;
use std::hash::Hash;

use super::earned::{ScoreError, finite};
use crate::data::Sample;

/// What `shaping` makes of the sample's reward; a number that is not finite is refused.
///
/// ```
/// use rollflow::algo::rewards::{apply_reward_shaping, overlong_penalty};
/// use rollflow::data::Sample;
///
/// let shaped = apply_reward_shaping(&Sample::default(), 1.0, |sample, base| {
///     base + 0.5 * overlong_penalty(sample.generated(), 1024, 256)
/// });
/// assert_eq!(shaped, Ok(1.0));
/// ```
pub fn apply_reward_shaping(sample: &Sample, base: f64, shaping: impl Fn(&Sample, f64) -> f64) -> Result<f64, ScoreError> {
    finite(sample, shaping(sample, base))
}

/// The soft overlong punishment of DAPO (arXiv:2503.14476, equation 13), for a response of `length` tokens `y`:
///
/// `0` up to `max − buffer`; then `((max − buffer) − |y|) / buffer`, down to −1 at `max`; `−1` above.
///
/// `buffer` is 1 or more and at most `max`.
pub fn overlong_penalty(length: usize, max: usize, buffer: usize) -> f64 {
    let over = length.saturating_sub(max.saturating_sub(buffer));
    if length > max { -1.0 } else { -(over as f64) / (buffer.max(1) as f64) }
}

/// The length reward of Kimi k1.5 (arXiv:2501.12599, section 2.3.3) over a group of answers to one prompt:
///
/// `λ = 0.5 − (length − shortest) / (longest − shortest)` for right ones, `min(0, λ)` for others; 0 for all if all are equally long.
///
/// Shapes: one length and one verdict a sample; as many as the shorter list has.
pub fn length_contrast(lengths: &[usize], right: &[bool]) -> Vec<f64> {
    let shortest = lengths.iter().copied().min().unwrap_or(0);
    let span = lengths.iter().copied().max().unwrap_or(0) - shortest;
    let reward = |(length, right): (&usize, &bool)| match span {
        0 => 0.0,
        span => {
            let lambda = 0.5 - (length - shortest) as f64 / span as f64;
            if *right { lambda } else { lambda.min(0.0) }
        }
    };
    lengths.iter().zip(right).map(reward).collect()
}

/// `distinct / total − 1` of all runs of `n` items in a row, so 0 without repetition and close to −1 where all is one: the n-gram
/// repetition penalty of Yeo et al. (arXiv:2502.03373), for tokens, words or characters. Fewer than `n` items, or `n` = 0, give 0.
pub fn repetition_penalty<T: Hash + Eq>(items: &[T], n: usize) -> f64 {
    if n == 0 || items.len() < n {
        return 0.0;
    }
    let total = items.len() - n + 1;
    let distinct: HashSet<&[T]> = items.windows(n).collect();
    distinct.len() as f64 / total as f64 - 1.0
}

/// `coefficient · mean H_t` over the entropies of a response's tokens, in nats; 0 for none.
pub fn entropy_bonus(entropies: &[f64], coefficient: f64) -> f64 {
    if entropies.is_empty() { 0.0 } else { coefficient * entropies.iter().sum::<f64>() / entropies.len() as f64 }
}

/// `−coefficient · Σ_t (log π(t) − log π_ref(t))` over a response's tokens: the divergence from a reference policy, estimated by k1 and
/// taken off the reward of the whole response. Tokens that one list lacks don't count.
pub fn kl_penalty(log_probs: &[f64], reference: &[f64], coefficient: f64) -> f64 {
    -coefficient * log_probs.iter().zip(reference).map(|(policy, reference)| policy - reference).sum::<f64>()
}

/// The same token by token: `r_t − coefficient · (log π(t) − log π_ref(t))`. Equals `compute_rewards` of verl 0.9.1.
pub fn subtract_kl(rewards: &[f64], log_probs: &[f64], reference: &[f64], coefficient: f64) -> Vec<f64> {
    let ratios = log_probs.iter().zip(reference).map(|(policy, reference)| policy - reference);
    rewards.iter().zip(ratios).map(|(reward, ratio)| reward - coefficient * ratio).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_overlong_penalty_grows_over_the_buffer_and_stays_at_the_end() {
        let penalties = [0, 80, 81, 90, 100, 101, usize::MAX].map(|length| overlong_penalty(length, 100, 20));
        assert_eq!(penalties, [0.0, 0.0, -0.05, -0.5, -1.0, -1.0, -1.0]);
    }

    #[test]
    fn short_answers_earn_more_if_they_are_right_and_no_wrong_one_earns() {
        assert_eq!(length_contrast(&[10, 20, 30, 10], &[true, true, true, false]), [0.5, 0.0, -0.5, 0.0]);
        assert_eq!(length_contrast(&[10, 30], &[true, false]), [0.5, -0.5]);
        assert_eq!(length_contrast(&[9, 9], &[true, false]), [0.0, 0.0]);
        assert_eq!(length_contrast(&[], &[]), [0.0; 0]);
    }

    #[test]
    fn repetition_is_the_share_of_runs_that_were_there_before() {
        assert_eq!(repetition_penalty(&["a", "b", "c"], 2), 0.0);
        assert_eq!(repetition_penalty(&["a", "b", "a", "b", "a"], 2), -0.5);
        assert_eq!(repetition_penalty(&[1; 100], 1), -0.99);
        assert_eq!(
            (repetition_penalty(&[1, 1], 3), repetition_penalty(&[1, 1], 0), repetition_penalty::<u8>(&[], 1)),
            (0.0, 0.0, 0.0)
        );
    }

    #[test]
    fn divergence_costs_and_entropy_pays() {
        assert_eq!(kl_penalty(&[-1.0, -2.0], &[-1.5, -2.5], 0.1), -0.1);
        assert_eq!(subtract_kl(&[0.0, 1.0], &[-1.0, -2.0], &[-1.5, -2.5], 0.5), [-0.25, 0.75]);
        assert_eq!((entropy_bonus(&[1.0, 3.0], 0.5), entropy_bonus(&[], 0.5)), (1.0, 0.0));
    }

    #[test]
    fn a_shaping_without_a_number_names_the_sample() {
        let sample = Sample { group_index: 4, index: 2, ..Sample::default() };
        let error = apply_reward_shaping(&sample, 0.0, |_, base| base / 0.0).unwrap_err();
        assert!(matches!(error, ScoreError::NotFinite { group: 4, sample: 2, .. }));
    }
}
