//! Numerical comparison of formulas without an exact value: they are equal if they agree at fixed
//! arbitrary points over the complex numbers. Short formulas do not agree there by accident.

use std::f64::consts::{E, PI};

use num_complex::Complex64;
use num_traits::ToPrimitive;

use crate::exact::exact;
use crate::expression::{Expr, Function};
use crate::work::{Unreadable, Work};

/// Number of points; at the first, all variables are positive.
const POINTS: u64 = 4;
/// Relative rounding error of a value.
const ROUNDING: f64 = 1e-9;
/// Rounding error relative to the largest term of a sum.
const CANCELLATION: f64 = 1e-13;
/// Absolute tolerance of a number with a decimal point.
const DECIMALS: f64 = 1e-6;
/// Relative tolerance of a number with a decimal point.
const RELATIVE: f64 = 1e-3;

/// Returns true if numbers of this size and difference are equal up to rounding at six decimals.
pub(crate) fn close(difference: f64, size: f64) -> bool {
    difference <= DECIMALS && difference <= RELATIVE * size
}

fn close_parts(a: f64, b: f64) -> bool {
    a == b || close((a - b).abs(), a.abs().max(b.abs()))
}

/// Returns true if two formulas agree at all points where both have a value; none without such a
/// point.
pub(crate) fn agree(a: &Expr, b: &Expr, work: &mut Work) -> Result<Option<bool>, Unreadable> {
    let decimals = a.has_decimals() || b.has_decimals();
    let mut seen = None;
    for point in 0..POINTS {
        let mut at = Sampler { point, largest: 0.0, work };
        let values = (at.value(a)?, at.value(b)?);
        let largest = at.largest;
        match values {
            (Some(a), Some(b)) => {
                let size = a.norm().max(b.norm());
                let equal = (a - b).norm() <= ROUNDING * size + CANCELLATION * largest;
                let rounded = decimals && close_parts(a.re, b.re) && close_parts(a.im, b.im);
                if !equal && !rounded {
                    return Ok(Some(false));
                }
                seen = Some(true);
            }
            (None, None) => {}
            _ => return Ok(Some(false)),
        }
    }
    Ok(seen)
}

/// Returns true if two equations are equivalent: the differences of their sides are proportional.
pub(crate) fn proportional(a: [&Expr; 2], b: [&Expr; 2], work: &mut Work) -> Result<bool, Unreadable> {
    let mut first: Option<(Complex64, Complex64)> = None;
    let mut agreed = 0;
    for point in 0..POINTS {
        let mut at = Sampler { point, largest: 0.0, work };
        let (here, there) = match (at.difference(a)?, at.difference(b)?) {
            (Some(here), Some(there)) => (here, there),
            (None, None) => continue,
            _ => return Ok(false),
        };
        let (x, y) = *first.get_or_insert((here, there));
        if (here * y - there * x).norm() > ROUNDING * (here * y).norm().max((there * x).norm()) {
            return Ok(false);
        }
        agreed += 1;
    }
    Ok(agreed > 1 && first.is_some_and(|(x, y)| (x.norm() == 0.0) == (y.norm() == 0.0)))
}

struct Sampler<'a> {
    point: u64,
    /// Largest term of any sum.
    largest: f64,
    work: &'a mut Work,
}

impl Sampler<'_> {
    /// Returns the value at this point, if it is finite.
    fn value(&mut self, of: &Expr) -> Result<Option<Complex64>, Unreadable> {
        self.work.spend(1)?;
        let value = match of {
            Expr::Number { value, .. } => value.to_f64().map(Complex64::from),
            Expr::Symbol(name) => self.symbol(name),
            Expr::Sum(terms) => self.sum(terms)?,
            Expr::Product(factors) => {
                let mut product = Some(Complex64::from(1.0));
                for factor in factors {
                    product = product.zip(self.value(factor)?).map(|(product, factor)| product * factor);
                }
                product
            }
            Expr::Negative(of) => self.value(of)?.map(|value| -value),
            Expr::Reciprocal(of) => self.value(of)?.map(|value| 1.0 / value),
            Expr::Power(base, exponent) => {
                self.value(base)?.zip(self.value(exponent)?).map(|(base, exponent)| power(base, exponent))
            }
            Expr::Root { of, degree } => self.value(of)?.zip(self.value(degree)?).and_then(|(of, degree)| root(of, degree)),
            Expr::Call(function, of) => {
                let of = match &**of {
                    Expr::Degrees(angle) if function.of_an_angle() => self.value(angle)?.map(|degrees| degrees * (PI / 180.0)),
                    other => self.value(other)?,
                };
                of.and_then(|of| call(*function, of))
            }
            Expr::Log { base, of } => self.value(of)?.zip(self.value(base)?).map(|(of, base)| of.ln() / base.ln()),
            Expr::Factorial(_) | Expr::Binomial(..) => {
                exact(of, self.work)?.and_then(|value| value.to_f64()).map(Complex64::from)
            }
            Expr::Degrees(of) => self.value(of)?,
        };
        Ok(value.filter(|value| value.re.is_finite() && value.im.is_finite()))
    }

    fn difference(&mut self, [left, right]: [&Expr; 2]) -> Result<Option<Complex64>, Unreadable> {
        Ok(self.value(left)?.zip(self.value(right)?).map(|(left, right)| left - right))
    }

    fn sum(&mut self, terms: &[Expr]) -> Result<Option<Complex64>, Unreadable> {
        let mut sum = Some(Complex64::from(0.0));
        for term in terms {
            let term = self.value(term)?;
            self.largest = self.largest.max(term.map_or(0.0, |term| term.norm()));
            sum = sum.zip(term).map(|(sum, term)| sum + term);
        }
        Ok(sum)
    }

    /// Returns a constant, or the value of a variable, which follows from its name and the point.
    fn symbol(&self, name: &str) -> Option<Complex64> {
        match name {
            "π" => return Some(PI.into()),
            "e" => return Some(E.into()),
            "i" => return Some(Complex64::i()),
            "∞" => return None,
            _ => {}
        }
        // FNV-1a of the name is the key.
        let hash =
            name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
        let bits = mixed(hash ^ (self.point + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let size = 0.3 + 2.0 * ((bits >> 11) as f64 / (1_u64 << 53) as f64);
        let negative = self.point > 0 && bits & 1 == 1;
        Some(Complex64::from(if negative { -size } else { size }))
    }
}

/// Hash in which every bit depends on all bits of `bits` (the finalizer of splitmix64).
fn mixed(mut bits: u64) -> u64 {
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

fn power(base: Complex64, exponent: Complex64) -> Complex64 {
    const LARGEST: f64 = 1e4;
    if exponent.im == 0.0 && exponent.re.fract() == 0.0 && exponent.re.abs() <= LARGEST {
        return base.powi(exponent.re as i32);
    }
    if base.norm() == 0.0 {
        return if exponent.re > 0.0 { Complex64::from(0.0) } else { Complex64::from(f64::NAN) };
    }
    base.powc(exponent)
}

/// Computes a power; odd roots of negative real numbers are real.
fn root(of: Complex64, degree: Complex64) -> Option<Complex64> {
    let odd = degree.im == 0.0 && degree.re.rem_euclid(2.0) == 1.0;
    if of.im == 0.0 && of.re < 0.0 && odd {
        return Some(Complex64::from(-(-of.re).powf(1.0 / degree.re)));
    }
    (degree.norm() > 0.0).then(|| if degree == Complex64::from(2.0) { of.sqrt() } else { power(of, 1.0 / degree) })
}

fn call(function: Function, of: Complex64) -> Option<Complex64> {
    let real = |round: fn(f64) -> f64| (of.im == 0.0).then(|| Complex64::from(round(of.re)));
    Some(match function {
        Function::Sin => of.sin(),
        Function::Cos => of.cos(),
        Function::Tan => of.tan(),
        Function::Cot => 1.0 / of.tan(),
        Function::Sec => 1.0 / of.cos(),
        Function::Csc => 1.0 / of.sin(),
        Function::ArcSin => of.asin(),
        Function::ArcCos => of.acos(),
        Function::ArcTan => of.atan(),
        Function::Sinh => of.sinh(),
        Function::Cosh => of.cosh(),
        Function::Tanh => of.tanh(),
        Function::Ln => of.ln(),
        Function::Log => of.ln() / std::f64::consts::LN_10,
        Function::Exp => of.exp(),
        Function::Abs => of.norm().into(),
        Function::Floor => return real(f64::floor),
        Function::Ceil => return real(f64::ceil),
    })
}
