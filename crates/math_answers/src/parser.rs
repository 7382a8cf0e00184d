//! Recursive-descent parser of formulas: sums of products of powers. Its depth is bounded, and so is
//! the stack of every later walk over the tree.

use num_rational::BigRational;
use num_traits::{One, Signed};

use crate::expression::{Expr, function};
use crate::token::{Bracket, Token};
use crate::work::Work;

/// Deepest nesting that is parsed.
const DEEPEST: usize = 96;
/// Most signs `!` and `°` in a row.
const MOST_SUFFIXES: usize = 3;

pub(crate) struct Parser<'a> {
    pub(crate) tokens: &'a [Token],
    pub(crate) at: usize,
    pub(crate) work: &'a mut Work,
    /// If true, `±` is read as `+`.
    pub(crate) upper_signs: bool,
    pub(crate) depth: usize,
    pub(crate) in_bars: bool,
    /// If true, `x =` is part of the answer.
    pub(crate) keep_labels: bool,
}

impl<'a> Parser<'a> {
    pub(crate) fn new(tokens: &'a [Token], upper_signs: bool, work: &'a mut Work) -> Self {
        Parser { tokens, at: 0, work, upper_signs, depth: 0, in_bars: false, keep_labels: false }
    }

    pub(crate) fn peek(&self) -> Option<&'a Token> {
        self.tokens.get(self.at)
    }

    pub(crate) fn take(&mut self, token: &Token) -> bool {
        let there = self.peek() == Some(token);
        self.at += usize::from(there);
        there
    }

    pub(crate) fn expect(&mut self, token: &Token) -> Option<()> {
        self.take(token).then_some(())
    }

    /// Runs `inner` one level deeper.
    pub(crate) fn deeper<T>(&mut self, inner: impl FnOnce(&mut Self) -> Option<T>) -> Option<T> {
        self.work.spend(1)?;
        if self.depth == DEEPEST {
            return None;
        }
        self.depth += 1;
        let read = inner(self);
        self.depth -= 1;
        read
    }

    /// Parses terms with signs between them.
    pub(crate) fn sum(&mut self) -> Option<Expr> {
        self.deeper(|parser| {
            let mut terms = vec![parser.product()?];
            while matches!(parser.peek(), Some(Token::Plus | Token::Minus | Token::PlusMinus | Token::MinusPlus)) {
                terms.push(parser.product()?);
            }
            Some(if terms.len() == 1 { terms.swap_remove(0) } else { Expr::Sum(terms) })
        })
    }

    /// Takes minus signs; returns true if their number is odd.
    fn negative(&mut self) -> bool {
        let mut negative = false;
        loop {
            match self.peek() {
                Some(Token::Plus) => {}
                Some(Token::Minus) => negative = !negative,
                Some(Token::PlusMinus) => negative ^= !self.upper_signs,
                Some(Token::MinusPlus) => negative ^= self.upper_signs,
                _ => return negative,
            }
            self.at += 1;
        }
    }

    /// Parses factors, with or without signs between them.
    fn product(&mut self) -> Option<Expr> {
        let mut negative = self.negative();
        let mut factors = vec![self.power()?];
        loop {
            self.work.spend(1)?;
            match self.peek() {
                Some(Token::Times) => {
                    self.at += 1;
                    negative ^= self.negative();
                    factors.push(self.power()?);
                }
                Some(Token::Divide) if !self.divides_text() => {
                    self.at += 1;
                    negative ^= self.negative();
                    factors.push(Expr::Reciprocal(Box::new(self.power()?)));
                }
                Some(Token::Number { .. } | Token::Frac) if self.mixed(&mut factors) => {}
                Some(Token::Number { .. }) if matches!(factors.last(), Some(Expr::Number { .. })) => return None,
                Some(token) if self.begins_factor(token) => factors.push(self.power()?),
                _ => break,
            }
        }
        let product = Expr::product(factors);
        Some(if negative { Expr::Negative(Box::new(product)) } else { product })
    }

    /// Checks for `5 km/\text{h}`, where the slash belongs to the unit.
    fn divides_text(&self) -> bool {
        matches!(self.tokens.get(self.at + 1), Some(Token::Text(_)))
    }

    fn begins_factor(&self, token: &Token) -> bool {
        use Token::{Bar, Binom, Frac, Function, Log, Name, Number, Open, Sqrt};
        match token {
            Number { .. } | Name(_) | Function(_) | Frac | Sqrt | Binom | Log => true,
            Open(bracket) => *bracket != Bracket::Set,
            Bar => !self.in_bars,
            _ => false,
        }
    }

    /// Parses a mixed number: `3\frac12` and `3 1/2` are 3.5.
    fn mixed(&mut self, factors: &mut [Expr]) -> bool {
        let whole = |token: Option<&Token>| match token {
            Some(Token::Number { value, decimal: false }) if value.is_integer() => Some(value.to_integer()),
            _ => None,
        };
        let at = |offset: usize| self.tokens.get(self.at + offset);
        let (open, close) = (Some(&Token::Open(Bracket::Group)), Some(&Token::Close(Bracket::Group)));
        let fraction = match self.peek() {
            Some(Token::Frac) if at(1) == open && at(3) == close && at(4) == open && at(6) == close => {
                whole(at(2)).zip(whole(at(5))).map(|fraction| (fraction, 7))
            }
            Some(Token::Number { .. }) if at(1) == Some(&Token::Divide) => whole(at(0)).zip(whole(at(2))).map(|of| (of, 3)),
            _ => None,
        };
        let (Some(Expr::Number { value, decimal: false }), Some(((top, bottom), length))) = (factors.last_mut(), fraction) else {
            return false;
        };
        if !value.is_integer() || top >= bottom || !bottom.is_positive() {
            return false;
        }
        *value += BigRational::new(top, bottom);
        self.at += length;
        true
    }

    /// Parses a base with its exponent; `a^b^c` is `a^(b^c)`.
    fn power(&mut self) -> Option<Expr> {
        self.deeper(|parser| {
            let base = parser.suffixed()?;
            if !parser.take(&Token::Power) {
                return Some(base);
            }
            let exponent = parser.exponent()?;
            Some(Expr::Power(Box::new(base), Box::new(exponent)))
        })
    }

    fn exponent(&mut self) -> Option<Expr> {
        let negative = self.negative();
        let exponent = self.power()?;
        Some(if negative { Expr::Negative(Box::new(exponent)) } else { exponent })
    }

    fn suffixed(&mut self) -> Option<Expr> {
        let mut value = self.primary()?;
        for _ in 0..=MOST_SUFFIXES {
            value = match self.peek() {
                Some(Token::Bang) => Expr::Factorial(Box::new(value)),
                Some(Token::Degree) => Expr::Degrees(Box::new(value)),
                _ => return Some(value),
            };
            self.at += 1;
        }
        None
    }

    fn primary(&mut self) -> Option<Expr> {
        let token = self.peek()?;
        self.at += 1;
        match token {
            Token::Number { value, decimal } => {
                // 101_2: the base is part of the question.
                if self.take(&Token::Under) {
                    self.argument()?;
                }
                Some(Expr::Number { value: value.clone(), decimal: *decimal })
            }
            Token::Name(name) => {
                let label = if self.take(&Token::Under) { format!("_{}", self.label()?) } else { String::new() };
                Some(Expr::Symbol(format!("{name}{label}")))
            }
            Token::Frac => {
                let (top, bottom) = (self.argument()?, self.argument()?);
                Some(Expr::fraction(top, bottom))
            }
            Token::Binom => Some(Expr::Binomial(Box::new(self.argument()?), Box::new(self.argument()?))),
            Token::Sqrt => {
                let degree = if self.take(&Token::Open(Bracket::Square)) {
                    let degree = self.sum()?;
                    self.expect(&Token::Close(Bracket::Square))?;
                    degree
                } else {
                    Expr::exactly(2)
                };
                Some(Expr::Root { of: Box::new(self.argument()?), degree: Box::new(degree) })
            }
            Token::Log => {
                let base = if self.take(&Token::Under) { Some(Box::new(self.argument()?)) } else { None };
                let of = Box::new(self.called_with()?);
                Some(match base {
                    Some(base) => Expr::Log { base, of },
                    None => Expr::Call("log", of),
                })
            }
            Token::Function(function) => self.call(function),
            Token::Open(bracket @ (Bracket::Round | Bracket::Square | Bracket::Group)) => {
                let bars = std::mem::take(&mut self.in_bars);
                let inside = self.sum()?;
                self.in_bars = bars;
                self.expect(&Token::Close(*bracket))?;
                Some(inside)
            }
            Token::Bar if !self.in_bars => {
                self.in_bars = true;
                let inside = self.sum()?;
                self.in_bars = false;
                self.expect(&Token::Bar)?;
                Some(Expr::Call("abs", Box::new(inside)))
            }
            _ => None,
        }
    }

    /// Parses a function: `\sin^2 x` is (sin x)², and `\sin^{-1} x` the arc sine.
    fn call(&mut self, function: &'static str) -> Option<Expr> {
        let exponent = if self.take(&Token::Power) { Some(self.exponent()?) } else { None };
        let of = Box::new(self.called_with()?);
        let minus_one = |exponent: &Expr| match exponent {
            Expr::Negative(of) => matches!(&**of, Expr::Number { value, .. } if value.is_one()),
            _ => false,
        };
        Some(match (exponent, function::inverse(function)) {
            (None, _) => Expr::Call(function, of),
            (Some(exponent), Some(inverse)) if minus_one(&exponent) => Expr::Call(inverse, of),
            (Some(exponent), _) => Expr::Power(Box::new(Expr::Call(function, of)), Box::new(exponent)),
        })
    }

    /// Parses the argument of a function: a bracket, or the factors after it.
    fn called_with(&mut self) -> Option<Expr> {
        self.deeper(|parser| {
            let simple =
                |token: Option<&Token>| matches!(token, Some(Token::Number { .. } | Token::Name(_) | Token::Frac | Token::Sqrt));
            if !simple(parser.peek()) {
                return parser.suffixed();
            }
            let mut factors = Vec::new();
            while simple(parser.peek()) {
                factors.push(parser.power()?);
            }
            Some(Expr::product(factors))
        })
    }

    /// Parses the argument of a command: a group, a bracket or a single item.
    fn argument(&mut self) -> Option<Expr> {
        self.deeper(Self::primary)
    }

    /// Reads the subscript of a name as text.
    fn label(&mut self) -> Option<String> {
        let grouped = self.take(&Token::Open(Bracket::Group));
        let mut label = String::new();
        loop {
            match self.peek() {
                Some(Token::Number { value, .. }) => label += &value.to_string(),
                Some(Token::Name(name) | Token::Text(name)) => label += name,
                Some(Token::Plus) if grouped => label.push('+'),
                Some(Token::Minus) if grouped => label.push('-'),
                Some(Token::Close(Bracket::Group)) if grouped && !label.is_empty() => {
                    self.at += 1;
                    return Some(label);
                }
                _ => return None,
            }
            self.at += 1;
            if !grouped {
                return Some(label);
            }
        }
    }
}
