//! Training: collation of samples, training backends, optimizer, checkpoints.
//!
//! A [`TrainingBackend`] takes commands and returns [`TrainFuture`]s. Supervised and reinforcement
//! learning use the same backend with different losses. `LocalBackend` trains in this process on
//! libtorch; everything else builds without it.

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
#[cfg(feature = "torch")]
mod optimizer;
#[cfg(feature = "torch")]
mod policy;
mod ppo;
mod prepare;
mod probe;
#[cfg(feature = "torch")]
mod replica;
#[cfg(feature = "torch")]
mod score_model;
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
pub use choices::{DecayScope, LrScale, NonFinitePolicy};
pub use collate::{
    BatchError, PackedColumns, SampleId, TrainBatch, TrainSequence, collate, collate_batch, collate_in, collate_part,
};
pub use future::{Promise, TrainFuture, promise};
#[cfg(feature = "torch")]
pub use groups::ParamGroups;
#[cfg(feature = "torch")]
pub use local::{LocalBackend, LocalConfig, companions};
#[cfg(feature = "torch")]
pub use policy::{LoadError, Policy, tokenizer_folder};
pub(crate) use ppo::{TokenColumn, token_advantages, token_rewards};
pub use prepare::assign_advantages;
pub(crate) use prepare::assign_advantages_of;
pub use probe::{ProbeError, probe};
#[cfg(feature = "torch")]
pub use score_model::{ScoreModel, TextError, TextReader};
#[cfg(feature = "torch")]
pub use scorer::Scorer;
pub use simulated::SimulatedBackend;
pub use supervised::{SftConfig, SftError, SftStep, run_sft_training};
