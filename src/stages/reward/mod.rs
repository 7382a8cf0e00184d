//! What an answer is worth.

mod each;
mod score;

pub use each::{OnFailure, Reward, RewardBroken, RewardError};
pub use score::{Earned, Scorers, Scoring, score};
