//! Reward for completions that consist of tagged sections.

use super::rule::{PartReward, RuleError};
use crate::settings::declare::section;
use crate::settings::setting::Limit;

const TAGS: Limit<Vec<String>> =
    Limit { text: "names of letters, digits, `-` and `_`, at least one", holds: |tags| Sections::new(tags).is_ok() };

section! {
    /// Requires tagged sections.
    pub struct FormatRule {
        /// Names of the tags, in order.
        tags: Vec<String> = vec!["think".to_owned(), "answer".to_owned()], TAGS;
    }
}

impl FormatRule {
    /// Builds the reward: 1 if the completion is `<tag>…</tag>` for each tag in order, each once,
    /// and nothing else; else 0. The default is the format reward of DeepSeek-R1.
    pub fn reward(&self) -> Result<PartReward, RuleError> {
        let sections = Sections::new(&self.tags)?;
        Ok(Box::new(move |sample| Ok(f64::from(sections.match_all(&sample.response)))))
    }
}

/// The opening and closing tags of the sections.
struct Sections(Vec<(String, String)>);

impl Sections {
    fn new(tags: &[String]) -> Result<Self, RuleError> {
        let is_name = |tag: &String| !tag.is_empty() && tag.chars().all(|c| c.is_alphanumeric() || matches!(c, '-' | '_'));
        let invalid = if tags.is_empty() { Some("") } else { tags.iter().find(|tag| !is_name(tag)).map(String::as_str) };
        match invalid {
            Some(tag) => Err(RuleError::new(format!(
                "format tags must be given, and be names of letters, digits, `-` and `_`; {tag:?} is none"
            ))),
            None => Ok(Sections(tags.iter().map(|tag| (format!("<{tag}>"), format!("</{tag}>"))).collect())),
        }
    }

    /// Returns true if `response` is the sections in order, with only white space around them.
    fn match_all(&self, response: &str) -> bool {
        let mut rest = response.trim();
        for (open, close) in &self.0 {
            let Some((inside, after)) = rest.strip_prefix(open.as_str()).and_then(|rest| rest.split_once(close.as_str())) else {
                return false;
            };
            if self.0.iter().any(|(open, close)| inside.contains(open.as_str()) || inside.contains(close.as_str())) {
                return false;
            }
            rest = after.trim_start();
        }
        rest.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_form_is_kept_to_the_letter() {
        let tags = |tags: &[&str]| tags.iter().map(|&tag| tag.to_owned()).collect::<Vec<_>>();
        let sections = Sections::new(&tags(&["think", "answer"])).unwrap();
        for kept in ["<think>a</think><answer>b</answer>", "\n<think>a <b> c</think>\n\n<answer></answer> "] {
            assert!(sections.match_all(kept), "{kept}");
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
            assert!(!sections.match_all(broken), "{broken}");
        }
        assert!(Sections::new(&[]).is_err() && Sections::new(&tags(&["a b"])).is_err());
    }
}
