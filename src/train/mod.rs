//! Training: collation of samples, training backends, optimizer, checkpoints.
//!
//! A [`TrainingBackend`] takes commands and returns [`TrainFuture`]s. Supervised and reinforcement
//! learning use the same backend with different losses. `LocalBackend` trains in this process on
//! libtorch; everything else builds without it.

mod adamw;
mod algorithm;
mod backend;
pub(crate) mod background;
pub mod checkpoint;
mod choices;
mod collate;
mod commands;
mod error;
mod future;
#[cfg(feature = "torch")]
mod groups;
#[cfg(feature = "torch")]
mod head;
#[cfg(feature = "torch")]
mod loading;
#[cfg(feature = "torch")]
mod local;
#[cfg(feature = "torch")]
mod moments;
#[cfg(feature = "torch")]
mod optimizer;
#[cfg(feature = "torch")]
mod optimizer_files;
#[cfg(feature = "torch")]
mod passes;
#[cfg(feature = "torch")]
mod policy;
mod prepare;
mod probe;
#[cfg(feature = "torch")]
mod replica;
#[cfg(feature = "torch")]
mod rounding;
#[cfg(feature = "torch")]
mod saving;
#[cfg(feature = "torch")]
mod scorer;
#[cfg(feature = "torch")]
mod shards;
#[cfg(feature = "torch")]
mod side_by_side;
mod simulated;
#[cfg(feature = "torch")]
mod state;
mod supervised;
#[cfg(feature = "torch")]
mod team;
pub mod tinker;
#[cfg(feature = "torch")]
mod worker;

pub use adamw::{AdamW, clip_scale, norm};
pub use algorithm::{Algorithm, AlgorithmKey};
pub use backend::{
    BackendState, ForwardBackward, OptimStep, RouterMismatch, SaveCheckpoint, SavedCheckpoint, Snapshot, TokenScores,
    TrainingBackend,
};
pub use checkpoint::{CheckpointMetadata, FileMark};
pub use choices::{DecayScope, LrScale, MasterFormat, MomentFormat, NonFinitePolicy, RouterReplay};
pub(crate) use collate::name_of;
pub use collate::{AtTeacher, TeacherColumn, TrainBatch, TrainSequence, collate, collate_in, collate_part};
pub use error::TrainError;
pub use future::{TrainFuture, promise};
#[cfg(feature = "torch")]
pub use local::{LocalBackend, LocalConfig, companions, follow};
#[cfg(feature = "torch")]
pub use policy::{LoadedModel, Policy, ScoreModel, score_pair, score_sample, tokenizer_folder};
pub use prepare::assign_advantages;
pub(crate) use prepare::{TokenColumn, assign_advantages_of, continues, token_advantages, token_rewards};
pub use probe::probe;
#[cfg(feature = "torch")]
pub use scorer::Scorer;
pub use simulated::SimulatedBackend;
pub use supervised::{SftConfig, run_sft_training};
#[cfg(feature = "torch")]
pub use team::{MakeAlgorithm, TrainerRanks};
