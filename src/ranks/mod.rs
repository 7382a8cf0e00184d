//! The processes of one training run: their places, and torch's collectives between them.
//!
//! Collectives and rendezvous are torch's own (c10d: `TCPStore`, Gloo, NCCL on GPUs), started by
//! torchrun's conventions, so that torchrun, Slurm, Kubernetes and MPI start a run unchanged.
//!
//! Rank 0 holds the graph, the ledger, the versions and the logs. The other ranks follow it: a
//! [`Member`] of each process compares itself with the others, starts what rank 0 starts, and
//! notices when a process is gone.

#[cfg(feature = "torch")]
mod device;
#[cfg(feature = "torch")]
mod group;
#[cfg(feature = "torch")]
pub(crate) mod meeting;
#[cfg(feature = "torch")]
mod member;
#[cfg(feature = "torch")]
mod mesh;
#[cfg(feature = "torch")]
mod partition;
#[cfg(feature = "torch")]
mod place;
mod settings;
#[cfg(feature = "torch")]
mod start;
#[cfg(feature = "torch")]
mod watch;

#[cfg(feature = "torch")]
pub(crate) use device::{DeviceGroups, groups as device_groups};
#[cfg(feature = "torch")]
pub use group::{CollectiveError, Group, Pending, Signals, Store};
#[cfg(feature = "torch")]
pub use member::{Member, Order, Rendezvous};
#[cfg(feature = "torch")]
pub use mesh::Mesh;
#[cfg(feature = "torch")]
pub use partition::Partition;
#[cfg(feature = "torch")]
pub use place::Place;
pub use settings::{Ranks, Shard};

/// A rank that cannot start, or that failed.
#[cfg(feature = "torch")]
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RankError {
    /// The launcher's variables; one text each.
    #[error("the launcher's variables do not name this rank: {}", .0.join("; "))]
    Variables(Vec<String>),
    /// The port of the ranks' store is taken.
    #[error(
        "port {0} of this host is in use, so that rank 0 cannot serve the ranks' store there; set MASTER_PORT to a free one \
         on every rank, or end the run that has it"
    )]
    Port(u16),
    /// The store of rank 0 is not there: rank, host and port, and torch's reason.
    #[error(
        "rank {0} found no store of this run at {1}:{2}: {3}; check that rank 0 runs, and that MASTER_ADDR and MASTER_PORT \
         are the same on every rank"
    )]
    NoStore(usize, String, u16, String),
    /// Ranks that cannot be arranged as copies of divided state.
    #[error(
        "ranks.replicas is {copies}, and there are {size} ranks: each copy of the state is divided among as many; start a \
         multiple of {copies} ranks, or change ranks.replicas"
    )]
    Mesh {
        /// Number of ranks.
        size: usize,
        /// Number of copies.
        copies: usize,
    },
    /// Ranks that are missing, or that differ from rank 0; one text each.
    #[error("the ranks cannot run together: {}", .0.join("; "))]
    Apart(Vec<String>),
    /// The run ends, for a reason that names the rank.
    #[error("{0}")]
    Ended(String),
    /// A collective or the store failed.
    #[error(transparent)]
    Collective(#[from] CollectiveError),
}
