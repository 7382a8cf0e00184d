//! Extraction of the final answer from a solution, in a few passes over the text.

use std::ops::Range;

use crate::number::parse_number;
use crate::work::Work;
use crate::{LONGEST, agree, readable};

/// Extracts the final answer: inside the last `\boxed{}`, or after the last `####` if that stands
/// later; else after the last `answer is` or `answer:`, if an answer follows; else the last number.
/// A line after `####` without a readable answer, such as a heading, counts only if nothing else is
/// marked.
/// Boxes with nothing but commas, `and` or `or` between them are one answer, with their commands.
pub fn extract_answer(text: &str) -> Option<&str> {
    match marked(text) {
        Marked::Is(answer) => Some(answer),
        Marked::Empty => None,
        Marked::Not => last_number(text),
    }
}

/// Marked answer of a solution.
pub(crate) enum Marked<'a> {
    /// The answer.
    Is(&'a str),
    /// A mark without an answer.
    Empty,
    /// No mark.
    Not,
}

/// Finds the marked answer.
pub(crate) fn marked(text: &str) -> Marked<'_> {
    let boxed = boxed(text);
    let line = text.rsplit_once("####").map(|(before, after)| (before.len(), after.lines().next().unwrap_or_default().trim()));
    let is_answer = |(at, line): &(usize, &str)| boxed.is_none_or(|(start, _)| start < *at) && readable(line);
    let answer = line.filter(is_answer).or(boxed).map(|(_, answer)| answer).or_else(|| announced(text));
    match answer.or(line.map(|(_, line)| line)) {
        Some("") => Marked::Empty,
        Some(answer) => Marked::Is(answer),
        None => Marked::Not,
    }
}

/// Returns true if a reference answer is a whole solution with a marked answer.
pub(crate) fn is_solution(text: &str) -> bool {
    text.contains("####") || text.contains("\\boxed") || text.contains("\\fbox")
}

/// Finds the start of the last box and its answer, together with the boxes before it that have
/// other answers and only separators between them.
fn boxed(text: &str) -> Option<(usize, &str)> {
    let (last, answer) = last_box(text)?;
    // A longer answer would not be read.
    let from = text.floor_char_boundary(last.end.saturating_sub(LONGEST));
    let (mut start, mut work) = (last.start, Work::default());
    while let Some((other, inside)) = text.get(from..start).and_then(last_box) {
        if !separates(&text[from + other.end..start]) || agree(inside, answer, &mut work) {
            break;
        }
        start = from + other.start;
    }
    Some((last.start, if start < last.start { &text[start..last.end] } else { answer }))
}

/// Returns true if a text consists of commas, `and` and `or`.
fn separates(text: &str) -> bool {
    let blank = |c: char| c.is_whitespace() || c == '$';
    let mut words = text.split(|c| blank(c) || c == ',').filter(|word| !word.is_empty());
    text.contains(|c| !blank(c)) && words.all(|word| matches!(word, "and" | "or"))
}

/// Finds the last `\boxed{…}` or `\fbox{…}` and its inside; `\boxed 5` extends to the next blank. A box
/// that is never closed was truncated and does not count.
fn last_box(text: &str) -> Option<(Range<usize>, &str)> {
    let command = |name: &str| text.rfind(name).map(|at| (at, at + name.len()));
    let (start, after) = command("\\boxed").max(command("\\fbox"))?;
    let rest = text[after..].trim_start();
    let Some(inside) = rest.strip_prefix('{') else {
        let word = rest.split(|c: char| c.is_whitespace() || c == '$').next()?.trim_end_matches(['.', ',']);
        return (!word.is_empty()).then(|| (start..text.len() - rest.len() + word.len(), word));
    };
    let (mut depth, mut escaped) = (1, false);
    for (at, c) in inside.char_indices() {
        if escaped || c == '\\' {
            escaped = !escaped;
            continue;
        }
        depth += match c {
            '{' => 1,
            '}' => -1,
            _ => 0,
        };
        if depth == 0 {
            return Some((start..text.len() - inside.len() + at + 1, inside[..at].trim()));
        }
    }
    None
}

/// Finds the rest of the sentence after the last `answer is` or `answer:`, if it is an answer.
fn announced(text: &str) -> Option<&str> {
    const TRIES: usize = 4;
    let lower = text.to_ascii_lowercase();
    let mut before = lower.as_str();
    for _ in 0..TRIES {
        let at = before.rfind("answer")?;
        before = &before[..at];
        let rest = text[at + "answer".len()..].trim_start_matches(['*', ' ']);
        let rest = rest.strip_prefix("is").or_else(|| rest.strip_prefix("Is")).or_else(|| rest.strip_prefix(':'));
        if let Some(answer) = rest.map(sentence).filter(|answer| readable(answer)) {
            return Some(answer);
        }
    }
    None
}

/// Returns the first formula between dollars, or the text up to the end of the line or sentence.
fn sentence(rest: &str) -> &str {
    let rest = rest.trim_start_matches([' ', ':', '*', '\n']);
    let formulas = [("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")];
    let within = formulas.iter().find_map(|(open, close)| rest.strip_prefix(open)?.split_once(close)).map(|(within, _)| within);
    if let Some(within) = within.filter(|within| !within.trim().is_empty()) {
        return within.trim();
    }
    let line = rest.lines().next().unwrap_or_default();
    let line = line.split_once(". ").map_or(line, |(sentence, _)| sentence);
    // `!` ends a sentence at the end of the line and before a capital letter. Elsewhere it is a factorial.
    let exclaimed = line.match_indices("! ").find(|(at, _)| line[at + 2..].starts_with(char::is_uppercase));
    let line = exclaimed.map_or(line, |(at, _)| &line[..=at]).trim().trim_end_matches(['*', ' ']);
    let line = line.strip_suffix('!').unwrap_or(line).trim_end_matches(['.', '*', ' ']);
    if line.len() > LONGEST { "" } else { line }
}

/// Finds the last number.
pub(crate) fn last_number(text: &str) -> Option<&str> {
    let part = |c: char| c.is_ascii_digit() || matches!(c, '.' | ',' | '/' | '-');
    let runs = text.split(|c: char| !part(c)).map(|run| run.trim_end_matches(['.', ',', '/', '-']));
    runs.map(|run| run.trim_start_matches(['.', ',', '/'])).rfind(|run| parse_number(run).is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_answer_is_marked_boxed_announced_or_last() {
        assert_eq!(extract_answer("so 3 + 4\n#### 7\nbye 8"), Some("7"));
        assert_eq!(extract_answer("\\boxed{1} then \\boxed{\\frac{1}{2}} or 9"), Some("\\frac{1}{2}"));
        assert_eq!(extract_answer("\\boxed{\\left\\{1, 2\\right\\}}, 3"), Some("\\left\\{1, 2\\right\\}"));
        assert_eq!(extract_answer("\\fbox{4} 5"), Some("4"));
        assert_eq!(extract_answer("$\\boxed{4}$, and $\\boxed 5$."), Some("\\boxed{4}$, and $\\boxed 5"));
        assert_eq!(extract_answer("hence $\\boxed 5$."), Some("5"));
        assert_eq!(extract_answer("\\boxed{12"), Some("12"), "a box that was cut off marks nothing");
        assert_eq!(extract_answer("The answer is $x = 3$, not 4."), Some("x = 3"));
        assert_eq!(extract_answer("**Answer:** 3/4\nThat took 5 steps."), Some("3/4"));
        assert_eq!(extract_answer("So the answer is **42**! It took 6 steps."), Some("42"));
        assert_eq!(extract_answer("The answer is 5! = 120."), Some("5! = 120"));
        assert_eq!(extract_answer("The answer is what we sought: 6"), Some("6"), "words are no answer");
        assert_eq!(extract_answer("It costs $1,200.50. Really"), Some("1,200.50"));
        assert_eq!(extract_answer("from 3-4 to -12, done"), Some("-12"));
        assert_eq!((extract_answer("no idea"), extract_answer("5 ####")), (None, None));
    }
}
