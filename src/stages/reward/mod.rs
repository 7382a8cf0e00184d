//! What an answer is worth: [`Reward`] asks closures, [`ServedReward`] asks other processes.

mod each;
mod score;
mod served;
pub mod service;
mod settle;

pub use crate::algo::rewards::{Earned, Earnings};
pub use each::Reward;
pub use score::{Scorers, Scoring, score};
pub use served::{Served, ServedReward};
pub use settle::{OnFailure, RewardBroken, RewardError};
