//! What an answer is worth.

mod each;
mod score;
#[cfg(feature = "torch")]
mod scorer;

pub use crate::algo::rewards::{Earned, Earnings};
pub use each::{OnFailure, Reward, RewardBroken, RewardError};
pub use score::{Scorers, Scoring, score};
#[cfg(feature = "torch")]
pub use scorer::{Scorer, ScoringError};
