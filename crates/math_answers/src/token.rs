//! Tokens of an answer, common to LaTeX and plain text.

use num_bigint::BigInt;
use num_rational::BigRational;
use num_traits::{One, Pow, Zero};

/// Token of an answer.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Token {
    /// A number; `decimal` if it has a decimal point.
    Number {
        value: BigRational,
        decimal: bool,
    },
    /// A variable or constant.
    Name(String),
    Function(&'static str),
    /// Words, or a unit.
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
    /// Separator of matrix cells.
    Cell,
    /// Separator of matrix rows.
    Row,
    Begin,
    End,
}

/// Kinds of brackets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bracket {
    Round,
    Square,
    /// Braces of TeX, which group.
    Group,
    /// Visible braces.
    Set,
}

/// Relation of two sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Relation {
    Equal,
    About,
    Not,
    Less { or_equal: bool },
    Greater { or_equal: bool },
}

/// Most digits of a number.
const MOST_DIGITS: usize = 300;
/// Largest power of ten.
const MOST_EXPONENT: i32 = 300;

/// Computes the number `whole.fraction(repeating)…` × 10^`exponent` from its digits.
pub(crate) fn number(whole: &str, fraction: &str, repeating: &str, exponent: i32) -> Option<BigRational> {
    if whole.len() + fraction.len() + repeating.len() > MOST_DIGITS || exponent.abs() > MOST_EXPONENT {
        return None;
    }
    let digits = |text: &str| if text.is_empty() { Some(BigInt::zero()) } else { BigInt::parse_bytes(text.as_bytes(), 10) };
    let ten = |power: usize| Pow::pow(BigInt::from(10), power);
    let written = digits(&[whole, fraction].concat())?;
    let mut value = BigRational::new(written, ten(fraction.len()));
    if !repeating.is_empty() {
        // 0.0(34)… is 34 / 990.
        let nines = ten(repeating.len()) - BigInt::one();
        value += BigRational::new(digits(repeating)?, nines * ten(fraction.len()));
    }
    let scale = BigRational::from_integer(ten(exponent.unsigned_abs() as usize));
    Some(if exponent < 0 { value / scale } else { value * scale })
}
