//! Where answers come from.

#[cfg(feature = "torch")]
mod assembly;
mod batches;
#[cfg(feature = "torch")]
mod local;

pub use batches::{Transform, apply_sample_transforms, rollout_batches};
#[cfg(feature = "torch")]
pub use local::Generator;
