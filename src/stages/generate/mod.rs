//! Where answers come from.

pub mod agent;
pub(super) mod assembly;
mod batches;
mod by_hand;
mod generator;
#[cfg(feature = "torch")]
mod local;
mod pull;
mod remote;

pub use assembly::{ENVIRONMENT_FAILURE, REFUSED, why_lost};
pub use batches::{Transform, apply_sample_transforms, rollout_batches};
pub use generator::{EngineSettings, Generator};
pub use pull::{GenerateError, RunningGenerator};
