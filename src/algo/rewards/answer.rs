//! Rewards that compare a completion with the reference answer: as text, as a number, or as
//! mathematics.

use super::{PartReward, reference_answer};
use math_answers::{extract_answer, is_correct, parse_number};

/// 1 if the completion's final number is the reference answer up to `tolerance`, else 0.
pub fn numeric_reward(tolerance: f64) -> PartReward {
    Box::new(move |sample| Ok(numeric_match(sample.last_turn(), reference_answer(sample)?, tolerance)))
}

/// [`exact_match`] with the reference answer.
pub fn exact_reward() -> PartReward {
    Box::new(|sample| Ok(exact_match(sample.last_turn(), reference_answer(sample)?)))
}

/// [`is_correct`] with the reference answer.
pub fn math_reward() -> PartReward {
    Box::new(|sample| Ok(f64::from(is_correct(sample.last_turn(), reference_answer(sample)?))))
}

/// Returns 1.0 if the response equals the answer, apart from surrounding white space, else 0.0.
pub fn exact_match(response: &str, answer: &str) -> f64 {
    f64::from(response.trim() == answer.trim())
}

fn numeric_match(response: &str, answer: &str, tolerance: f64) -> f64 {
    let found = extract_answer(response).and_then(parse_number);
    let expected = parse_number(answer).or_else(|| extract_answer(answer).and_then(parse_number));
    f64::from(found.zip(expected).is_some_and(|(found, expected)| (found - expected).abs() <= tolerance))
}
