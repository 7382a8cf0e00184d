//! Comparing a response with what was sought: 1 or 0.

use regex::Regex;

use crate::algo::answers::{extract_answer, parse_number};
use crate::data::Sample;

/// 1.0 iff the sample's metadata says `"correct": true`.
pub fn compute_reward(sample: &Sample) -> f64 {
    f64::from(sample.metadata.get("correct") == Some(&serde_json::Value::Bool(true)))
}

/// 1.0 iff the response is the answer, surrounding white space aside.
pub fn exact_match(response: &str, answer: &str) -> f64 {
    f64::from(response.trim() == answer.trim())
}

/// 1.0 iff the response's final answer is a number within `tolerance` of the expected one.
pub fn numeric_match(response: &str, answer: &str, tolerance: f64) -> f64 {
    let found = extract_answer(response).and_then(parse_number);
    let expected = parse_number(answer).or_else(|| extract_answer(answer).and_then(parse_number));
    f64::from(found.zip(expected).is_some_and(|(found, expected)| (found - expected).abs() <= tolerance))
}

/// 1.0 iff the pattern matches anywhere in the response.
pub fn regex_match(response: &str, pattern: &Regex) -> f64 {
    f64::from(pattern.is_match(response))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_true_flag_earns() {
        let sample =
            |metadata: serde_json::Value| Sample { metadata: metadata.as_object().unwrap().clone(), ..Sample::default() };
        assert_eq!(compute_reward(&sample(serde_json::json!({"correct": true}))), 1.0);
        for other in [serde_json::json!({"correct": false}), serde_json::json!({"correct": 1}), serde_json::json!({})] {
            assert_eq!(compute_reward(&sample(other)), 0.0);
        }
    }

    #[test]
    fn text_numbers_and_patterns_match() {
        assert_eq!((exact_match(" 12\n", "12"), exact_match("12.0", "12")), (1.0, 0.0));
        assert_eq!(
            (numeric_match("so 12.04", "12", 0.05), numeric_match("so 12.06", "12", 0.05), numeric_match("?", "12", 1.0)),
            (1.0, 0.0, 0.0)
        );
        let pattern = Regex::new(r"^<think>.*</think>").unwrap();
        assert_eq!((regex_match("<think>a</think>b", &pattern), regex_match("a", &pattern)), (1.0, 0.0));
    }
}
