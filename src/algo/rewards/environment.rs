//! The environment's grade of a rollout as a reward.

use serde_json::Value;

use super::rule::PartReward;
use crate::data::number;

/// Builds the reward: the environment's grade and the rewards of its turns, however the rollout
/// ended. Fails if the environment gave no grade.
pub fn environment_reward() -> PartReward {
    Box::new(|sample| {
        let value = |key: &str| sample.metadata.get(key);
        value("environment_reward").and_then(number::from_json).ok_or_else(|| {
            let why = value("environment_failure").and_then(Value::as_str).unwrap_or("it has not seen this sample");
            format!("the environment gave no grade: {why}")
        })
    })
}
