//! Parsing of numbers in text.

/// Parses a number in common notation: `1,234`, `$5`, `12%` (as 12), `-3.50.`, `3/4`, `\frac{3}{4}`, `1e3`,
/// with or without `$…$`.
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

/// Parses a number without a sign, and without Rust's `nan` and `inf`.
fn decimal(text: &str) -> Option<f64> {
    let unsigned = text.starts_with(|c: char| c.is_ascii_digit() || c == '.');
    text.parse().ok().filter(|value: &f64| unsigned && value.is_finite())
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
}
