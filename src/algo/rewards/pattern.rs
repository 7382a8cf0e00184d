//! Reward for a pattern in the completion.

use super::rule::{PartReward, RuleError, reference_answer};
use crate::settings::declare::section;
use crate::settings::setting::Limit;

const PATTERN: Limit<String> = Limit {
    text: "a regular expression in the syntax of Rust's regex crate (no look-around, no back-references)",
    holds: |pattern| !pattern.is_empty() && regex::Regex::new(pattern).is_ok(),
};

section! {
    /// Searches a pattern.
    pub struct RegexRule {
        /// Pattern to search for.
        pattern: String = String::new(), PATTERN;
    }
}

impl RegexRule {
    /// Builds the reward: 1 if the pattern matches and its first group, if it has one, equals the
    /// reference answer; else 0. Takes time linear in the completion, whatever the pattern.
    pub fn reward(&self) -> Result<PartReward, RuleError> {
        let pattern = regex::Regex::new(&self.pattern).map_err(RuleError::new)?;
        Ok(Box::new(move |sample| match pattern.captures(&sample.response).map(|found| found.get(1)) {
            Some(Some(group)) => Ok(f64::from(group.as_str() == reference_answer(sample)?)),
            found => Ok(f64::from(found.is_some())),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{Prompt, Sample};

    #[test]
    fn a_group_is_compared_with_the_answer_and_a_pattern_without_one_only_matches() {
        let reward = |pattern: &str| RegexRule { pattern: pattern.to_owned() }.reward();
        let mut prompt = Prompt::from("3+2=");
        prompt.metadata.insert("answer".into(), "5".into());
        let sample = |response: &str| Sample { response: response.to_owned(), ..Sample::begin(&prompt, 0, &[1]) };
        let boxed = reward(r"\\boxed\{(.+)\}").unwrap();
        let earned = [r"so \boxed{5}", r"so \boxed{6}", "5"].map(|response| boxed(&sample(response)));
        assert_eq!(earned, [Ok(1.0), Ok(0.0), Ok(0.0)]);
        let plain = reward(r"^<think>.*</think>").unwrap();
        assert_eq!((plain(&sample("<think>a</think>b")), plain(&sample("a"))), (Ok(1.0), Ok(0.0)));
        assert!(boxed(&Sample { response: r"\boxed{5}".to_owned(), ..Sample::default() }).is_err(), "no answer to compare");
        assert!(reward("(").is_err());
    }
}
