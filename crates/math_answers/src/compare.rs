//! Equality of two answers.

use num_rational::BigRational;
use num_traits::ToPrimitive;

use crate::exact::exact;
use crate::expression::{Answer, Expr, ListKind, Reading};
use crate::sampled::{agree, close, proportional};
use crate::work::Work;

/// Returns true if two readings are equal, and their units if both have one.
pub(crate) fn same(a: &Reading, b: &Reading, work: &mut Work) -> bool {
    let units = a.unit.as_ref().zip(b.unit.as_ref()).is_none_or(|(a, b)| a == b);
    units && answers(&a.answer, &b.answer, work)
}

fn answers(a: &Answer, b: &Answer, work: &mut Work) -> bool {
    if work.spend(1).is_none() {
        return false;
    }
    match (a, b) {
        (Answer::Labelled(label, a), Answer::Labelled(other, b)) => {
            // An index may be missing, too.
            let named_alike = label == other || label.len() != other.len() && label.first() == other.first();
            named_alike && answers(a, b, work)
        }
        // A label says what was asked, and may be missing.
        (Answer::Labelled(_, a), b) | (b, Answer::Labelled(_, a)) => answers(a, b, work),
        (Answer::Value(a), Answer::Value(b)) | (Answer::Percent(a), Answer::Percent(b)) => values(a, b, work),
        // A percentage may be written with or without the sign, or as a fraction.
        (Answer::Percent(percent), Answer::Value(value)) | (Answer::Value(value), Answer::Percent(percent)) => {
            let share = Expr::fraction(percent.clone(), Expr::exactly(100));
            values(percent, value, work) || values(&share, value, work)
        }
        (Answer::List(kind, items), Answer::List(other_kind, others)) => {
            items.len() == others.len()
                && match (kind, other_kind) {
                    // Missing brackets are ignored if the order is right.
                    (ListKind::Tuple, ListKind::Tuple | ListKind::Bare) | (ListKind::Bare, ListKind::Tuple) => {
                        items.iter().zip(others).all(|(item, other)| answers(item, other, work))
                    }
                    (ListKind::Tuple, ListKind::Set) | (ListKind::Set, ListKind::Tuple) => false,
                    _ => in_any_order(items, others, work),
                }
        }
        // (1, 2) is a point and an open interval.
        (Answer::List(ListKind::Tuple, items), Answer::Interval(ends, [false, false]))
        | (Answer::Interval(ends, [false, false]), Answer::List(ListKind::Tuple, items)) => match items.as_slice() {
            [Answer::Value(low), Answer::Value(high)] => values(low, &ends[0], work) && values(high, &ends[1], work),
            _ => false,
        },
        // A single solution may have braces.
        (Answer::List(ListKind::Set, items), other) | (other, Answer::List(ListKind::Set, items)) => match items.as_slice() {
            [item] => answers(item, other, work),
            _ => false,
        },
        (Answer::Interval(a, closed), Answer::Interval(b, other_closed)) => {
            closed == other_closed && a.iter().zip(b).all(|(a, b)| values(a, b, work))
        }
        (Answer::Equation(left, right), Answer::Equation(other_left, other_right)) => {
            proportional([left, right], [other_left, other_right], work)
        }
        (Answer::Matrix(a), Answer::Matrix(b)) => {
            a.iter().map(Vec::len).eq(b.iter().map(Vec::len))
                && a.iter().flatten().zip(b.iter().flatten()).all(|(cell, other)| values(cell, other, work))
        }
        (Answer::Words(a), Answer::Words(b)) => a == b,
        _ => false,
    }
}

/// Returns true if the items are equal in some order.
fn in_any_order(items: &[Answer], others: &[Answer], work: &mut Work) -> bool {
    let mut left: Vec<&Answer> = others.iter().collect();
    items.iter().all(|item| {
        let partner = left.iter().position(|other| answers(item, other, work));
        partner.map(|at| left.swap_remove(at)).is_some()
    })
}

fn values(a: &Expr, b: &Expr, work: &mut Work) -> bool {
    if a == b {
        return !work.is_spent();
    }
    if let Some((x, y)) = exact(a, work).zip(exact(b, work)) {
        return x == y || (a.has_decimals() || b.has_decimals()) && close_fractions(&x, &y).unwrap_or(false);
    }
    agree(a, b, work)
}

/// Compares with the tolerance of decimals; the difference is computed exactly.
fn close_fractions(a: &BigRational, b: &BigRational) -> Option<bool> {
    Some(close((a - b).to_f64()?.abs(), a.to_f64()?.abs().max(b.to_f64()?.abs())))
}
