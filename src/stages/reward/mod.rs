//! What an answer is worth: [`Reward`] asks closures, [`ServedReward`] asks other processes.

#[cfg(unix)]
mod code;
mod each;
mod score;
#[cfg(feature = "torch")]
mod scorer;
mod served;
pub mod service;
mod settle;

pub use crate::algo::rewards::{Earned, Earnings};
#[cfg(unix)]
pub use code::{CodeReward, CodeScore};
pub use each::Reward;
pub use score::{Scorers, Scoring, score};
#[cfg(feature = "torch")]
pub use scorer::{Scorer, ScoringError};
pub use served::{Served, ServedReward};
pub use settle::{OnFailure, OnLostSample, RewardBroken, RewardError};
