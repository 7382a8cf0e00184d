//! Rewards for the number of sampled tokens.

use super::rule::{PartReward, RuleError};
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

impl LengthRule {
    /// Builds the reward: 1 if from `min` to `max` tokens were sampled, else 0.
    pub fn reward(&self) -> Result<PartReward, RuleError> {
        let LengthRule { min, max } = *self;
        if max == 0 || min > max {
            return Err(RuleError::new(format!("length bounds {min}..={max} are empty; give min ≤ max and max ≥ 1")));
        }
        Ok(Box::new(move |sample| Ok(f64::from((min..=max).contains(&sample.generated())))))
    }
}

impl OverlongRule {
    /// Builds the reward: `overlong_penalty` of the sampled tokens, of which there are at most
    /// `max`.
    pub fn reward(&self, max: usize) -> Result<PartReward, RuleError> {
        let buffer = self.buffer;
        if buffer == 0 || buffer > max {
            return Err(RuleError::new(format!(
                "an overlong buffer of {buffer} tokens does not fit before the limit of {max}; give 1 ≤ buffer ≤ max"
            )));
        }
        Ok(Box::new(move |sample| Ok(overlong_penalty(sample.generated(), max, buffer))))
    }
}

/// Soft overlong punishment of DAPO (arXiv:2503.14476, equation 13), for `length` tokens.
///
/// 0 up to `max − buffer`, then `((max − buffer) − length) / buffer`, down to −1 at `max` and
/// beyond. `buffer` is from 1 to `max`.
fn overlong_penalty(length: usize, max: usize, buffer: usize) -> f64 {
    let over = length.saturating_sub(max.saturating_sub(buffer));
    if length > max { -1.0 } else { -(over as f64) / (buffer.max(1) as f64) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{Prompt, Sample};

    fn sampled(tokens: &[u32]) -> Sample {
        let mut sample = Sample::begin(&Prompt::default(), 0, &[7, 7, 7, 7]);
        tokens.iter().for_each(|token| sample.push(*token, -0.5, 1));
        sample
    }

    #[test]
    fn the_overlong_penalty_grows_over_the_buffer_and_stays_at_the_end() {
        let penalties = [0, 80, 81, 90, 100, 101, usize::MAX].map(|length| overlong_penalty(length, 100, 20));
        assert_eq!(penalties, [0.0, 0.0, -0.05, -0.5, -1.0, -1.0, -1.0]);
    }

    #[test]
    fn lengths_are_those_of_sampled_tokens_alone() {
        let fits = LengthRule { min: 1, max: 2 }.reward().unwrap();
        let earned = [&[][..], &[1], &[1, 2], &[1, 2, 3]].map(|tokens| fits(&sampled(tokens)));
        assert_eq!(earned, [Ok(0.0), Ok(1.0), Ok(1.0), Ok(0.0)]);
        assert_eq!(OverlongRule { buffer: 2 }.reward(4).unwrap()(&sampled(&[1, 2, 3])), Ok(-0.5));
    }

    #[test]
    fn bounds_that_make_no_sense_are_refused() {
        assert!(LengthRule { min: 3, max: 2 }.reward().is_err() && LengthRule { min: 0, max: 0 }.reward().is_err());
        assert!(OverlongRule { buffer: 5 }.reward(4).is_err() && OverlongRule { buffer: 0 }.reward(4).is_err());
    }
}
