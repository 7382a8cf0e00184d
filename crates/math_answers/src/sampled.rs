//! Numerical comparison of formulas without an exact value: they are equal if they agree at fixed
//! arbitrary points over the complex numbers. Short formulas do not agree there by accident.

use std::f64::consts::{E, PI};

use num_complex::Complex64;
use num_traits::ToPrimitive;

use crate::exact::exact;
use crate::expression::{Expr, function};
use crate::work::Work;

/// Number of points; at the first, all variables are positive.
const POINTS: u64 = 5;
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

/// Returns true if two formulas agree at all points where both have a value, of which there is one.
pub(crate) fn agree(a: &Expr, b: &Expr, work: &mut Work) -> bool {
    let decimals = a.has_decimals() || b.has_decimals();
    let mut agreed = false;
    for point in 0..POINTS {
        let mut at = Sampler { point, largest: 0.0, work };
        let values = (at.value(a), at.value(b));
        let largest = at.largest;
        match values {
            _ if work.is_spent() => return false,
            (Some(a), Some(b)) => {
                let size = a.norm().max(b.norm());
                let equal = (a - b).norm() <= ROUNDING * size + CANCELLATION * largest;
                let rounded = decimals && close_parts(a.re, b.re) && close_parts(a.im, b.im);
                if !equal && !rounded {
                    return false;
                }
                agreed = true;
            }
            (None, None) => {}
            _ => return false,
        }
    }
    agreed
}

/// Returns true if two equations are equivalent: the differences of their sides are proportional.
pub(crate) fn proportional(a: [&Expr; 2], b: [&Expr; 2], work: &mut Work) -> bool {
    let mut first: Option<(Complex64, Complex64)> = None;
    let mut agreed = 0;
    for point in 0..POINTS {
        let mut at = Sampler { point, largest: 0.0, work };
        let (here, there) = match (at.difference(a), at.difference(b)) {
            _ if work.is_spent() => return false,
            (Some(here), Some(there)) => (here, there),
            (None, None) => continue,
            _ => return false,
        };
        let (x, y) = *first.get_or_insert((here, there));
        if (here * y - there * x).norm() > ROUNDING * (here * y).norm().max((there * x).norm()) {
            return false;
        }
        agreed += 1;
    }
    agreed > 1 && first.is_some_and(|(x, y)| (x.norm() == 0.0) == (y.norm() == 0.0))
}

struct Sampler<'a> {
    point: u64,
    /// Largest term of any sum.
    largest: f64,
    work: &'a mut Work,
}

impl Sampler<'_> {
    /// Returns the value at this point, if it is finite.
    fn value(&mut self, of: &Expr) -> Option<Complex64> {
        self.work.spend(1)?;
        let value = match of {
            Expr::Number { value, .. } => value.to_f64()?.into(),
            Expr::Symbol(name) => self.symbol(name)?,
            Expr::Sum(terms) => terms.iter().try_fold(Complex64::from(0.0), |sum, term| {
                let term = self.value(term)?;
                self.largest = self.largest.max(term.norm());
                Some(sum + term)
            })?,
            Expr::Product(factors) => {
                factors.iter().try_fold(Complex64::from(1.0), |product, factor| Some(product * self.value(factor)?))?
            }
            Expr::Negative(of) => -self.value(of)?,
            Expr::Reciprocal(of) => 1.0 / self.value(of)?,
            Expr::Power(base, exponent) => power(self.value(base)?, self.value(exponent)?),
            Expr::Root { of, degree } => root(self.value(of)?, self.value(degree)?)?,
            Expr::Call(function, of) => match &**of {
                Expr::Degrees(angle) if function::of_an_angle(function) => call(function, self.value(angle)? * (PI / 180.0))?,
                other => call(function, self.value(other)?)?,
            },
            Expr::Log { base, of } => self.value(of)?.ln() / self.value(base)?.ln(),
            Expr::Factorial(_) | Expr::Binomial(..) => exact(of, self.work)?.to_f64()?.into(),
            Expr::Degrees(of) => self.value(of)?,
        };
        Some(value).filter(|value| value.re.is_finite() && value.im.is_finite())
    }

    fn difference(&mut self, [left, right]: [&Expr; 2]) -> Option<Complex64> {
        Some(self.value(left)? - self.value(right)?)
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
        // Every variable is negative at some point: |x| is not x.
        let signs = 2 * (1 + mixed(hash) % ((1 << (POINTS - 1)) - 1));
        let negative = signs >> self.point & 1 == 1;
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

fn call(function: &str, of: Complex64) -> Option<Complex64> {
    let real = |round: fn(f64) -> f64| (of.im == 0.0).then(|| Complex64::from(round(of.re)));
    Some(match function {
        "sin" => of.sin(),
        "cos" => of.cos(),
        "tan" => of.tan(),
        "cot" => 1.0 / of.tan(),
        "sec" => 1.0 / of.cos(),
        "csc" => 1.0 / of.sin(),
        "arcsin" => of.asin(),
        "arccos" => of.acos(),
        "arctan" => of.atan(),
        "sinh" => of.sinh(),
        "cosh" => of.cosh(),
        "tanh" => of.tanh(),
        "ln" => of.ln(),
        "log" => of.ln() / std::f64::consts::LN_10,
        "exp" => of.exp(),
        "abs" => of.norm().into(),
        "floor" => return real(f64::floor),
        "ceil" => return real(f64::ceil),
        _ => return None,
    })
}
