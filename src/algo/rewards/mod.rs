//! Rewards as pure functions of samples. [`Parts`] combines several into one reward with named
//! parts. Those of a text judge [`Sample::last_turn`].

mod aggregate;
mod answer;
mod parts;
mod text;
mod tokens;

use std::fmt::Display;

use serde_json::Value;

pub use aggregate::{Aggregator, Combine, DEFAULT_LEVELS};
pub use answer::{exact_match, exact_reward, math_reward, numeric_reward};
pub use parts::Parts;
pub use text::{format_reward, keywords_reward, regex_reward};
pub use tokens::{length_reward, overlong_reward, repetition_reward};

use crate::data::{RewardParts, Sample, number};

/// A reward that is one number; the error is the reason why the sample has none.
pub type PartReward = Box<dyn Fn(&Sample) -> Result<f64, String> + Send + Sync>;

/// A reward, and the parts that it was made of.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RewardOutput {
    /// The reward that training uses.
    pub reward: f64,
    /// Named values that are logged with it; empty if the reward is one value.
    pub parts: RewardParts,
}

/// Return values of a reward function: a number, a [`RewardOutput`], or a result whose error says
/// why there is no reward.
pub trait IntoReward {
    /// Returns the reward with its parts, or the reason why there is none.
    fn into_reward(self) -> Result<RewardOutput, String>;
}

impl IntoReward for f64 {
    fn into_reward(self) -> Result<RewardOutput, String> {
        Ok(RewardOutput { reward: self, parts: RewardParts::new() })
    }
}

impl IntoReward for RewardOutput {
    fn into_reward(self) -> Result<RewardOutput, String> {
        Ok(self)
    }
}

impl<R: IntoReward, E: Display> IntoReward for Result<R, E> {
    fn into_reward(self) -> Result<RewardOutput, String> {
        self.map_err(|error| format!("{error:#}"))?.into_reward()
    }
}

/// The environment's grade of a rollout and the rewards of its turns, however the rollout ended.
/// Fails if the environment gave no grade.
pub fn environment_reward() -> PartReward {
    Box::new(|sample| {
        let value = |key: &str| sample.metadata.get(key);
        value("environment_reward").and_then(number::from_json).ok_or_else(|| {
            let why = value("environment_failure").and_then(Value::as_str).unwrap_or("it has not seen this sample");
            format!("the environment gave no grade: {why}")
        })
    })
}

/// Returns the prompt's reference answer, or an error if it has none.
fn reference_answer(sample: &Sample) -> Result<&str, String> {
    sample.answer().ok_or_else(|| "the prompt has no ground truth, metadata[\"answer\"]".to_owned())
}
