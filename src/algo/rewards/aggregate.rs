//! Combining several rewards into one number.

use std::fmt;
use std::sync::Arc;

use crate::settings::declare::choices;

choices! {
    /// Combination of the parts of a reward.
    pub enum Combine {
        /// the sum of the parts, each times its weight.
        "sum" => Sum,
        /// the smallest part.
        "min" => Min,
        /// the product of the parts.
        "product" => Product,
        /// the first part decides, the next one only among equals; parts and reward are from 0 to
        /// 1.
        "lexicographic" => Lexicographic,
        /// an aggregator that was registered by a name.
        "custom" => Custom,
    }
}

/// Number of values of a part that [`Combine::Lexicographic`] distinguishes by default.
pub const DEFAULT_LEVELS: u32 = 101;

type Function = dyn Fn(&[f64]) -> f64 + Send + Sync;

/// Combines the values of several rewards into one.
///
/// ```
/// use rollflow::algo::rewards::{Aggregator, Combine};
///
/// let (right, polite) = (1.0, 0.5);
/// assert_eq!(Aggregator::weighted([1.0, 0.2]).aggregate(&[right, polite]), Ok(1.1));
/// let gated = Aggregator::new(Combine::Sum).at_least([Some(1.0), None]);
/// assert_eq!(gated.aggregate(&[0.9, polite]), Ok(0.0));
/// ```
#[derive(Clone)]
pub struct Aggregator {
    combine: Combine,
    weights: Option<Vec<f64>>,
    levels: u32,
    function: Option<Arc<Function>>,
    at_least: Option<Vec<Option<f64>>>,
}

impl Default for Aggregator {
    fn default() -> Self {
        Aggregator::new(Combine::default())
    }
}

impl Aggregator {
    /// Combines values in this way. For [`Combine::Custom`] use [`Aggregator::custom`].
    pub fn new(combine: Combine) -> Self {
        Aggregator { combine, weights: None, levels: DEFAULT_LEVELS, function: None, at_least: None }
    }

    /// Weighted sum `Σ w_i r_i`, as TRL's `reward_weights`.
    pub fn weighted(weights: impl Into<Vec<f64>>) -> Self {
        Aggregator::default().weights(weights)
    }

    /// Combines values by a function.
    pub fn custom(function: impl Fn(&[f64]) -> f64 + Send + Sync + 'static) -> Self {
        Aggregator { function: Some(Arc::new(function)), ..Aggregator::new(Combine::Custom) }
    }

    /// Sets the weights of a sum, one per value; 1 by default.
    pub fn weights(self, weights: impl Into<Vec<f64>>) -> Self {
        Aggregator { weights: Some(weights.into()), ..self }
    }

    /// Sets the number of values of a part that [`Combine::Lexicographic`] distinguishes, at least
    /// 2.
    pub fn levels(self, levels: u32) -> Self {
        Aggregator { levels, ..self }
    }

    /// Sets thresholds, one per value: the result is 0 if a value is below its
    /// threshold.
    pub fn at_least(self, thresholds: impl Into<Vec<Option<f64>>>) -> Self {
        Aggregator { at_least: Some(thresholds.into()), ..self }
    }

    /// Combines values of which some rewards have none, because they do not apply to the sample: a
    /// sum, a minimum and a product leave these out, with their weights and thresholds.
    ///
    /// # Errors
    /// Those of [`Aggregator::aggregate`], and a missing value in any other combination.
    pub fn aggregate_given(&self, values: &[Option<f64>]) -> Result<f64, String> {
        let given: Vec<f64> = values.iter().copied().flatten().collect();
        if given.len() == values.len() {
            return self.aggregate(&given);
        }
        if matches!(self.combine, Combine::Lexicographic | Combine::Custom) {
            return Err("a value is missing, and only a sum, a minimum or a product can leave one out".to_owned());
        }
        let (weights, at_least) = (self.weights.as_ref(), self.at_least.as_ref());
        for count in weights.map(Vec::len).into_iter().chain(at_least.map(Vec::len)) {
            one_per_value(values.len(), count)?;
        }
        fn kept<T: Copy>(all: &[T], values: &[Option<f64>]) -> Vec<T> {
            all.iter().zip(values).filter(|(_, value)| value.is_some()).map(|(of, _)| *of).collect()
        }
        let (weights, at_least) = (weights.map(|all| kept(all, values)), at_least.map(|all| kept(all, values)));
        Aggregator { weights, at_least, ..self.clone() }.aggregate(&given)
    }

    /// Combines `values`, which are in the order of their rewards. Values and result must be
    /// finite.
    pub fn aggregate(&self, values: &[f64]) -> Result<f64, String> {
        if let Some(at) = values.iter().position(|value| !value.is_finite()) {
            return Err(not_finite(at, values[at]));
        }
        if values.is_empty() {
            return Err("there is no value; give at least one reward".to_owned());
        }
        if let Some(at_least) = &self.at_least {
            one_per_value(values.len(), at_least.len())?;
            if !values.iter().zip(at_least).all(|(value, least)| least.is_none_or(|least| *value >= least)) {
                return Ok(0.0);
            }
        }
        let value = match (self.combine, &self.function) {
            (Combine::Sum, _) => match &self.weights {
                None => values.iter().sum(),
                Some(weights) => {
                    one_per_value(values.len(), weights.len())?;
                    values.iter().zip(weights).map(|(value, weight)| value * weight).sum()
                }
            },
            (Combine::Min, _) => values.iter().copied().fold(f64::INFINITY, f64::min),
            (Combine::Product, _) => values.iter().product(),
            (Combine::Lexicographic, _) => lexicographic(values, self.levels)?,
            (Combine::Custom, Some(function)) => function(values),
            (Combine::Custom, None) => return Err("a custom aggregator needs its function; use Aggregator::custom".to_owned()),
        };
        if value.is_finite() { Ok(value) } else { Err(not_finite(values.len(), value)) }
    }
}

fn not_finite(at: usize, value: f64) -> String {
    format!("value {at} is {value}; every value must be a finite number")
}

fn one_per_value(count: usize, given: usize) -> Result<(), String> {
    if given == count {
        return Ok(());
    }
    Err(format!("there are {given} weights or thresholds for {count} values; give one a value"))
}

/// Returns `Σ l_i L^(n−1−i) / (L^n − 1)`, which is in [0, 1] and ordered as the lists of levels.
///
/// `l_i` = 0 … L − 1 is value `i`, clamped to [0, 1] and rounded to one of L equally spaced levels.
fn lexicographic(values: &[f64], levels: u32) -> Result<f64, String> {
    let count = values.len();
    let combinations = f64::from(levels).powi(i32::try_from(count).unwrap_or(i32::MAX));
    if levels < 2 || combinations > (1_u64 << 53) as f64 {
        return Err(format!(
            "{levels} levels of {count} values are not told apart by a number; have 2 levels or more, and levels^values below 2^53"
        ));
    }
    let (base, highest) = (f64::from(levels), f64::from(levels - 1));
    let number = values.iter().fold(0.0, |number, value| number * base + (value.clamp(0.0, 1.0) * highest).round());
    Ok(number / (combinations - 1.0))
}

impl fmt::Debug for Aggregator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Aggregator")
            .field("combine", &self.combine)
            .field("weights", &self.weights)
            .field("at_least", &self.at_least)
            .finish_non_exhaustive()
    }
}
