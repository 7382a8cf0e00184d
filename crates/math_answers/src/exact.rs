//! Exact rational values of formulas, up to [`MOST_BITS`] bits.

use num_bigint::BigInt;
use num_rational::BigRational;
use num_traits::{One, Pow, Signed, ToPrimitive, Zero};

use crate::expression::Expr;
use crate::work::Work;

/// Largest numerators and denominators, in bits; 300 decimal digits fit.
const MOST_BITS: u64 = 1024;

/// Returns the rational value of a formula; none if it has none or is too large.
pub(crate) fn exact(of: &Expr, work: &mut Work) -> Option<BigRational> {
    work.spend(1)?;
    let value = match of {
        Expr::Number { value, .. } => value.clone(),
        Expr::Symbol(_) | Expr::Log { .. } => return None,
        Expr::Sum(terms) => fold(terms, BigRational::zero(), |a, b| a + b, work)?,
        Expr::Product(factors) => fold(factors, BigRational::one(), |a, b| a * b, work)?,
        Expr::Negative(of) => -exact(of, work)?,
        Expr::Reciprocal(of) => Some(exact(of, work)?).filter(|value| !value.is_zero())?.recip(),
        Expr::Power(base, exponent) => power(&exact(base, work)?, &exact(exponent, work)?, work)?,
        Expr::Root { of, degree } => root(&exact(of, work)?, &exact(degree, work)?, work)?,
        Expr::Call(function, of) => match (*function, exact(of, work)?) {
            ("abs", value) => value.abs(),
            ("floor", value) => value.floor(),
            ("ceil", value) => value.ceil(),
            _ => return None,
        },
        Expr::Factorial(of) => factorial(&exact(of, work)?, work)?,
        Expr::Binomial(n, k) => binomial(&exact(n, work)?, &exact(k, work)?, work)?,
        Expr::Degrees(of) => exact(of, work)?,
    };
    Some(value).filter(|value| bits(value) <= MOST_BITS)
}

fn bits(value: &BigRational) -> u64 {
    value.numer().bits().max(value.denom().bits())
}

/// Returns the steps of one product or greatest common divisor of numbers of so many bits.
fn price(bits: u64) -> u64 {
    let words = bits / 32 + 1;
    words * words
}

fn fold(
    parts: &[Expr],
    start: BigRational,
    join: impl Fn(BigRational, BigRational) -> BigRational,
    work: &mut Work,
) -> Option<BigRational> {
    parts.iter().try_fold(start, |all, part| {
        let value = exact(part, work)?;
        work.spend(price(bits(&all) + bits(&value)))?;
        Some(join(all, value)).filter(|all| bits(all) <= MOST_BITS)
    })
}

/// Returns a whole number up to `largest`.
fn small(of: &BigRational, largest: u64) -> Option<u64> {
    of.to_integer().to_u64().filter(|value| of.is_integer() && *value <= largest)
}

fn power(base: &BigRational, exponent: &BigRational, work: &mut Work) -> Option<BigRational> {
    if !exponent.is_integer() {
        // An even root of a negative number is not real, and its principal odd root is not the real one.
        if base.is_negative() {
            return None;
        }
        let root = root(base, &BigRational::from_integer(exponent.denom().clone()), work)?;
        return power(&root, &BigRational::from_integer(exponent.numer().clone()), work);
    }
    let Some(times) = exponent.numer().to_i64() else {
        let trivial = base.is_one() || base.is_zero() && exponent.is_positive();
        return trivial.then(|| base.clone());
    };
    if base.is_zero() && times < 0 {
        return None;
    }
    if base.is_zero() || base.abs().is_one() {
        let odd = times % 2 != 0;
        return Some(if times == 0 || base.is_negative() && !odd { BigRational::one() } else { base.clone() });
    }
    // A number of b bits is at least 2^(b − 1).
    let size = (bits(base) - 1).max(1).saturating_mul(times.unsigned_abs());
    if size > 2 * MOST_BITS {
        return None;
    }
    work.spend(price(2 * size))?;
    let times32 = times.unsigned_abs() as u32;
    let value = BigRational::new(Pow::pow(base.numer().clone(), times32), Pow::pow(base.denom().clone(), times32));
    Some(if times < 0 { value.recip() } else { value })
}

fn root(of: &BigRational, degree: &BigRational, work: &mut Work) -> Option<BigRational> {
    let degree = small(degree, MOST_BITS).filter(|degree| *degree > 0)? as u32;
    if of.is_negative() && degree.is_multiple_of(2) {
        return None;
    }
    // Newton's steps are about as many as the root's bits have bits.
    work.spend(16 * price(bits(of)))?;
    let whole = |of: &BigInt| {
        let root = of.nth_root(degree);
        (Pow::pow(root.clone(), degree) == *of).then_some(root)
    };
    Some(BigRational::new(whole(of.numer())?, whole(of.denom())?))
}

fn factorial(of: &BigRational, work: &mut Work) -> Option<BigRational> {
    let n = small(of, 170)?;
    work.spend(n * price(MOST_BITS / 32))?;
    Some(BigRational::from_integer((1..=n).map(BigInt::from).product()))
}

fn binomial(n: &BigRational, k: &BigRational, work: &mut Work) -> Option<BigRational> {
    let (n, k) = (small(n, 1000)?, small(k, 1000)?);
    if k > n {
        return Some(BigRational::zero());
    }
    let k = k.min(n - k);
    work.spend(k * price(MOST_BITS / 32))?;
    let value = (1..=k).fold(BigInt::one(), |value, i| value * BigInt::from(n - k + i) / BigInt::from(i));
    Some(BigRational::from_integer(value))
}
