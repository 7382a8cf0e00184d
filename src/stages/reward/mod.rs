//! The reward stage: [`Reward`] calls a function per sample, [`RemoteReward`] asks other processes.

#[cfg(unix)]
mod code;
mod each;
mod failures;
mod model;
mod remote;
mod score;
#[cfg(feature = "torch")]
mod scorer;

pub use crate::algo::rewards::{IntoReward, RewardOutput};
#[cfg(unix)]
pub use code::{CodeReward, CodeRule, CodeScore};
pub use each::Reward;
pub use failures::{FailurePolicy, OnFailure, OnLostSample, RewardBroken, RewardError};
pub(crate) use failures::{MAX_POISONED, RETRIES};
pub use model::ModelRule;
pub use remote::{RemoteReward, RemoteScorer};
pub use score::{Scorers, Scoring, score};
#[cfg(feature = "torch")]
pub use scorer::{Scorer, ScoringError};
