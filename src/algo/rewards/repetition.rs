//! Penalty on repeated runs of tokens.

use std::collections::HashSet;
use std::hash::Hash;

use super::rule::{PartReward, RuleError};
use crate::settings::declare::section;
use crate::settings::setting::SOME;

section! {
    /// Penalises repetition.
    pub struct RepetitionRule {
        /// Length of a repeated run, in tokens.
        n: usize = 4, SOME;
    }
}

impl RepetitionRule {
    /// Builds the reward: `repetition_penalty` of the sampled tokens.
    pub fn reward(&self) -> Result<PartReward, RuleError> {
        let n = self.n;
        if n == 0 {
            return Err(RuleError::new("runs of 0 tokens do not repeat; give n of 1 or more"));
        }
        Ok(Box::new(move |sample| {
            let versions = sample.versions.per_token();
            let sampled: Vec<u32> =
                sample.tokens.iter().zip(versions).filter(|(_, version)| version.is_some()).map(|(token, _)| *token).collect();
            Ok(repetition_penalty(&sampled, n))
        }))
    }
}

/// N-gram repetition penalty of Yeo et al. (arXiv:2502.03373): `distinct / total − 1` over all runs
/// of `n` items.
///
/// 0 without repetition, near −1 if all runs are equal; 0 for fewer than `n` items and for `n` = 0.
fn repetition_penalty<T: Hash + Eq>(items: &[T], n: usize) -> f64 {
    if n == 0 || items.len() < n {
        return 0.0;
    }
    let total = items.len() - n + 1;
    let distinct: HashSet<&[T]> = items.windows(n).collect();
    distinct.len() as f64 / total as f64 - 1.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{Prompt, Sample};

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
    fn only_sampled_tokens_count() {
        let mut sample = Sample::begin(&Prompt::default(), 0, &[7, 7, 7, 7]);
        [1, 2, 1, 2].iter().for_each(|token| sample.push(*token, -0.5, 1));
        assert_eq!(RepetitionRule { n: 1 }.reward().unwrap()(&sample), Ok(-0.5), "and not the prompt's");
        assert!(RepetitionRule { n: 0 }.reward().is_err());
    }
}
