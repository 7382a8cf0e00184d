//! Conditions on samples, as in `reward < 0.5 && length > 200 && status == "truncated"`.
//!
//! ```text
//! or         = and { "||" and }
//! and        = not { "&&" not }
//! not        = "!" not | "(" or ")" | comparison
//! comparison = field ( "==" | "!=" | "<" | "<=" | ">" | ">=" ) ( number | "text" | 'text' )
//! ```

use rollflow::data::{Sample, Status};
use serde_json::Value;
use thiserror::Error;

/// Parentheses and `!` that may stand inside each other.
const DEPTH: usize = 64;

/// Fields, as errors list them.
const FIELDS: &str = "step, group, sample, reward, reward.PART, advantage, length, status, metadata.KEY";

/// Statuses by the words that files have.
const STATUSES: [(Status, &str); 4] = [
    (Status::Pending, "pending"),
    (Status::Completed, "completed"),
    (Status::Truncated, "truncated"),
    (Status::Aborted, "aborted"),
];

/// Returns the word of a status in recorded files.
pub fn status_word(status: Status) -> &'static str {
    STATUSES.iter().find(|(of, _)| *of == status).map_or("", |(_, word)| word)
}

/// A condition on a sample. A comparison with a value that the sample lacks is false.
#[derive(Clone, Debug, PartialEq)]
pub enum Condition {
    /// At least one holds.
    Any(Vec<Condition>),
    /// Each holds.
    All(Vec<Condition>),
    /// Negated condition.
    Not(Box<Condition>),
    /// A field compared with a number or text.
    Compare(Field, Comparison, Literal),
}

/// A field of a sample.
#[derive(Clone, Debug, PartialEq)]
pub enum Field {
    /// The optimizer step that consumed it.
    Step,
    /// Id of its group.
    Group,
    /// Place in its group, from 0.
    Sample,
    /// Reward.
    Reward,
    /// A named part of the reward.
    Part(String),
    /// Advantage.
    Advantage,
    /// Sampled tokens.
    Length,
    /// State of its generation.
    Status,
    /// A key of the metadata whose value is a number or text.
    Metadata(String),
}

/// A comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Comparison {
    /// `==`
    Equal,
    /// `!=`
    Unequal,
    /// `<`
    Below,
    /// `<=`
    AtMost,
    /// `>`
    Above,
    /// `>=`
    AtLeast,
}

/// A number or text in a condition.
#[derive(Clone, Debug, PartialEq)]
pub enum Literal {
    /// A finite number.
    Number(f64),
    /// Text in quotes.
    Text(String),
}

/// A condition that cannot be read, and the place.
#[derive(Clone, Debug, PartialEq, Error)]
#[error("{problem}, at column {column}\n  {text}\n  {:>column$}", "^")]
pub struct ConditionError {
    /// The condition on one line.
    text: String,
    /// Characters up to the place, which is included.
    column: usize,
    problem: Problem,
}

#[derive(Clone, Debug, PartialEq, Error)]
enum Problem {
    #[error("expected {0}")]
    Expected(&'static str),
    #[error("unknown field `{0}`; the fields are {FIELDS}")]
    Field(String),
    #[error("the text has no closing quote")]
    OpenText,
    #[error("`{0}` is no finite number")]
    Number(String),
    #[error("{0} is compared with {1}")]
    Kind(&'static str, &'static str),
    #[error("text is compared by == or != only")]
    Order,
    #[error("unknown status {0:?}; it is \"pending\", \"completed\", \"truncated\" or \"aborted\"")]
    Status(String),
    #[error("more than {DEPTH} parentheses and `!` inside each other")]
    Deep,
}

#[derive(Clone, Debug, PartialEq)]
enum Token {
    Word(String),
    Literal(Literal),
    Sign(&'static str),
    End,
}

const SIGNS: [&str; 11] = ["&&", "||", "==", "!=", "<=", ">=", "<", ">", "!", "(", ")"];

impl Condition {
    /// Reads a condition.
    ///
    /// # Errors
    /// With the place and what belongs there.
    pub fn parse(text: &str) -> Result<Self, ConditionError> {
        // The error shows the condition on one line, with the same columns.
        let text: String = text.chars().map(|char| if char.is_control() { ' ' } else { char }).collect();
        let parsed = tokens(&text).and_then(|tokens| {
            let mut parser = Parser { tokens: &tokens, at: 0 };
            let condition = parser.any(0)?;
            if parser.peek() == &Token::End { Ok(condition) } else { parser.fail(Problem::Expected("&&, || or the end")) }
        });
        parsed.map_err(|(at, problem)| ConditionError { text, column: at + 1, problem })
    }

    /// Returns true if it holds for `sample`, which optimizer step `step` consumed, where that is
    /// known.
    pub fn holds(&self, step: Option<u64>, sample: &Sample) -> bool {
        match self {
            Condition::Any(of) => of.iter().any(|of| of.holds(step, sample)),
            Condition::All(of) => of.iter().all(|of| of.holds(step, sample)),
            Condition::Not(of) => !of.holds(step, sample),
            Condition::Compare(field, comparison, value) => match (field.of(step, sample), value) {
                (Some(Literal::Number(of)), Literal::Number(value)) => comparison.holds(&of, value),
                (Some(Literal::Text(of)), Literal::Text(value)) => comparison.holds(&of, value),
                _ => false,
            },
        }
    }
}

impl Field {
    fn parse(word: &str) -> Option<Self> {
        Some(match word {
            "step" => Field::Step,
            "group" => Field::Group,
            "sample" => Field::Sample,
            "reward" => Field::Reward,
            "advantage" => Field::Advantage,
            "length" => Field::Length,
            "status" => Field::Status,
            _ => match word.split_once('.') {
                Some(("reward", part)) if !part.is_empty() => Field::Part(part.to_owned()),
                Some(("metadata", key)) if !key.is_empty() => Field::Metadata(key.to_owned()),
                _ => return None,
            },
        })
    }

    fn of(&self, step: Option<u64>, sample: &Sample) -> Option<Literal> {
        let number = |value: Option<f64>| value.map(Literal::Number);
        match self {
            Field::Step => number(step.map(|step| step as f64)),
            Field::Group => number(Some(sample.group_index as f64)),
            Field::Sample => number(Some(sample.index.into())),
            Field::Reward => number(sample.reward),
            Field::Part(name) => number(sample.reward_parts.get(name).copied()),
            Field::Advantage => number(sample.advantage),
            Field::Length => number(Some(sample.generated() as f64)),
            Field::Status => Some(Literal::Text(status_word(sample.status).to_owned())),
            Field::Metadata(key) => match sample.metadata.get(key)? {
                Value::String(text) => Some(Literal::Text(text.clone())),
                value => number(value.as_f64()),
            },
        }
    }
}

impl Comparison {
    fn parse(sign: &str) -> Option<Self> {
        let all = [
            ("==", Comparison::Equal),
            ("!=", Comparison::Unequal),
            ("<", Comparison::Below),
            ("<=", Comparison::AtMost),
            (">", Comparison::Above),
            (">=", Comparison::AtLeast),
        ];
        all.into_iter().find(|(of, _)| *of == sign).map(|(_, comparison)| comparison)
    }

    fn holds<T: PartialOrd>(self, of: &T, value: &T) -> bool {
        match self {
            Comparison::Equal => of == value,
            Comparison::Unequal => of != value,
            Comparison::Below => of < value,
            Comparison::AtMost => of <= value,
            Comparison::Above => of > value,
            Comparison::AtLeast => of >= value,
        }
    }
}

/// The place of a token or problem, in characters from 0.
type At<T> = (usize, T);

fn tokens(text: &str) -> Result<Vec<At<Token>>, At<Problem>> {
    let chars: Vec<char> = text.chars().collect();
    let (mut tokens, mut at) = (Vec::new(), 0);
    while at < chars.len() {
        let run = |fits: fn(char) -> bool| chars[at..].iter().copied().take_while(|&char| fits(char)).collect::<String>();
        let (token, length) = match chars[at] {
            ' ' => {
                at += 1;
                continue;
            }
            quote @ ('"' | '\'') => {
                let text: String = chars[at + 1..].iter().take_while(|&&char| char != quote).collect();
                let length = text.chars().count() + 2;
                if at + length > chars.len() {
                    return Err((at, Problem::OpenText));
                }
                (Token::Literal(Literal::Text(text)), length)
            }
            char if char.is_ascii_digit() || matches!(char, '-' | '+' | '.') => {
                let number = run(|char| char.is_ascii_alphanumeric() || matches!(char, '-' | '+' | '.'));
                match number.parse::<f64>().ok().filter(|value| value.is_finite()) {
                    Some(value) => (Token::Literal(Literal::Number(value)), number.len()),
                    None => return Err((at, Problem::Number(number))),
                }
            }
            char if char.is_alphabetic() || char == '_' => {
                let word = run(|char| char.is_alphanumeric() || matches!(char, '_' | '-' | '.'));
                let length = word.chars().count();
                (Token::Word(word), length)
            }
            _ => match SIGNS.into_iter().find(|sign| chars[at..].starts_with(&sign.chars().collect::<Vec<_>>())) {
                Some(sign) => (Token::Sign(sign), sign.len()),
                None => {
                    return Err((
                        at,
                        Problem::Expected("a field, a number, a text in quotes, a comparison, &&, ||, ! or parentheses"),
                    ));
                }
            },
        };
        tokens.push((at, token));
        at += length;
    }
    tokens.push((chars.len(), Token::End));
    Ok(tokens)
}

struct Parser<'t> {
    tokens: &'t [At<Token>],
    at: usize,
}

impl Parser<'_> {
    fn peek(&self) -> &Token {
        &self.tokens[self.at].1
    }

    /// Takes the next token if it is `sign`.
    fn take(&mut self, sign: &'static str) -> bool {
        let found = self.peek() == &Token::Sign(sign);
        self.at += usize::from(found);
        found
    }

    /// Fails at the next token.
    fn fail<T>(&self, problem: Problem) -> Result<T, At<Problem>> {
        Err((self.tokens[self.at].0, problem))
    }

    fn any(&mut self, depth: usize) -> Result<Condition, At<Problem>> {
        let mut of = vec![self.all(depth)?];
        while self.take("||") {
            of.push(self.all(depth)?);
        }
        Ok(if of.len() == 1 { of.remove(0) } else { Condition::Any(of) })
    }

    fn all(&mut self, depth: usize) -> Result<Condition, At<Problem>> {
        let mut of = vec![self.not(depth)?];
        while self.take("&&") {
            of.push(self.not(depth)?);
        }
        Ok(if of.len() == 1 { of.remove(0) } else { Condition::All(of) })
    }

    fn not(&mut self, depth: usize) -> Result<Condition, At<Problem>> {
        if depth > DEPTH {
            return self.fail(Problem::Deep);
        }
        if self.take("!") {
            return Ok(Condition::Not(Box::new(self.not(depth + 1)?)));
        }
        if self.take("(") {
            let inner = self.any(depth + 1)?;
            return if self.take(")") { Ok(inner) } else { self.fail(Problem::Expected("`)`, && or ||")) };
        }
        self.comparison()
    }

    fn comparison(&mut self) -> Result<Condition, At<Problem>> {
        let field = match self.peek() {
            Token::Word(word) => match Field::parse(word) {
                Some(field) => field,
                None => return self.fail(Problem::Field(word.clone())),
            },
            _ => return self.fail(Problem::Expected("a field, ! or `(`")),
        };
        self.at += 1;
        let Some(comparison) = (if let Token::Sign(sign) = self.peek() { Comparison::parse(sign) } else { None }) else {
            return self.fail(Problem::Expected("==, !=, <, <=, > or >="));
        };
        self.at += 1;
        let Token::Literal(value) = self.peek().clone() else {
            return self.fail(Problem::Expected("a number, or a text in quotes"));
        };
        match (&field, &value) {
            (Field::Status, Literal::Number(_)) => return self.fail(Problem::Kind("status", "a text in quotes")),
            (Field::Status, Literal::Text(word)) if STATUSES.iter().all(|(_, known)| known != word) => {
                return self.fail(Problem::Status(word.clone()));
            }
            (Field::Status | Field::Metadata(_), _) => {}
            (_, Literal::Text(_)) => return self.fail(Problem::Kind("this field", "a number")),
            _ => {}
        }
        if matches!(value, Literal::Text(_)) && !matches!(comparison, Comparison::Equal | Comparison::Unequal) {
            self.at -= 1;
            return self.fail(Problem::Order);
        }
        self.at += 1;
        Ok(Condition::Compare(field, comparison, value))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn sample() -> Sample {
        Sample {
            group_index: 7,
            index: 2,
            reward: Some(0.25),
            reward_parts: [("format".to_owned(), 1.0)].into(),
            status: Status::Truncated,
            metadata: [("source".to_owned(), json!("sums")), ("level".to_owned(), json!(3))].into_iter().collect(),
            ..Sample::default()
        }
    }

    #[test]
    fn conditions_hold_as_they_read() {
        let cases = [
            ("step == 40 && group == 7 && sample == 2", true),
            ("reward < 0.5 && status == \"truncated\"", true),
            ("reward>=.25&&reward<=2.5e-1", true),
            ("reward.format < 1 || status != 'truncated'", false),
            ("reward > 1 || reward.format == 1 && length == 0", true),
            ("(reward > 1 || reward.format == 1) && length > 0", false),
            ("!(reward > -1)", false),
            ("!!(reward > -1)", true),
            ("metadata.source == \"sums\" && metadata.level > 2", true),
            // What is missing compares with nothing.
            ("advantage > 0 || advantage <= 0 || advantage != 0", false),
            ("reward.absent != 1 || metadata.level == 'three'", false),
        ];
        for (text, holds) in cases {
            assert_eq!(Condition::parse(text).unwrap().holds(Some(40), &sample()), holds, "{text}");
        }
        assert!(!Condition::parse("step >= 0").unwrap().holds(None, &sample()));
    }

    #[test]
    fn errors_point_at_the_place_and_name_what_belongs_there() {
        let cases = [
            ("", 1, "expected a field"),
            ("rewrad < 1", 1, "unknown field `rewrad`; the fields are step, group"),
            ("reward. < 1", 1, "unknown field `reward.`"),
            ("reward = 1", 8, "expected a field, a number, a text in quotes, a comparison"),
            ("reward 1", 8, "expected ==, !=, <"),
            ("reward <", 9, "expected a number, or a text"),
            ("reward < 1 reward", 12, "expected &&, || or the end"),
            ("reward < 1e999", 10, "`1e999` is no finite number"),
            ("reward < 1x", 10, "`1x` is no finite number"),
            ("reward < 1 && ", 15, "expected a field, ! or `(`"),
            ("(reward < 1", 12, "expected `)`"),
            ("status == 'done", 11, "the text has no closing quote"),
            ("status == 'done'", 11, "unknown status \"done\""),
            ("status == 1", 11, "status is compared with a text"),
            ("status < 'truncated'", 8, "text is compared by == or != only"),
            ("reward == '1'", 11, "this field is compared with a number"),
            ("größe < 1", 1, "unknown field `größe`"),
        ];
        for (text, column, problem) in cases {
            let error = Condition::parse(text).unwrap_err();
            assert!(error.to_string().starts_with(problem) && error.column == column, "{text}: {error}");
        }
        let shown = Condition::parse("reward <\n'a'").unwrap_err().to_string();
        assert_eq!(shown, "this field is compared with a number, at column 10\n  reward < 'a'\n           ^");
    }

    #[test]
    fn a_condition_that_nests_without_end_is_an_error_and_no_crash() {
        for open in ["(", "!"] {
            let error = Condition::parse(&open.repeat(1_000_000)).unwrap_err();
            assert_eq!(error.problem, Problem::Deep, "{open}");
        }
        let nested = format!("{}reward > 0{}", "(".repeat(DEPTH), ")".repeat(DEPTH));
        assert!(Condition::parse(&nested).is_ok());
    }
}
