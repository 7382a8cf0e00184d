//! Several named rewards that become one; each is logged by its name.

use std::collections::BTreeMap;
use std::fmt;

use super::aggregate::Aggregator;
use super::{IntoReward, PartReward, RewardOutput};
use crate::data::{REWARD_LIMIT, Sample, is_reward};

/// Named parts of a reward, and how they become one value. If a part fails, the reward fails with
/// the part's name.
///
/// ```
/// use rollflow::algo::rewards::{Aggregator, Parts, format_reward, keywords_reward};
/// use rollflow::prelude::*;
///
/// let parts = Parts::new(Aggregator::weighted([1.0, 0.2]))
///     .part("form", format_reward(&["think", "answer"])?)
///     .part("units", keywords_reward(&["cm", "kg"])?);
/// let sample = Sample { response: "<think>5 kg</think><answer>5</answer>".into(), ..Sample::default() };
/// let output = parts.reward(&sample)?;
/// assert_eq!((output.reward, output.parts["form"], output.parts["units"]), (1.1, 1.0, 0.5));
///
/// let stage = Reward::each(move |sample: &Sample| parts.reward(sample)); // logs each part
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Default)]
pub struct Parts {
    /// Each part's name and function; `None` if its value comes from another process.
    parts: Vec<(String, Option<PartReward>)>,
    aggregator: Aggregator,
}

impl Parts {
    /// Creates a reward without parts. Weights and thresholds of `aggregator` are in the order in
    /// which parts are added.
    pub fn new(aggregator: Aggregator) -> Self {
        Parts { parts: Vec::new(), aggregator }
    }

    /// Adds a part. If two parts have the same name, the value of the later one is logged.
    pub fn part<R: IntoReward>(mut self, name: impl Into<String>, reward: impl Fn(&Sample) -> R + Send + Sync + 'static) -> Self {
        let value = move |sample: &Sample| reward(sample).into_reward().map(|output| output.reward);
        self.parts.push((name.into(), Some(Box::new(value))));
        self
    }

    /// Adds a part whose value comes from another process: see [`Parts::reward_with`].
    pub fn remote(mut self, name: impl Into<String>) -> Self {
        self.parts.push((name.into(), None));
        self
    }

    /// Computes the sample's reward and its parts.
    pub fn reward(&self, sample: &Sample) -> Result<RewardOutput, String> {
        self.reward_with(sample, &BTreeMap::new())
    }

    /// Computes the sample's reward from its parts, with the values of [remote](Parts::remote) parts
    /// by name. A part whose value is `None` does not apply to the sample: see
    /// [`Aggregator::aggregate_given`].
    pub fn reward_with(&self, sample: &Sample, remote: &BTreeMap<&str, Option<f64>>) -> Result<RewardOutput, String> {
        let mut values = Vec::with_capacity(self.parts.len());
        for (name, part) in &self.parts {
            let value = match part {
                Some(part) => part(sample).map(Some),
                None => remote.get(name.as_str()).copied().ok_or_else(|| "no service gave its value".to_owned()),
            };
            let value = value.map_err(|why| format!("its part {name:?}: {why}"))?;
            if let Some(value) = value.filter(|value| !is_reward(*value)) {
                return Err(format!("its part {name:?} is {value}, not a finite number of at most {REWARD_LIMIT:e} either way"));
            }
            values.push(value);
        }
        let reward = self.aggregator.aggregate_given(&values)?;
        let parts = self.parts.iter().zip(values).filter_map(|((name, _), value)| Some((name.clone(), value?)));
        Ok(RewardOutput { reward, parts: parts.collect() })
    }
}

impl fmt::Debug for Parts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.parts.iter().map(|(name, _)| name.as_str()).collect();
        f.debug_struct("Parts").field("parts", &names).field("aggregator", &self.aggregator).finish()
    }
}
