//! Final answers of mathematical problems: extraction from a completion, and comparison with the
//! reference answer.
//!
//! ```
//! use math_answers::{equivalent, judge};
//!
//! let judgement = judge(r"Half of it: \boxed{\frac{\sqrt 2}{2}}.", "1/sqrt(2)");
//! assert!(judgement.correct && judgement.found == Some(r"\frac{\sqrt 2}{2}"));
//! assert!(equivalent(r"x \le 3", r"(-\infty, 3]") && !equivalent("(1, 2)", "(2, 1)"));
//! ```
//!
//! Two answers are compared in this order, up to the first step that can decide:
//!
//! 1. As text, without blanks, dollars and a final full stop; words also without case and fonts.
//! 2. By their meaning: values, lists and sets, tuples, intervals (also written as inequalities),
//!    equations, matrices. LaTeX and plain text are equal; units and thousands separators are ignored,
//!    and labels (`x =`) unless both answers have them. An unmarked comma before three digits is read
//!    both ways.
//! 3. Rational values are compared exactly; a number with a decimal point stands for all numbers that
//!    round to it at six decimals. Other formulas are equal if they agree at fixed points over the
//!    complex numbers.
//!
//! These are the rules of common graders: extraction and normalisation of Hendrycks' MATH `is_equiv`
//! and of Minerva, tolerance and percent of Math-Verify, intervals and sets of PRM800K's grader.
//! `tests/cases/cases.tsv` has a case, with its reason, for each.
//!
//! Completions may be hostile. Every comparison has a budget of [`MOST_WORK`] steps, which are taken
//! before they are done. Answers longer than [`LONGEST`] bytes, numbers of more than 300 digits and
//! nesting beyond a fixed depth are compared as text only. No text causes a panic.

mod compare;
mod exact;
mod expression;
mod extract;
mod lexer;
mod number;
mod parser;
mod reader;
mod sampled;
mod token;
mod unit;
mod work;

use compare::same;
use expression::{Answer, Reading};
use extract::{Marked, is_solution, last_number, marked};
use lexer::Commas;
use reader::read;
use work::Work;

pub use extract::extract_answer;
pub use number::parse_number;
pub use work::MOST_WORK;

/// Longest answer, in bytes, that is compared by its meaning.
pub const LONGEST: usize = 1024;

/// Comparison of a completion with the reference answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Judgement<'a> {
    /// Final answer of the completion.
    pub found: Option<&'a str>,
    /// True if it equals the reference answer.
    pub correct: bool,
    /// Steps taken to compare the answers, in addition to a few passes over the text.
    pub work: u64,
}

/// Returns true if the completion's final answer equals the reference answer, which may be a whole
/// solution.
///
/// ```
/// use math_answers::is_correct;
///
/// assert!(is_correct(r"Hence $x = \boxed{\dfrac{1}{2}}$.", "0.5"));
/// assert!(is_correct("She pays $1,200.", "#### 1200"));
/// assert!(!is_correct("7 or 8", "7"));
/// ```
pub fn is_correct(response: &str, answer: &str) -> bool {
    judge(response, answer).correct
}

/// Compares a completion with the reference answer, as [`is_correct`] does, and returns details.
///
/// If no answer is marked, the whole completion may be the answer, or else its last number.
pub fn judge<'a>(response: &'a str, answer: &str) -> Judgement<'a> {
    let mut work = Work::default();
    let expected = Some(answer).filter(|answer| is_solution(answer)).and_then(extract_answer).unwrap_or(answer);
    let (whole, found) = match marked(response) {
        Marked::Is(found) => (None, Some(found)),
        Marked::Empty => (None, None),
        Marked::Not => (Some(response.trim()).filter(|whole| whole.len() <= LONGEST), last_number(response)),
    };
    let right = [whole, found].into_iter().flatten().find(|found| agree(found, expected, &mut work));
    Judgement { found: right.or(found), correct: right.is_some(), work: work.spent }
}

/// Returns true if two answers are equal. Neither is searched for a final answer.
pub fn equivalent(a: &str, b: &str) -> bool {
    agree(a, b, &mut Work::default())
}

fn agree(a: &str, b: &str, work: &mut Work) -> bool {
    let (a, b) = (bare(a), bare(b));
    if a.is_empty() || b.is_empty() {
        return false;
    }
    if without_blanks(a) == without_blanks(b) || without_fonts(a).zip(without_fonts(b)).is_some_and(|(a, b)| a == b) {
        return true;
    }
    if a.len() > LONGEST || b.len() > LONGEST {
        return false;
    }
    if let (Some(a), Some(b)) = (words(a), words(b)) {
        // Up to two letters may be a product, xy.
        if a == b || a.len().min(b.len()) > 2 {
            return a == b;
        }
    }
    let others = readings(b, work);
    readings(a, work).iter().any(|a| others.iter().any(|b| same(a, b, work)))
}

/// Strips the characters around an answer in a sentence.
fn bare(text: &str) -> &str {
    let around = |c: char| c.is_whitespace() || c == '$';
    text.trim_matches(around).trim_end_matches('.').trim_end_matches(around)
}

/// Removes blanks, except one between two words or numbers: 7 8 is not 78.
fn without_blanks(text: &str) -> String {
    let mut joined = String::with_capacity(text.len());
    for word in text.split_whitespace() {
        if joined.ends_with(char::is_alphanumeric) && word.starts_with(char::is_alphanumeric) {
            joined.push(' ');
        }
        joined.push_str(word);
    }
    joined
}

/// Removes font commands of a short text; none if it has other LaTeX.
fn without_fonts(text: &str) -> Option<String> {
    const FONTS: [&str; 8] =
        ["\\textbf{", "\\textit{", "\\textrm{", "\\text{", "\\mbox{", "\\mathrm{", "\\mathbf{", "\\operatorname{"];
    if text.len() > LONGEST {
        return None;
    }
    let plain = FONTS.iter().fold(text.to_owned(), |text, font| text.replace(font, ""));
    (!plain.contains(['\\', '{', '^', '_'])).then(|| without_blanks(&plain.replace('}', "")))
}

/// Returns a text in lower case if it consists of words alone.
fn words(text: &str) -> Option<String> {
    let text = without_fonts(text)?;
    let text = text.trim_matches([' ', '(', ')', '.', ':', ';', '\'', '"', '*']);
    let only_words = !text.is_empty() && text.chars().all(|c| c.is_alphabetic() || c.is_whitespace());
    only_words.then(|| text.to_lowercase().split_whitespace().collect::<Vec<_>>().join(" "))
}

/// Returns all readings of a text.
fn readings(text: &str, work: &mut Work) -> Vec<Reading> {
    // `y = 2x` is a formula with its label, and a line.
    let (commas, labels) = (text.contains(','), text.contains('='));
    let ways = [(Commas::Thousands, false), (Commas::Separators, false), (Commas::Thousands, true), (Commas::Separators, true)];
    let ways = ways.into_iter().filter(|(how, labelled)| (commas || *how == Commas::Thousands) && (labels || !labelled));
    let mut readings: Vec<Reading> = ways.filter_map(|(how, labelled)| read(text, how, labelled, work)).collect();
    readings.dedup();
    readings
}

/// Returns true if a text is an answer other than words.
fn readable(text: &str) -> bool {
    text.len() <= LONGEST && readings(text, &mut Work::default()).iter().any(|of| !matches!(of.answer, Answer::Words(_)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_judgement_says_what_it_found() {
        let judgement = judge("so \\boxed{2^{10}}", "1024");
        assert_eq!((judgement.found, judgement.correct), (Some("2^{10}"), true));
        assert_eq!(judge("3 or 4?", "5").found, Some("4"));
        assert_eq!(judge("x + 1", "1 + x").found, Some("x + 1"));
        assert_eq!(judge("nothing", "5").found, None);
    }
}
