//! Final answers of mathematical problems, as graders of the field judge them: a table of cases, each with
//! its reason (`cases.tsv`), and hostile texts, whose judgement is bounded in work and never panics.

use math_answers::{LONGEST, MOST_WORK, equivalent, extract_answer, judge};
use proptest::prelude::*;

/// The work of a judgement whose last step found the budget spent.
const MOST: u64 = 2 * MOST_WORK;

struct Case {
    line: usize,
    right: bool,
    response: String,
    answer: String,
    why: String,
}

fn cases() -> Vec<Case> {
    let table = include_str!("cases.tsv");
    let lines = table.lines().enumerate().filter(|(_, line)| !line.starts_with('#'));
    let case = |(at, line): (usize, &str)| {
        let columns: Vec<String> = line.split('\t').map(|column| column.replace('⏎', "\n")).collect();
        let [verdict, response, answer, why] = columns.try_into().unwrap_or_else(|_| panic!("line {}: four columns", at + 1));
        let right = match verdict.as_str() {
            "right" => true,
            "wrong" => false,
            other => panic!("line {}: {other:?} is neither right nor wrong", at + 1),
        };
        Case { line: at + 1, right, response, answer, why }
    };
    lines.map(case).collect()
}

#[test]
fn every_case_of_the_table_is_judged_as_its_reason_says() {
    let cases = cases();
    assert!(cases.len() > 300);
    let misjudged: Vec<String> = cases
        .iter()
        .filter(|case| judge(&case.response, &case.answer).correct != case.right)
        .map(|case| {
            let (found, verdict) = (judge(&case.response, &case.answer).found, if case.right { "right" } else { "wrong" });
            let Case { line, response, answer, why, .. } = case;
            format!("line {line}: {response:?} (found {found:?}) is {verdict} for {answer:?}: {why}")
        })
        .collect();
    assert!(misjudged.is_empty(), "{} of {}:\n{}", misjudged.len(), cases.len(), misjudged.join("\n"));
}

/// What a case compares, without the search for it.
fn compared(case: &Case) -> Option<(String, String)> {
    let of = |text: &str| text.strip_prefix("\\boxed{").and_then(|rest| rest.strip_suffix('}')).map(str::to_owned);
    of(&case.response).map(|found| (found, case.answer.clone()))
}

#[test]
fn equivalence_has_no_direction_and_every_answer_is_its_own() {
    for (found, answer) in
        cases().iter().filter_map(compared).filter(|(found, answer)| !found.is_empty() && !answer.contains('#'))
    {
        assert_eq!(equivalent(&found, &answer), equivalent(&answer, &found), "{found:?} {answer:?}");
        assert!(equivalent(&found, &found) && equivalent(&answer, &answer), "{found:?} {answer:?}");
    }
}

#[test]
fn a_variable_is_not_its_absolute_value_whatever_its_name() {
    let letters = ('a'..='z').chain('A'..='Z').filter(|letter| !['e', 'i'].contains(letter)).map(String::from);
    for name in letters.chain([r"\alpha", "a_1"].map(String::from)) {
        assert!(!equivalent(&format!("|{name}|"), &name), "{name}");
        assert!(equivalent(&format!("|{name}|"), &format!("\\sqrt{{{name}^2}}")), "{name}");
    }
}

/// Texts that would take for ever if they were taken at their word, of about `size` bytes.
fn hostile(size: usize) -> Vec<String> {
    let nested = |open: &str, inside: &str, close: &str| {
        let depth = size / (open.len() + close.len());
        open.repeat(depth) + inside + &close.repeat(depth)
    };
    let filled = |part: &str| part.repeat(size / part.len());
    vec![
        "9^{9^{9^{9^{9}}}}".to_owned() + &filled(" "),
        filled("9^"),
        format!("2^{{{}}}", filled("9")),
        format!("{}!", filled("9")),
        "1e999999999".to_owned(),
        format!("1e-{}", filled("9")),
        filled("7"),
        filled("1,234"),
        format!("0.\\overline{{{}}}", filled("3")),
        format!("0.{}1", filled("0")),
        nested("(", "1", ")"),
        nested("\\frac{", "1", "}{2}"),
        nested("\\sqrt{", "x", "}"),
        nested("|", "x", "|"),
        nested("\\{", "1", "\\}"),
        nested("[(", "1,2", "),3]"),
        filled("("),
        filled("-"),
        filled("!"),
        filled("x^"),
        filled("\\frac"),
        filled("\\sqrt[3]"),
        filled("\\sin "),
        filled("x+"),
        filled("1/3+1/7+"),
        filled("(x+1)"),
        filled("(x+1)^{99}"),
        filled("170!"),
        filled("\\binom{999}{500}"),
        format!("{{{}}}", filled("1,")),
        filled("\\pm 1"),
        filled("\\boxed{"),
        filled("\\boxed{1} "),
        filled("\\boxed{1} or \\boxed{2}, "),
        filled("answer is "),
        filled("####"),
        filled("\\text{"),
        filled("\\begin{pmatrix}1&"),
        filled("\\"),
        filled("\u{1F980}"),
    ]
}

#[test]
fn hostile_texts_cost_a_bounded_number_of_steps() {
    for size in [LONGEST / 2, LONGEST - 20, 10 * LONGEST] {
        let texts = hostile(size);
        for (at, text) in texts.iter().enumerate() {
            for (response, answer) in [
                (text.clone(), text.replace('1', "2")),
                (format!("\\boxed{{{text}}}"), "7".to_owned()),
                (format!("\\boxed{{{text}}}"), texts[(at + 7) % texts.len()].clone()),
                ("7".to_owned(), text.clone()),
            ] {
                let work = judge(&response, &answer).work;
                assert!(work <= MOST, "{work} steps for {:?}", response.chars().take(40).collect::<String>());
            }
        }
    }
}

#[test]
fn megabytes_are_compared_as_text() {
    for text in hostile(1 << 20).iter().filter(|text| text.len() > 3 * LONGEST) {
        assert!(judge(&format!("\\boxed{{{text}}}"), text).work <= MOST);
        assert!(!equivalent(text, "7"));
    }
    let digits = "7".repeat(1 << 20);
    assert!(equivalent(&digits, &digits) && !equivalent(&digits, &digits[1..]));
}

/// Pieces that mathematics is made of, in any order.
fn pieces() -> impl Strategy<Value = String> {
    // Between blanks; `~` is a blank.
    const PIECES: &str = r"1 23 0 4.5 . , 1,234 x y n pi e i + - * / ^ _ ( ) [ ] { } \{ \} | ! % \% = < \le~ > \ne~ \frac \frac{ }{
        \sqrt \sqrt[3] \sin~ \log_2 \ln \pi \infty \pm~ \cup~ \text{~cm} \text{ or ~and~ \begin{pmatrix} \end{pmatrix} & \\ ^\circ
        \binom \left \right ~ ° ½ $";
    let pieces: Vec<String> = PIECES.split_whitespace().map(|piece| piece.replace('~', " ")).collect();
    prop::collection::vec(prop::sample::select(pieces), 0..24).prop_map(|pieces| pieces.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn no_text_panics(a in any::<String>(), b in any::<String>()) {
        prop_assert!(judge(&a, &b).work <= MOST);
        prop_assert_eq!(equivalent(&a, &b), equivalent(&b, &a));
    }

    #[test]
    fn nothing_that_looks_like_mathematics_panics_or_depends_on_the_side_it_stands(a in pieces(), b in pieces()) {
        prop_assert!(judge(&a, &b).work <= MOST);
        prop_assert_eq!(equivalent(&a, &b), equivalent(&b, &a));
        let found = extract_answer(&a);
        prop_assert!(found.is_none_or(|found| a.contains(found)));
    }

    #[test]
    fn fractions_are_equal_exactly_if_they_are(a in -60_i64..60, b in 1_i64..60, c in -60_i64..60, d in 1_i64..60) {
        let (latex, plain) = (format!("\\frac{{{a}}}{{{b}}}"), format!("{c}/{d}"));
        prop_assert_eq!(equivalent(&latex, &plain), a * d == c * b);
        let sum = format!("{a}/{b} + {c}/{d}").replace("+ -", "- ");
        let together = format!("\\dfrac{{{}}}{{{}}}", a * d + c * b, b * d);
        prop_assert!(equivalent(&sum, &together), "{} {}", sum, together);
    }

    #[test]
    fn a_product_of_sums_is_the_sum_of_products(a in -9_i64..9, b in -9_i64..9, c in -9_i64..9) {
        let factors = format!("(x+{a})(x+{b})").replace("+-", "-");
        let sum = format!("x^2+{}x+{}", a + b, a * b).replace("+-", "-");
        prop_assert!(equivalent(&factors, &sum), "{} {}", factors, sum);
        prop_assert_eq!(equivalent(&factors, &format!("{sum}+{c}").replace("+-", "-")), c == 0);
    }
}
