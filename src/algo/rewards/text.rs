//! Rewards for the form of a completion: tagged sections, words, a pattern.

use super::{PartReward, reference_answer};
use crate::algo::RangeError;
use crate::settings::declare::section;
use crate::settings::setting::Limit;

const TAGS: Limit<Vec<String>> =
    Limit { text: "names of letters, digits, `-` and `_`, at least one", holds: |tags| brackets(tags).is_ok() };
const WORDS: Limit<Vec<String>> =
    Limit { text: "words, at least one and none empty", holds: |words| keywords_reward(words).is_ok() };
const PATTERN: Limit<String> = Limit {
    text: "a regular expression in the syntax of Rust's regex crate (no look-around, no back-references)",
    holds: |pattern| !pattern.is_empty() && regex::Regex::new(pattern).is_ok(),
};

section! {
    /// Requires tagged sections.
    pub struct FormatRule {
        /// Names of the tags, in order.
        tags: Vec<String> = vec!["think".to_owned(), "answer".to_owned()], TAGS;
    }
}

section! {
    /// Looks for words.
    pub struct KeywordsRule {
        /// The words.
        words: Vec<String> = Vec::new(), WORDS;
    }
}

section! {
    /// Searches a pattern.
    pub struct RegexRule {
        /// Pattern to search for.
        pattern: String = String::new(), PATTERN;
    }
}

/// 1 if the completion is `<tag>…</tag>` for each tag in order, each once, with only white space
/// around them; else 0. With the tags `think` and `answer` it is the format reward of DeepSeek-R1.
pub fn format_reward(tags: &[impl AsRef<str>]) -> Result<PartReward, RangeError> {
    let brackets = brackets(tags)?;
    Ok(Box::new(move |sample| Ok(f64::from(consists_of(&sample.response, &brackets)))))
}

/// The opening and closing tags.
fn brackets(tags: &[impl AsRef<str>]) -> Result<Vec<(String, String)>, RangeError> {
    let is_name = |tag: &str| !tag.is_empty() && tag.chars().all(|c| c.is_alphanumeric() || matches!(c, '-' | '_'));
    let tags: Vec<&str> = tags.iter().map(AsRef::as_ref).collect();
    let invalid = if tags.is_empty() { Some(&"") } else { tags.iter().find(|tag| !is_name(tag)) };
    match invalid {
        Some(tag) => Err(RangeError::new(format!(
            "format tags must be given, and be names of letters, digits, `-` and `_`; {tag:?} is none"
        ))),
        None => Ok(tags.iter().map(|tag| (format!("<{tag}>"), format!("</{tag}>"))).collect()),
    }
}

fn consists_of(response: &str, brackets: &[(String, String)]) -> bool {
    let mut rest = response.trim();
    for (open, close) in brackets {
        let Some((inside, after)) = rest.strip_prefix(open.as_str()).and_then(|rest| rest.split_once(close.as_str())) else {
            return false;
        };
        if brackets.iter().any(|(open, close)| inside.contains(open.as_str()) || inside.contains(close.as_str())) {
            return false;
        }
        rest = after.trim_start();
    }
    rest.is_empty()
}

/// Share of the words that the completion contains, in any case.
pub fn keywords_reward(words: &[impl AsRef<str>]) -> Result<PartReward, RangeError> {
    let words: Vec<String> = words.iter().map(|word| word.as_ref().to_lowercase()).collect();
    if words.is_empty() || words.iter().any(String::is_empty) {
        return Err(RangeError::new("keywords must be given, and none may be empty"));
    }
    Ok(Box::new(move |sample| {
        let response = sample.response.to_lowercase();
        Ok(words.iter().filter(|word| response.contains(word.as_str())).count() as f64 / words.len() as f64)
    }))
}

/// 1 if the pattern matches and its first group, if it has one, equals the reference answer; else 0.
/// Takes time linear in the completion, whatever the pattern.
pub fn regex_reward(pattern: &str) -> Result<PartReward, RangeError> {
    let pattern = regex::Regex::new(pattern).map_err(RangeError::new)?;
    Ok(Box::new(move |sample| match pattern.captures(&sample.response).map(|found| found.get(1)) {
        Some(Some(group)) => Ok(f64::from(group.as_str() == reference_answer(sample)?)),
        found => Ok(f64::from(found.is_some())),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{Prompt, Sample};

    #[test]
    fn a_form_is_kept_to_the_letter() {
        let reward = format_reward(&["think", "answer"]).unwrap();
        let earned = |response: &str| reward(&Sample { response: response.to_owned(), ..Sample::default() });
        for kept in ["<think>a</think><answer>b</answer>", "\n<think>a <b> c</think>\n\n<answer></answer> "] {
            assert_eq!(earned(kept), Ok(1.0), "{kept}");
        }
        for broken in [
            "",
            "<think>a</think>",
            "<answer>b</answer><think>a</think>",
            "x<think>a</think><answer>b</answer>",
            "<think>a</think> so <answer>b</answer>",
            "<think>a</think><answer>b</answer>.",
            "<think>a<think>b</think><answer>c</answer>",
            "<think>a</think><answer>b</answer><answer>c</answer>",
            "<think>a<answer>b</think><answer>c</answer>",
            "<think>a</think><answer>b",
        ] {
            assert_eq!(earned(broken), Ok(0.0), "{broken}");
        }
        assert!(format_reward(&[""; 0]).is_err() && format_reward(&["a b"]).is_err());
    }

    #[test]
    fn the_share_of_words_counts_in_any_case() {
        let sample = Sample { response: "Therefore it is so.".into(), ..Sample::default() };
        assert_eq!(keywords_reward(&["therefore", "Because"]).unwrap()(&sample), Ok(0.5));
        assert!(keywords_reward(&[""; 0]).is_err() && keywords_reward(&["a", ""]).is_err());
    }

    #[test]
    fn a_group_is_compared_with_the_answer_and_a_pattern_without_one_only_matches() {
        let mut prompt = Prompt::from("3+2=");
        prompt.metadata.insert("answer".into(), "5".into());
        let sample = |response: &str| Sample { response: response.to_owned(), ..Sample::begin(&prompt, 0, &[1]) };
        let boxed = regex_reward(r"\\boxed\{(.+)\}").unwrap();
        let earned = [r"so \boxed{5}", r"so \boxed{6}", "5"].map(|response| boxed(&sample(response)));
        assert_eq!(earned, [Ok(1.0), Ok(0.0), Ok(0.0)]);
        let plain = regex_reward(r"^<think>.*</think>").unwrap();
        assert_eq!((plain(&sample("<think>a</think>b")), plain(&sample("a"))), (Ok(1.0), Ok(0.0)));
        assert!(boxed(&Sample { response: r"\boxed{5}".to_owned(), ..Sample::default() }).is_err(), "no answer to compare");
        assert!(regex_reward("(").is_err());
    }
}
