//! The processes of one training run: their places, and torch's collectives between them.
//!
//! Collectives and rendezvous are torch's own (c10d: `TCPStore`, Gloo on CPUs), started by
//! torchrun's conventions, so that torchrun, Slurm, Kubernetes and MPI start a run unchanged.

mod group;
mod partition;
mod place;

pub use group::{CollectiveError, Group, Pending, Store};
pub use partition::Partition;
pub use place::Place;

/// A rank that cannot start, or that failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RankError {
    /// The launcher's variables; one text each.
    #[error("the launcher's variables do not name this rank: {}", .0.join("; "))]
    Variables(Vec<String>),
    /// A collective or the store failed.
    #[error(transparent)]
    Collective(#[from] CollectiveError),
}
