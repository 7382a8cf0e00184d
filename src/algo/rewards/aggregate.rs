//! One number from several.

use std::fmt;
use std::sync::Arc;

type Function = dyn Fn(&[f64]) -> f64 + Send + Sync;

/// How the values of several rewards become one.
#[derive(Clone, Default)]
pub enum Aggregator {
    /// `Σ r_i`.
    #[default]
    Sum,
    /// `Σ w_i r_i`, one weight a value. Equals TRL's `reward_weights` where every function judges the sample.
    Weighted(Vec<f64>),
    /// `min r_i`: as good as its worst part.
    Min,
    /// `Π r_i`: a part of 0 spoils all.
    Product,
    /// The first value decides; the second only among equals, and so on. Values are cut to [0, 1] and rounded to `levels` equally spaced
    /// ones, `l_i` = 0 … L − 1; the result `Σ l_i L^(n−1−i) / (L^n − 1)` is in [0, 1] and larger exactly if the list of levels is.
    Lexicographic {
        /// How many values of a part are told apart, at least 2.
        levels: u32,
    },
    /// 0 unless every value reaches its threshold, where it has one; else what `then` makes of all values.
    Gated {
        /// One a value.
        at_least: Vec<Option<f64>>,
        /// Behind the gates.
        then: Box<Aggregator>,
    },
    /// Any function.
    Custom(Arc<Function>),
}

/// Values that an [`Aggregator`] cannot make one of.
#[derive(Clone, Debug, thiserror::Error, PartialEq)]
pub enum AggregateError {
    /// There is nothing to aggregate.
    #[error("there is no value; give at least one reward")]
    Empty,
    /// A list of weights or thresholds has another length.
    #[error("there are {given} weights or thresholds for {values} values; give one a value")]
    Count {
        /// How many values.
        values: usize,
        /// How many weights or thresholds.
        given: usize,
    },
    /// A value, a weight or the result.
    #[error("value {at} is {value}; every value must be a finite number")]
    NotFinite {
        /// Its place; one past the values is the result.
        at: usize,
        /// What it is.
        value: f64,
    },
    /// So many combinations of levels that a double could not tell them apart, or only one level.
    #[error(
        "{levels} levels of {values} values are not told apart by a number; have 2 levels or more, and levels^values below 2^53"
    )]
    Levels {
        /// How many levels.
        levels: u32,
        /// How many values.
        values: usize,
    },
}

/// One number from `values`, which are in the order of the rewards that gave them.
///
/// ```
/// use rollflow::algo::rewards::{Aggregator, aggregate_vector_rewards};
///
/// let (right, polite) = (1.0, 0.5);
/// assert_eq!(aggregate_vector_rewards(&[right, polite], &Aggregator::Weighted(vec![1.0, 0.2])), Ok(1.1));
/// let gated = Aggregator::Gated { at_least: vec![Some(1.0), None], then: Box::new(Aggregator::Sum) };
/// assert_eq!(aggregate_vector_rewards(&[0.9, polite], &gated), Ok(0.0));
/// ```
pub fn aggregate_vector_rewards(values: &[f64], aggregator: &Aggregator) -> Result<f64, AggregateError> {
    if let Some(at) = values.iter().position(|value| !value.is_finite()) {
        return Err(AggregateError::NotFinite { at, value: values[at] });
    }
    if values.is_empty() {
        return Err(AggregateError::Empty);
    }
    let matches = |given: usize| {
        if given == values.len() { Ok(()) } else { Err(AggregateError::Count { values: values.len(), given }) }
    };
    let value = match aggregator {
        Aggregator::Sum => values.iter().sum(),
        Aggregator::Weighted(weights) => {
            matches(weights.len())?;
            values.iter().zip(weights).map(|(value, weight)| value * weight).sum()
        }
        Aggregator::Min => values.iter().copied().fold(f64::INFINITY, f64::min),
        Aggregator::Product => values.iter().product(),
        Aggregator::Lexicographic { levels } => lexicographic(values, *levels)?,
        Aggregator::Gated { at_least, then } => {
            matches(at_least.len())?;
            let open = values.iter().zip(at_least).all(|(value, least)| least.is_none_or(|least| *value >= least));
            if open { aggregate_vector_rewards(values, then)? } else { 0.0 }
        }
        Aggregator::Custom(function) => function(values),
    };
    if value.is_finite() { Ok(value) } else { Err(AggregateError::NotFinite { at: values.len(), value }) }
}

fn lexicographic(values: &[f64], levels: u32) -> Result<f64, AggregateError> {
    let combinations = f64::from(levels).powi(i32::try_from(values.len()).unwrap_or(i32::MAX));
    if levels < 2 || combinations > (1_u64 << 53) as f64 {
        return Err(AggregateError::Levels { levels, values: values.len() });
    }
    let (base, highest) = (f64::from(levels), f64::from(levels - 1));
    let number = values.iter().fold(0.0, |number, value| number * base + (value.clamp(0.0, 1.0) * highest).round());
    Ok(number / (combinations - 1.0))
}

impl fmt::Debug for Aggregator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Aggregator::Sum => f.write_str("Sum"),
            Aggregator::Weighted(weights) => f.debug_tuple("Weighted").field(weights).finish(),
            Aggregator::Min => f.write_str("Min"),
            Aggregator::Product => f.write_str("Product"),
            Aggregator::Lexicographic { levels } => f.debug_struct("Lexicographic").field("levels", levels).finish(),
            Aggregator::Gated { at_least, then } => {
                f.debug_struct("Gated").field("at_least", at_least).field("then", then).finish()
            }
            Aggregator::Custom(_) => f.write_str("Custom"),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn of(values: &[f64], aggregator: Aggregator) -> f64 {
        aggregate_vector_rewards(values, &aggregator).unwrap()
    }

    #[test]
    fn each_way_is_its_formula() {
        let values = [0.5, -2.0, 4.0];
        assert_eq!(of(&values, Aggregator::Sum), 2.5);
        assert_eq!(of(&values, Aggregator::Weighted(vec![2.0, 1.0, 0.25])), 0.0);
        assert_eq!((of(&values, Aggregator::Min), of(&values, Aggregator::Product)), (-2.0, -4.0));
        assert_eq!(of(&values, Aggregator::Custom(Arc::new(|values| values[2]))), 4.0);
    }

    #[test]
    fn a_gate_includes_its_threshold_and_shuts_off_everything() {
        let gated = |least| Aggregator::Gated { at_least: vec![None, Some(least)], then: Box::new(Aggregator::Min) };
        assert_eq!((of(&[3.0, 0.5], gated(0.5)), of(&[3.0, 0.5], gated(0.51))), (0.5, 0.0));
    }

    proptest! {
        #[test]
        fn a_lexicographic_order_is_that_of_the_levels(a in prop::collection::vec(0_u32..5, 4), b in prop::collection::vec(0_u32..5, 4)) {
            let value = |levels: &[u32]| {
                let values: Vec<f64> = levels.iter().map(|level| f64::from(*level) / 4.0).collect();
                of(&values, Aggregator::Lexicographic { levels: 5 })
            };
            prop_assert_eq!(value(&a).total_cmp(&value(&b)), a.cmp(&b));
            prop_assert!((0.0..=1.0).contains(&value(&a)));
        }
    }

    #[test]
    fn what_makes_no_number_is_refused() {
        let refused = |values: &[f64], aggregator| aggregate_vector_rewards(values, &aggregator).unwrap_err();
        assert_eq!(refused(&[], Aggregator::Sum), AggregateError::Empty);
        assert_eq!(refused(&[1.0], Aggregator::Weighted(vec![])), AggregateError::Count { values: 1, given: 0 });
        assert!(matches!(refused(&[1.0, f64::NAN], Aggregator::Min), AggregateError::NotFinite { at: 1, .. }));
        assert!(matches!(refused(&[f64::MAX; 2], Aggregator::Sum), AggregateError::NotFinite { at: 2, .. }));
        for (levels, values) in [(1, 2), (0, 2), (10, 16), (u32::MAX, 2)] {
            let refused = refused(&vec![0.0; values], Aggregator::Lexicographic { levels });
            assert_eq!(refused, AggregateError::Levels { levels, values });
        }
    }
}
