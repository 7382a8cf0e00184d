//! Several named rewards that become one, and stay visible each by itself.

use std::collections::BTreeMap;
use std::fmt;

use super::aggregate::{Aggregator, aggregate_vector_rewards};
use super::earned::{Earned, Earnings};
use crate::data::{REWARD_LIMIT, Sample, is_reward};

type Value = dyn Fn(&Sample) -> Result<f64, String> + Send + Sync;

enum Part {
    Of(Box<Value>),
    Given,
}

/// Named parts and how they become one reward. A part that fails makes the whole fail, under the part's name.
///
/// ```
/// use rollflow::algo::rewards::{Aggregator, Parts, format, keywords};
/// use rollflow::prelude::*;
///
/// let parts = Parts::new(Aggregator::Weighted(vec![1.0, 0.2]))
///     .part("form", format(["think", "answer"])?)
///     .part("units", keywords(["cm", "kg"])?);
/// let sample = Sample { response: "<think>5 kg</think><answer>5</answer>".into(), ..Sample::default() };
/// let earnings = parts.earn(&sample)?;
/// assert_eq!((earnings.reward, earnings.parts["form"], earnings.parts["units"]), (1.1, 1.0, 0.5));
///
/// let stage = Reward::each(move |sample: &Sample| parts.earn(sample)); // the parts are metrics of their own
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Default)]
pub struct Parts {
    parts: Vec<(String, Part)>,
    aggregator: Aggregator,
}

impl Parts {
    /// None yet; weights and thresholds of `aggregator` are in the order in which parts are added.
    pub fn new(aggregator: Aggregator) -> Self {
        Parts { parts: Vec::new(), aggregator }
    }

    /// One more. Of two with the same name, the later one's value is the one that is written down.
    pub fn part<R: Earned>(mut self, name: impl Into<String>, reward: impl Fn(&Sample) -> R + Send + Sync + 'static) -> Self {
        let value = move |sample: &Sample| reward(sample).earned().map(|earnings| earnings.reward);
        self.parts.push((name.into(), Part::Of(Box::new(value))));
        self
    }

    /// One more, whose value comes from elsewhere, such as another process: see [`Parts::earn_given`].
    pub fn given(mut self, name: impl Into<String>) -> Self {
        self.parts.push((name.into(), Part::Given));
        self
    }

    /// What the sample earns, in all and part by part.
    pub fn earn(&self, sample: &Sample) -> Result<Earnings, String> {
        self.earn_given(sample, &BTreeMap::new())
    }

    /// The same, with the values of parts that are given, by name.
    pub fn earn_given(&self, sample: &Sample, given: &BTreeMap<&str, f64>) -> Result<Earnings, String> {
        let mut values = Vec::with_capacity(self.parts.len());
        for (name, part) in &self.parts {
            let value = match part {
                Part::Of(part) => part(sample),
                Part::Given => given.get(name.as_str()).copied().ok_or_else(|| "nobody gave its value".to_owned()),
            };
            let value = value.map_err(|why| format!("its part {name:?}: {why}"))?;
            if !is_reward(value) {
                return Err(format!("its part {name:?} is {value}, not a finite number of at most {REWARD_LIMIT:e} either way"));
            }
            values.push(value);
        }
        let reward = aggregate_vector_rewards(&values, &self.aggregator).map_err(|error| error.to_string())?;
        let names = self.parts.iter().map(|(name, _)| name.clone());
        Ok(Earnings { reward, parts: names.zip(values).collect() })
    }
}

impl fmt::Debug for Parts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.parts.iter().map(|(name, _)| name.as_str()).collect();
        f.debug_struct("Parts").field("parts", &names).field("aggregator", &self.aggregator).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_from_elsewhere_is_a_part_like_any_other() {
        let parts = Parts::new(Aggregator::Sum).part("here", |_: &Sample| 1.0).given("there");
        let earned = parts.earn_given(&Sample::default(), &[("there", 0.5)].into()).unwrap();
        assert_eq!((earned.reward, earned.parts["there"]), (1.5, 0.5));
        assert_eq!(parts.earn(&Sample::default()).unwrap_err(), "its part \"there\": nobody gave its value");
    }

    #[test]
    fn a_part_that_fails_is_named() {
        let parts = Parts::new(Aggregator::Sum).part("good", |_: &Sample| 1.0).part("bad", |_: &Sample| Err::<f64, _>("no key"));
        assert_eq!(parts.earn(&Sample::default()).unwrap_err(), "its part \"bad\": no key");
        let parts = Parts::new(Aggregator::Sum).part("wild", |_: &Sample| f64::NAN);
        assert_eq!(
            parts.earn(&Sample::default()).unwrap_err(),
            "its part \"wild\" is NaN, not a finite number of at most 1e100 either way"
        );
    }
}
