//! Exact rational values of formulas, up to [`MOST_BITS`] bits.

use num_bigint::BigInt;
use num_rational::BigRational;
use num_traits::{One, Pow, Signed, ToPrimitive, Zero};

use crate::expression::{Expr, Function};
use crate::work::{Unreadable, Work};

/// Largest numerators and denominators, in bits; 300 decimal digits fit.
const MOST_BITS: u64 = 1024;

/// Returns the rational value of a formula; none if it has none or is too large.
pub(crate) fn exact(of: &Expr, work: &mut Work) -> Result<Option<BigRational>, Unreadable> {
    work.spend(1)?;
    let value = match of {
        Expr::Number { value, .. } => Some(value.clone()),
        Expr::Symbol(_) | Expr::Log { .. } => None,
        Expr::Sum(terms) => fold(terms, BigRational::zero(), |a, b| a + b, work)?,
        Expr::Product(factors) => fold(factors, BigRational::one(), |a, b| a * b, work)?,
        Expr::Negative(of) => exact(of, work)?.map(|value| -value),
        Expr::Reciprocal(of) => exact(of, work)?.filter(|value| !value.is_zero()).map(|value| value.recip()),
        Expr::Power(base, exponent) => match exact(base, work)?.zip(exact(exponent, work)?) {
            Some((base, exponent)) => power(&base, &exponent, work)?,
            None => None,
        },
        Expr::Root { of, degree } => match exact(of, work)?.zip(exact(degree, work)?) {
            Some((of, degree)) => root(&of, &degree, work)?,
            None => None,
        },
        Expr::Call(function, of) => match (function, exact(of, work)?) {
            (Function::Abs, Some(value)) => Some(value.abs()),
            (Function::Floor, Some(value)) => Some(value.floor()),
            (Function::Ceil, Some(value)) => Some(value.ceil()),
            _ => None,
        },
        Expr::Factorial(of) => match exact(of, work)? {
            Some(of) => factorial(&of, work)?,
            None => None,
        },
        Expr::Binomial(n, k) => match exact(n, work)?.zip(exact(k, work)?) {
            Some((n, k)) => binomial(&n, &k, work)?,
            None => None,
        },
        Expr::Degrees(of) => exact(of, work)?,
    };
    Ok(value.filter(|value| bits(value) <= MOST_BITS))
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
) -> Result<Option<BigRational>, Unreadable> {
    let mut all = start;
    for part in parts {
        let Some(value) = exact(part, work)? else { return Ok(None) };
        work.spend(price(bits(&all) + bits(&value)))?;
        all = join(all, value);
        if bits(&all) > MOST_BITS {
            return Ok(None);
        }
    }
    Ok(Some(all))
}

fn power(base: &BigRational, exponent: &BigRational, work: &mut Work) -> Result<Option<BigRational>, Unreadable> {
    if !exponent.is_integer() {
        // An even root of a negative number is not real, and its principal odd root is not the real one.
        if base.is_negative() {
            return Ok(None);
        }
        let degree = BigRational::from_integer(exponent.denom().clone());
        let Some(root) = root(base, &degree, work)? else { return Ok(None) };
        return power(&root, &BigRational::from_integer(exponent.numer().clone()), work);
    }
    let Some(times) = exponent.numer().to_i64() else {
        let trivial = base.is_one() || base.is_zero() && exponent.is_positive();
        return Ok(trivial.then(|| base.clone()));
    };
    if base.is_zero() && times < 0 {
        return Ok(None);
    }
    if base.is_zero() || base.abs().is_one() {
        let odd = times % 2 != 0;
        return Ok(Some(if times == 0 || base.is_negative() && !odd { BigRational::one() } else { base.clone() }));
    }
    // A number of b bits is at least 2^(b − 1).
    let size = (bits(base) - 1).max(1).saturating_mul(times.unsigned_abs());
    if size > 2 * MOST_BITS {
        return Ok(None);
    }
    work.spend(price(2 * size))?;
    let times32 = times.unsigned_abs() as u32;
    let value = BigRational::new(Pow::pow(base.numer().clone(), times32), Pow::pow(base.denom().clone(), times32));
    Ok(Some(if times < 0 { value.recip() } else { value }))
}

fn root(of: &BigRational, degree: &BigRational, work: &mut Work) -> Result<Option<BigRational>, Unreadable> {
    let Some(degree) = degree.to_integer().to_u32().filter(|n| degree.is_integer() && (1..=MOST_BITS as u32).contains(n)) else {
        return Ok(None);
    };
    if of.is_negative() && degree % 2 == 0 {
        return Ok(None);
    }
    // Newton's steps are about as many as the root's bits have bits.
    work.spend(16 * price(bits(of)))?;
    let whole = |of: &BigInt| {
        let root = of.nth_root(degree);
        (Pow::pow(root.clone(), degree) == *of).then_some(root)
    };
    Ok(whole(of.numer()).zip(whole(of.denom())).map(|(top, bottom)| BigRational::new(top, bottom)))
}

fn factorial(of: &BigRational, work: &mut Work) -> Result<Option<BigRational>, Unreadable> {
    const LARGEST: u64 = 170;
    let Some(n) = of.to_integer().to_u64().filter(|n| of.is_integer() && *n <= LARGEST) else { return Ok(None) };
    work.spend(n * price(MOST_BITS / 32))?;
    Ok(Some(BigRational::from_integer((1..=n).map(BigInt::from).product())))
}

fn binomial(n: &BigRational, k: &BigRational, work: &mut Work) -> Result<Option<BigRational>, Unreadable> {
    const LARGEST: u64 = 1000;
    let small = |of: &BigRational| of.to_integer().to_u64().filter(|value| of.is_integer() && *value <= LARGEST);
    let Some((n, k)) = small(n).zip(small(k)) else { return Ok(None) };
    if k > n {
        return Ok(Some(BigRational::zero()));
    }
    let k = k.min(n - k);
    work.spend(k * price(MOST_BITS / 32))?;
    let value = (1..=k).fold(BigInt::one(), |value, i| value * BigInt::from(n - k + i) / BigInt::from(i));
    Ok(Some(BigRational::from_integer(value)))
}
