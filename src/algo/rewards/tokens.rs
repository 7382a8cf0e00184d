//! Rewards for the sampled tokens: their number, and their repetition.

use std::collections::HashSet;

use super::PartReward;
use crate::algo::RangeError;
use crate::settings::declare::section;
use crate::settings::setting::SOME;

section! {
    /// Bounds a completion's length.
    pub struct LengthRule {
        /// Shortest completion, in tokens.
        min: usize = 1;
        /// Longest completion, in tokens.
        max: usize = 2048, SOME;
    }
}

section! {
    /// Penalises completions near the length limit (DAPO).
    pub struct OverlongRule {
        /// Tokens before the limit over which the penalty grows.
        buffer: usize = 64, SOME;
    }
}

section! {
    /// Penalises repetition.
    pub struct RepetitionRule {
        /// Length of a repeated run, in tokens.
        n: usize = 4, SOME;
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{Prompt, Sample};

    /// A prompt of four equal tokens, and these.
    fn sampled(tokens: &[u32]) -> Sample {
        let mut sample = Sample::begin(&Prompt::default(), 0, &[7, 7, 7, 7]);
        tokens.iter().for_each(|token| sample.push(*token, -0.5, 1));
        sample
    }

    #[test]
    fn lengths_are_those_of_sampled_tokens_alone() {
        let fits = length_reward(1, 2).unwrap();
        assert_eq!([0, 1, 2, 3].map(|count| fits(&sampled(&vec![1; count]))), [Ok(0.0), Ok(1.0), Ok(1.0), Ok(0.0)]);
    }

    #[test]
    fn the_overlong_penalty_grows_over_the_buffer_and_stays_at_the_end() {
        let penalty = overlong_reward(20, 100).unwrap();
        let penalties = [0, 80, 81, 90, 100, 101, 500].map(|count| penalty(&sampled(&vec![1; count])).unwrap());
        assert_eq!(penalties, [0.0, 0.0, -0.05, -0.5, -1.0, -1.0, -1.0]);
    }

    #[test]
    fn repetition_is_the_share_of_sampled_runs_that_were_there_before() {
        let penalty = |tokens: &[u32], n| repetition_reward(n).unwrap()(&sampled(tokens)).unwrap();
        assert_eq!((penalty(&[1, 2, 3], 2), penalty(&[1, 2, 1, 2, 1], 2), penalty(&[1; 100], 1)), (0.0, -0.5, -0.99));
        assert_eq!((penalty(&[1, 1], 3), penalty(&[], 1), penalty(&[1, 2, 1, 2], 1)), (0.0, 0.0, -0.5));
    }

    #[test]
    fn bounds_that_make_no_sense_are_refused() {
        assert!(length_reward(3, 2).is_err() && length_reward(0, 0).is_err());
        assert!(overlong_reward(5, 4).is_err() && overlong_reward(0, 4).is_err() && repetition_reward(0).is_err());
    }
}
