//! Training: samples collated into batches, backends that learn from them, checkpoints.
//!
//! [`TrainingBackend`] is the seam: commands go in, [`TrainFuture`]s come out, and supervised and reinforcement learning use the same
//! backend with different losses. `LocalBackend` trains in this process on libtorch; everything else here is plain data and builds
//! without it.

mod adamw;
mod algorithm;
mod backend;
pub mod checkpoint;
mod choices;
mod collate;
#[cfg(feature = "torch")]
mod finite;
mod future;
#[cfg(feature = "torch")]
mod groups;
#[cfg(feature = "torch")]
mod head;
#[cfg(feature = "torch")]
mod local;
mod objective;
#[cfg(feature = "torch")]
mod optimizer;
mod ppo;
mod prepare;
mod probe;
#[cfg(feature = "torch")]
mod replica;
#[cfg(feature = "torch")]
mod scorer;
#[cfg(feature = "torch")]
mod side_by_side;
mod simulated;
mod supervised;
#[cfg(feature = "torch")]
mod worker;

pub use adamw::{AdamW, Moments, Real, clip_scale, norm};
pub use algorithm::Algorithm;
pub use backend::{BackendState, ForwardBackward, OptimStep, SaveCheckpoint, Snapshot, TrainError, TrainingBackend, Update};
pub use checkpoint::{CheckpointError, CheckpointMetadata, FileMark};
pub use choices::{DecayScope, NonFinitePolicy};
pub use collate::{
    CollateError, PackedColumns, SampleId, TrainBatch, TrainSequence, collate, collate_batch, collate_in, collate_part,
};
pub use future::{Promise, TrainFuture, promise};
#[cfg(feature = "torch")]
pub use groups::{LrScale, NoSuchGroup, ParamGroups};
#[cfg(feature = "torch")]
pub use local::{LocalBackend, LocalConfig, companions};
pub use objective::{Objective, ObjectiveError, compute_grpo_loss, grpo_loss, objective};
pub use ppo::{TokenColumn, compute_ppo_advantages, token_advantages, token_rewards};
pub use prepare::{PrepareError, assign_advantages, assign_advantages_of, prepare_grpo_batch, prepare_sft_batch};
pub use probe::{ProbeError, probe};
#[cfg(feature = "torch")]
pub use scorer::Scorer;
pub use simulated::SimulatedBackend;
pub use supervised::{SftConfig, SftError, SftStep, run_sft_training};
