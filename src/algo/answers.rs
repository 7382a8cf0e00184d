//! Finding the final answer in a solution and comparing numbers as a reader would.

/// The final answer: after the last `####`, else inside the last `\boxed{}`, else the last number.
pub fn extract_answer(text: &str) -> Option<&str> {
    if let Some((_, answer)) = text.rsplit_once("####") {
        return answer.lines().next().map(str::trim).filter(|answer| !answer.is_empty());
    }
    boxed(text).or_else(|| last_number(text))
}

/// Whether the response's final answer is the given one: equal as numbers where both are, else equal as text. The given answer may
/// be a whole solution too.
pub fn is_correct(response: &str, answer: &str) -> bool {
    let expected =
        extract_answer(answer).filter(|_| answer.contains("####") || answer.contains("\\boxed")).unwrap_or(answer.trim());
    let Some(found) = extract_answer(response) else { return false };
    match (parse_number(found), parse_number(expected)) {
        (Some(a), Some(b)) => (a - b).abs() <= 1e-6 * b.abs().max(1.0),
        _ => found.trim_end_matches('.') == expected.trim_end_matches('.'),
    }
}

/// A number as people write it: `1,234`, `$5`, `12%` (as 12), `-3.50.`, `3/4`, `\frac{3}{4}`, `1e3`, with or without `$…$`.
pub fn parse_number(text: &str) -> Option<f64> {
    let plain: String =
        text.trim().trim_end_matches('.').chars().filter(|c| !matches!(c, '$' | ',' | '%' | '\\' | ' ')).collect();
    let (negative, plain) = match plain.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, plain.as_str()),
    };
    let value = match plain.strip_prefix("dfrac").or(plain.strip_prefix("frac")) {
        Some(fraction) => {
            let (numerator, denominator) = fraction.strip_prefix('{')?.strip_suffix('}')?.split_once("}{")?;
            divide(numerator, denominator)?
        }
        None => match plain.split_once('/') {
            Some((numerator, denominator)) => divide(numerator, denominator)?,
            None => decimal(plain)?,
        },
    };
    Some(if negative { -value } else { value })
}

fn divide(numerator: &str, denominator: &str) -> Option<f64> {
    let (numerator, denominator) = (decimal(numerator)?, decimal(denominator)?);
    (denominator != 0.0).then(|| numerator / denominator)
}

/// `f64` without sign, and without the words that Rust's parser also takes (`nan`, `inf`).
fn decimal(text: &str) -> Option<f64> {
    let unsigned = text.starts_with(|c: char| c.is_ascii_digit() || c == '.');
    text.parse().ok().filter(|value: &f64| unsigned && value.is_finite())
}

/// The inside of the last `\boxed{…}`, with nested braces.
fn boxed(text: &str) -> Option<&str> {
    let start = text.rfind("\\boxed{")? + "\\boxed{".len();
    let mut depth = 1;
    for (at, c) in text[start..].char_indices() {
        depth += match c {
            '{' => 1,
            '}' => -1,
            _ => 0,
        };
        if depth == 0 {
            return Some(text[start..start + at].trim());
        }
    }
    None
}

/// The last run of characters that starts and ends like a number and parses as one.
fn last_number(text: &str) -> Option<&str> {
    let part = |c: char| c.is_ascii_digit() || matches!(c, '.' | ',' | '/' | '-');
    let runs = text.split(|c: char| !part(c)).map(|run| run.trim_end_matches(['.', ',', '/', '-']));
    runs.map(|run| run.trim_start_matches(['.', ',', '/'])).rfind(|run| parse_number(run).is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_as_people_write_them() {
        let cases = [("1,234", 1234.0), ("$5", 5.0), ("12%", 12.0), ("-3.50.", -3.5), ("3/4", 0.75), ("\\frac{3}{4}", 0.75)];
        for (text, value) in
            cases.into_iter().chain([("-\\dfrac{1}{2}", -0.5), ("1e3", 1000.0), ("\\$1,000", 1000.0), ("$7$", 7.0)])
        {
            assert_eq!(parse_number(text), Some(value), "{text}");
        }
        for text in ["", "x", "1/0", "nan", "inf", "--3", "\\frac{1}"] {
            assert_eq!(parse_number(text), None, "{text}");
        }
    }

    #[test]
    fn the_answer_is_marked_boxed_or_last() {
        assert_eq!(extract_answer("so 3 + 4\n#### 7\nbye 8"), Some("7"));
        assert_eq!(extract_answer("\\boxed{1} then \\boxed{\\frac{1}{2}} or 9"), Some("\\frac{1}{2}"));
        assert_eq!(extract_answer("It costs $1,200.50. Really"), Some("1,200.50"));
        assert_eq!(extract_answer("from 3-4 to -12, done"), Some("-12"));
        assert_eq!(extract_answer("no idea"), None);
    }

    #[test]
    fn equal_answers_are_correct_however_they_are_written() {
        let equal = [("The answer is 1,234.", "1234"), ("#### 0.5", "1/2"), ("\\boxed{50\\%}", "50"), ("\\boxed{x+1}", "x+1")];
        for (response, answer) in equal.into_iter().chain([("it is 18", "blah 9 * 2\n#### 18"), ("-3", "-3.0")]) {
            assert!(is_correct(response, answer), "{response} {answer}");
        }
        for (response, answer) in [("12", "1"), ("", "3"), ("#### ", "3"), ("\\boxed{y}", "x"), ("7 or 8", "7")] {
            assert!(!is_correct(response, answer), "{response} {answer}");
        }
    }
}
