//! The return value of a reward.

use std::fmt::Display;

use crate::data::RewardParts;

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
