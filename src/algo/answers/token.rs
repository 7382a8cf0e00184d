//! What answers are made of, after LaTeX and plain text look the same.

use num_bigint::BigInt;
use num_rational::BigRational;
use num_traits::{One, Pow, Zero};

use super::expression::Function;
use super::work::Unreadable;

/// A piece of an answer.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Token {
    /// A number; `decimal` if it was written with a point.
    Number {
        value: BigRational,
        decimal: bool,
    },
    /// A variable or constant.
    Name(String),
    Function(Function),
    /// Words, a unit among them.
    Text(String),
    Frac,
    Sqrt,
    Binom,
    Log,
    Open(Bracket),
    Close(Bracket),
    /// `,`, `;`, `or` and `and`.
    Separator,
    Plus,
    Minus,
    PlusMinus,
    MinusPlus,
    Times,
    Divide,
    Power,
    Under,
    Bang,
    Percent,
    Degree,
    Bar,
    Relation(Relation),
    Union,
    In,
    /// Between the cells of a matrix.
    Cell,
    /// Between its rows.
    Row,
    Begin,
    End,
}

/// Brackets by their meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Bracket {
    Round,
    Square,
    /// What TeX groups by.
    Group,
    /// Those that are seen.
    Set,
}

/// What two sides have to do with each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Relation {
    Equal,
    About,
    Not,
    Less { or_equal: bool },
    Greater { or_equal: bool },
}

/// Longer numbers are compared as text.
const MOST_DIGITS: usize = 300;
/// So are numbers with larger powers of ten.
const MOST_EXPONENT: i32 = 300;

/// The number `whole.fraction(repeating)…` × 10^`exponent`, from digits.
pub(super) fn number(whole: &str, fraction: &str, repeating: &str, exponent: i32) -> Result<BigRational, Unreadable> {
    if whole.len() + fraction.len() + repeating.len() > MOST_DIGITS || exponent.abs() > MOST_EXPONENT {
        return Err(Unreadable);
    }
    let digits = |text: &str| if text.is_empty() { Some(BigInt::zero()) } else { BigInt::parse_bytes(text.as_bytes(), 10) };
    let ten = |power: usize| Pow::pow(BigInt::from(10), power);
    let written = digits(&[whole, fraction].concat()).ok_or(Unreadable)?;
    let mut value = BigRational::new(written, ten(fraction.len()));
    if !repeating.is_empty() {
        // 0.0(34)… is 34 / 990.
        let nines = ten(repeating.len()) - BigInt::one();
        value += BigRational::new(digits(repeating).ok_or(Unreadable)?, nines * ten(fraction.len()));
    }
    let scale = BigRational::from_integer(ten(exponent.unsigned_abs() as usize));
    Ok(if exponent < 0 { value / scale } else { value * scale })
}
