//! Rewards for the sampled tokens: their number, and their repetition.

use std::collections::HashSet;

use super::PartReward;
use crate::algo::RangeError;

/// 1 if from `min` to `max` tokens were sampled, else 0.
pub fn length_reward(min: usize, max: usize) -> Result<PartReward, RangeError> {
    RangeError::unless_lengths(min, max)?;
    Ok(Box::new(move |sample| Ok(f64::from((min..=max).contains(&sample.generated())))))
}

/// Soft overlong punishment of DAPO (arXiv:2503.14476, equation 13), for completions of at most
/// `max` sampled tokens.
///
/// 0 up to `max − buffer` tokens, then `((max − buffer) − tokens) / buffer`, down to −1 at `max` and
/// beyond. `buffer` is from 1 to `max`.
pub fn overlong_reward(buffer: usize, max: usize) -> Result<PartReward, RangeError> {
    if buffer == 0 || buffer > max {
        return Err(RangeError::new(format!(
            "an overlong buffer of {buffer} tokens does not fit before the limit of {max}; give 1 ≤ buffer ≤ max"
        )));
    }
    let over = move |tokens: usize| tokens.min(max).saturating_sub(max - buffer);
    Ok(Box::new(move |sample| Ok(-(over(sample.generated()) as f64) / buffer as f64)))
}

/// N-gram repetition penalty of Yeo et al. (arXiv:2502.03373): `distinct / total − 1` over all runs
/// of `n` sampled tokens, `n` from 1.
///
/// 0 without repetition and for fewer than `n` tokens, near −1 if all runs are equal.
pub fn repetition_reward(n: usize) -> Result<PartReward, RangeError> {
    if n == 0 {
        return Err(RangeError::new("runs of 0 tokens do not repeat; give n of 1 or more"));
    }
    Ok(Box::new(move |sample| {
        let tokens = sample.tokens.iter().zip(sample.versions.per_token());
        let sampled: Vec<u32> = tokens.filter(|(_, version)| version.is_some()).map(|(token, _)| *token).collect();
        let (runs, distinct) = (sampled.windows(n), sampled.windows(n).collect::<HashSet<_>>());
        Ok(if distinct.is_empty() { 0.0 } else { distinct.len() as f64 / runs.len() as f64 - 1.0 })
    }))
}
