//! The reward stage: [`Reward`] calls a function per sample, [`RemoteReward`] asks other processes.

#[cfg(unix)]
mod code;
mod each;
mod failures;
mod remote;
#[cfg(feature = "torch")]
mod scorer;

use std::path::PathBuf;

pub use crate::algo::rewards::{IntoReward, RewardOutput};
#[cfg(unix)]
pub use code::{CodeReward, CodeRule, CodeScore};
pub use each::{Reward, score};
pub use failures::{FailurePolicy, OnFailure, OnLostSample};
pub(crate) use failures::{MAX_POISONED, RETRIES};
pub use remote::RemoteReward;
#[cfg(feature = "torch")]
pub use scorer::Scorer;

use crate::settings::declare::section;
use crate::settings::setting::{NOT_NEGATIVE, PATH_GIVEN, SOME};

section! {
    /// A reward model scores prompt and completion, in its own tokens. How the completion ended is
    /// not part of the text.
    pub struct ModelRule {
        /// A Hugging Face folder of a sequence classifier with one label, relative to where the command runs.
        path: PathBuf = PathBuf::new(), PATH_GIVEN;
        /// Penalty on the score of a completion that did not end by itself.
        missing_end_penalty: f64 = 0.0, NOT_NEGATIVE;
        /// Threads that score.
        threads: usize = 1, SOME;
    }
}
