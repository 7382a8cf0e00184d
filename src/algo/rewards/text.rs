//! Rewards for the form of a completion: tagged sections, words, a pattern.

use super::{PartReward, reference_answer};
use crate::algo::RangeError;

/// 1 if the completion is `<tag>…</tag>` for each tag in order, each once, with only white space
/// around them; else 0. With the tags `think` and `answer` it is the format reward of DeepSeek-R1.
pub fn format_reward(tags: &[impl AsRef<str>]) -> Result<PartReward, RangeError> {
    let is_name = |tag: &str| !tag.is_empty() && tag.chars().all(|c| c.is_alphanumeric() || matches!(c, '-' | '_'));
    let tags: Vec<&str> = tags.iter().map(AsRef::as_ref).collect();
    let invalid = if tags.is_empty() { Some(&"") } else { tags.iter().find(|tag| !is_name(tag)) };
    if let Some(tag) = invalid {
        let problem = format!("format tags must be given, and be names of letters, digits, `-` and `_`; {tag:?} is none");
        return Err(RangeError::new(problem));
    }
    let brackets: Vec<(String, String)> = tags.iter().map(|tag| (format!("<{tag}>"), format!("</{tag}>"))).collect();
    Ok(Box::new(move |sample| Ok(f64::from(consists_of(sample.last_turn(), &brackets)))))
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
        let response = sample.last_turn().to_lowercase();
        Ok(words.iter().filter(|word| response.contains(word.as_str())).count() as f64 / words.len() as f64)
    }))
}

/// 1 if the pattern matches and its first group, if it has one, equals the reference answer; else 0.
/// Takes time linear in the completion, whatever the pattern.
pub fn regex_reward(pattern: &str) -> Result<PartReward, RangeError> {
    let pattern = regex::Regex::new(pattern).map_err(RangeError::new)?;
    Ok(Box::new(move |sample| match pattern.captures(sample.last_turn()).map(|found| found.get(1)) {
        Some(Some(group)) => Ok(f64::from(group.as_str() == reference_answer(sample)?)),
        found => Ok(f64::from(found.is_some())),
    }))
}
