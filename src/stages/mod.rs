//! Stages of a training graph: one folder a role, one file an implementation, each thin around
//! `data`, `algo`, `engine`, `train` and `rollout`.
//!
//! In the order of a pipeline: [`source`] → [`generate`] → [`reward`] → [`filter`] → [`pairs`] →
//! [`reference`](mod@reference) → [`batch`] → [`train`] → [`sync`] → [`evaluate`] → [`sink`], with
//! [`Admission`](crate::rollout::Admission) deciding when a prompt may enter.

use tokio::task::spawn_blocking;

pub mod batch;
pub mod evaluate;
pub mod filter;
pub mod generate;
pub mod pairs;
pub mod reference;
pub mod reward;
pub mod sink;
pub mod source;
pub mod sync;
pub mod train;

/// Runs `work` where it may block, off the runtime's threads, and passes its panic on.
async fn unblocked<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    spawn_blocking(work).await.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()))
}
