//! Equality of two answers.

use num_rational::BigRational;
use num_traits::ToPrimitive;

use crate::exact::exact;
use crate::expression::{Answer, Expr, ListKind, Reading};
use crate::sampled::{agree, close, proportional};
use crate::work::{Unreadable, Work};

/// Returns true if two readings are equal, and their units if both have one.
pub(crate) fn same(a: &Reading, b: &Reading, work: &mut Work) -> Result<bool, Unreadable> {
    let units = a.unit.as_ref().zip(b.unit.as_ref()).is_none_or(|(a, b)| a == b);
    Ok(units && answers(&a.answer, &b.answer, work)?)
}

fn answers(a: &Answer, b: &Answer, work: &mut Work) -> Result<bool, Unreadable> {
    work.spend(1)?;
    match (a, b) {
        (Answer::Value(a), Answer::Value(b)) | (Answer::Percent(a), Answer::Percent(b)) => values(a, b, work),
        // A percentage may be written with or without the sign, or as a fraction.
        (Answer::Percent(percent), Answer::Value(value)) | (Answer::Value(value), Answer::Percent(percent)) => {
            let share = Expr::fraction(percent.clone(), Expr::exactly(100));
            Ok(values(percent, value, work)? || values(&share, value, work)?)
        }
        (Answer::List(kind, items), Answer::List(other_kind, others)) => lists((*kind, items), (*other_kind, others), work),
        // (1, 2) is a point and an open interval.
        (Answer::List(ListKind::Tuple, items), Answer::Interval(ends, [false, false]))
        | (Answer::Interval(ends, [false, false]), Answer::List(ListKind::Tuple, items)) => match items.as_slice() {
            [Answer::Value(low), Answer::Value(high)] => Ok(values(low, &ends[0], work)? && values(high, &ends[1], work)?),
            _ => Ok(false),
        },
        // A single solution may have braces.
        (Answer::List(ListKind::Set, items), other) | (other, Answer::List(ListKind::Set, items)) => match items.as_slice() {
            [item] => answers(item, other, work),
            _ => Ok(false),
        },
        (Answer::Interval(a, closed), Answer::Interval(b, other_closed)) => {
            Ok(closed == other_closed && values(&a[0], &b[0], work)? && values(&a[1], &b[1], work)?)
        }
        (Answer::Equation(left, right), Answer::Equation(other_left, other_right)) => {
            proportional([left, right], [other_left, other_right], work)
        }
        (Answer::Matrix(a), Answer::Matrix(b)) => {
            if a.len() != b.len() || a.iter().zip(b).any(|(row, other)| row.len() != other.len()) {
                return Ok(false);
            }
            for (cell, other) in a.iter().flatten().zip(b.iter().flatten()) {
                if !values(cell, other, work)? {
                    return Ok(false);
                }
            }
            Ok(true)
        }
        (Answer::Words(a), Answer::Words(b)) => Ok(a == b),
        _ => Ok(false),
    }
}

fn lists(a: (ListKind, &[Answer]), b: (ListKind, &[Answer]), work: &mut Work) -> Result<bool, Unreadable> {
    let ((kind, items), (other_kind, others)) = (a, b);
    if items.len() != others.len() {
        return Ok(false);
    }
    match (kind, other_kind) {
        // Missing brackets are ignored if the order is right.
        (ListKind::Tuple, ListKind::Tuple | ListKind::Bare) | (ListKind::Bare, ListKind::Tuple) => {
            for (item, other) in items.iter().zip(others) {
                if !answers(item, other, work)? {
                    return Ok(false);
                }
            }
            Ok(true)
        }
        (ListKind::Tuple, ListKind::Set) | (ListKind::Set, ListKind::Tuple) => Ok(false),
        _ => in_any_order(items, others, work),
    }
}

/// Returns true if the items are equal in some order.
fn in_any_order(items: &[Answer], others: &[Answer], work: &mut Work) -> Result<bool, Unreadable> {
    let mut left: Vec<&Answer> = others.iter().collect();
    for item in items {
        let mut partner = None;
        for (at, other) in left.iter().enumerate() {
            if answers(item, other, work)? {
                partner = Some(at);
                break;
            }
        }
        match partner {
            Some(at) => left.swap_remove(at),
            None => return Ok(false),
        };
    }
    Ok(true)
}

fn values(a: &Expr, b: &Expr, work: &mut Work) -> Result<bool, Unreadable> {
    if a == b {
        return Ok(true);
    }
    if let Some((x, y)) = exact(a, work)?.zip(exact(b, work)?) {
        return Ok(x == y || (a.has_decimals() || b.has_decimals()) && close_fractions(&x, &y));
    }
    Ok(agree(a, b, work)?.unwrap_or(false))
}

/// Compares with the tolerance of decimals; the difference is computed exactly.
fn close_fractions(a: &BigRational, b: &BigRational) -> bool {
    let (Some(a_size), Some(b_size), Some(difference)) = (a.to_f64(), b.to_f64(), (a - b).to_f64()) else { return false };
    close(difference.abs(), a_size.abs().max(b_size.abs()))
}
