//! What an answer is worth.

mod each;
mod score;

pub use crate::algo::rewards::{Earned, Earnings};
pub use each::{OnFailure, Reward, RewardBroken, RewardError};
pub use score::{Scorers, Scoring, score};
