//! Expression tree of an answer.

use num_rational::BigRational;

use crate::token::Token;

/// A formula.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Expr {
    /// A number; `decimal` if it has a decimal point and may be rounded.
    Number {
        value: BigRational,
        decimal: bool,
    },
    /// A variable, or one of the constants `π`, `e`, `i`, `∞`.
    Symbol(String),
    Sum(Vec<Expr>),
    Product(Vec<Expr>),
    Negative(Box<Expr>),
    Reciprocal(Box<Expr>),
    Power(Box<Expr>, Box<Expr>),
    Root {
        of: Box<Expr>,
        degree: Box<Expr>,
    },
    Call(&'static str, Box<Expr>),
    /// A logarithm to a given base.
    Log {
        base: Box<Expr>,
        of: Box<Expr>,
    },
    Factorial(Box<Expr>),
    Binomial(Box<Expr>, Box<Expr>),
    /// An angle in degrees; a plain number except in trigonometric functions.
    Degrees(Box<Expr>),
}

/// Functions of one argument, by their names.
pub(crate) mod function {
    /// `log` is the logarithm to base 10.
    const ALL: [&str; 18] = [
        "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "ln", "log", "exp",
        "abs", "floor", "ceil",
    ];

    /// Finds a function by its name in LaTeX or plain text.
    pub(crate) fn named(name: &str) -> Option<&'static str> {
        let name = match name {
            "cosec" => "csc",
            "asin" => "arcsin",
            "acos" => "arccos",
            "atan" => "arctan",
            "lg" => "log",
            name => name,
        };
        ALL.into_iter().find(|function| *function == name)
    }

    /// Returns true if the argument is an angle.
    pub(crate) fn of_an_angle(function: &str) -> bool {
        ALL[..6].contains(&function)
    }

    /// Returns the function that `f^{-1}` denotes.
    pub(crate) fn inverse(function: &str) -> Option<&'static str> {
        ALL[..3].iter().position(|of| *of == function).map(|at| ALL[6 + at])
    }
}

/// Kind of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ListKind {
    /// `1, 2` or `1 and 2`: all solutions, in no order.
    Bare,
    /// `{1, 2}`, or a union of intervals: in no order.
    Set,
    /// `(1, 2)`: in this order.
    Tuple,
}

/// A whole answer.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Answer {
    Value(Expr),
    /// A percentage.
    Percent(Expr),
    List(ListKind, Vec<Answer>),
    /// Two ends, and whether each is included.
    Interval([Expr; 2], [bool; 2]),
    /// Left side and right side.
    Equation(Expr, Expr),
    Matrix(Vec<Vec<Expr>>),
    /// Words, lower case.
    Words(String),
    /// `x = 5`: the tokens of the variable, and its value.
    Labelled(Vec<Token>, Box<Answer>),
}

/// An answer with the common name of its unit.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Reading {
    pub(crate) answer: Answer,
    pub(crate) unit: Option<String>,
}

impl Expr {
    /// Creates an exact number.
    pub(crate) fn exactly(value: impl Into<num_bigint::BigInt>) -> Self {
        Expr::Number { value: BigRational::from_integer(value.into()), decimal: false }
    }

    /// Returns the only factor, or the product.
    pub(crate) fn product(mut factors: Vec<Expr>) -> Self {
        if factors.len() == 1 { factors.swap_remove(0) } else { Expr::Product(factors) }
    }

    /// Creates `top / bottom`.
    pub(crate) fn fraction(top: Expr, bottom: Expr) -> Self {
        Expr::Product(vec![top, Expr::Reciprocal(Box::new(bottom))])
    }

    /// Returns true if `found` holds for any node.
    pub(crate) fn any(&self, found: &impl Fn(&Expr) -> bool) -> bool {
        found(self)
            || match self {
                Expr::Number { .. } | Expr::Symbol(_) => false,
                Expr::Sum(parts) | Expr::Product(parts) => parts.iter().any(|part| part.any(found)),
                Expr::Negative(of) | Expr::Reciprocal(of) | Expr::Call(_, of) | Expr::Factorial(of) | Expr::Degrees(of) => {
                    of.any(found)
                }
                Expr::Power(a, b) | Expr::Binomial(a, b) => a.any(found) || b.any(found),
                Expr::Root { of, degree: other } | Expr::Log { base: other, of } => of.any(found) || other.any(found),
            }
    }

    /// Returns true if some number may be rounded.
    pub(crate) fn has_decimals(&self) -> bool {
        self.any(&|part| matches!(part, Expr::Number { decimal: true, .. }))
    }

    /// Returns true if it has a variable.
    pub(crate) fn has_variables(&self) -> bool {
        self.any(&|part| matches!(part, Expr::Symbol(name) if is_variable(name)))
    }
}

/// Returns true if a name is not one of the constants `π`, `e`, `i`, `∞`.
pub(crate) fn is_variable(name: &str) -> bool {
    !matches!(name, "π" | "e" | "i" | "∞")
}
