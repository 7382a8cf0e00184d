//! Reward for words in the completion.

use super::rule::{PartReward, RuleError};
use crate::settings::declare::section;
use crate::settings::setting::Limit;

const WORDS: Limit<Vec<String>> = Limit { text: "words, at least one and none empty", holds: |words| are_valid(words) };

section! {
    /// Looks for words.
    pub struct KeywordsRule {
        /// The words.
        words: Vec<String> = Vec::new(), WORDS;
    }
}

fn are_valid(words: &[String]) -> bool {
    !words.is_empty() && words.iter().all(|word| !word.is_empty())
}

impl KeywordsRule {
    /// Builds the reward: the share of the words that the completion contains, in any case.
    pub fn reward(&self) -> Result<PartReward, RuleError> {
        if !are_valid(&self.words) {
            return Err(RuleError::new("keywords must be given, and none may be empty"));
        }
        let words: Vec<String> = self.words.iter().map(|word| word.to_lowercase()).collect();
        Ok(Box::new(move |sample| {
            let response = sample.response.to_lowercase();
            Ok(words.iter().filter(|word| response.contains(word.as_str())).count() as f64 / words.len() as f64)
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::Sample;

    #[test]
    fn the_share_of_words_counts_in_any_case() {
        let rule = |words: &[&str]| KeywordsRule { words: words.iter().map(|&word| word.to_owned()).collect() };
        let sample = Sample { response: "Therefore it is so.".into(), ..Sample::default() };
        assert_eq!(rule(&["therefore", "Because"]).reward().unwrap()(&sample), Ok(0.5));
        assert!(rule(&[]).reward().is_err() && rule(&["a", ""]).reward().is_err());
    }
}
