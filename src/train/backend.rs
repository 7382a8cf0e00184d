//! What a training backend is: commands are submitted, answers awaited.
//!
//! Submission order is execution order. Gradients accumulate over `forward_backward` until `optim_step`. A failed command poisons
//! the backend: what follows is refused with the first cause, so that no half-done step is built upon. Saving and scoring read only, and
//! their failure poisons nothing.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::{CheckpointError, CheckpointMetadata, TrainBatch, TrainFuture};
use crate::algo::{LogProbGap, LossError, LossMetrics, Schedule};
use crate::data::Version;

/// Trains one model. `Weights` is what it publishes: whatever its generators read.
pub trait TrainingBackend: Send + Sync {
    /// A published copy of the weights.
    type Weights: Send + Sync + 'static;

    /// Adds the batch's gradient to what has accumulated.
    fn forward_backward(&self, batch: Arc<TrainBatch>) -> TrainFuture<ForwardBackward>;

    /// Log-probabilities of the batch's trained tokens under the weights as they are, one list per sequence; of a model whose head gives
    /// one number, the scores at the rows that predict those tokens. Changes nothing.
    fn score(&self, batch: Arc<TrainBatch>) -> TrainFuture<Vec<Vec<f64>>>;

    /// Updates the weights by the accumulated gradient and clears it.
    fn optim_step(&self) -> TrainFuture<OptimStep> {
        self.update(Update::default())
    }

    /// The same in another way than its own.
    fn update(&self, update: Update) -> TrainFuture<OptimStep>;

    /// Whether its loss may be given a batch in parts as they come ([`Loss::is_sum`](crate::algo::Loss::is_sum)).
    fn takes_parts(&self) -> bool {
        false
    }

    /// Copies the weights for generators and counts one publish (law V1): versions run 1, 2, … and are never reused.
    fn snapshot(&self) -> TrainFuture<Snapshot<Self::Weights>>;

    /// The weights as they are under the version they were published last, to be announced again after a resume.
    fn current(&self) -> TrainFuture<Snapshot<Self::Weights>>;

    /// Replaces the weights; optimizer, step and version stay.
    fn load_weights(&self, weights: Arc<Self::Weights>) -> TrainFuture<()>;

    /// Writes everything that training needs to continue. The folder exists and is complete when this answers.
    fn save_checkpoint(&self, request: SaveCheckpoint) -> TrainFuture<PathBuf>;

    /// Restores weights, optimizer, step and version from a folder that `save_checkpoint` wrote.
    fn load_checkpoint(&self, folder: &Path) -> TrainFuture<CheckpointMetadata>;

    /// How things stand, without waiting.
    fn state(&self) -> BackendState;
}

/// What `forward_backward` saw. Sequences that took no pass, because their advantages are all zero and the loss has no other term, count in
/// `saved_tokens` alone: entropy, gap and counts are over what was computed. Loss and gradient are the same to the bit either way.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ForwardBackward {
    /// The batch's share of the optimizer batch's loss.
    pub loss: f64,
    /// Norm of the gradient accumulated so far.
    pub grad_norm: f64,
    /// Trained tokens that were computed.
    pub tokens: usize,
    /// Tokens read, prompts included.
    pub input_tokens: usize,
    /// Tokens that did not have to be read, prompts included.
    pub saved_tokens: usize,
    /// Micro-batches it was cut into.
    pub micro_batches: usize,
    /// Mean entropy at trained tokens.
    pub entropy: f64,
    /// Trainer against generator (law N3), over the tokens that a policy sampled.
    pub gap: LogProbGap,
    /// What the loss counted.
    pub metrics: LossMetrics,
    /// Why the batch will not be learned from, where the policy is to skip (law N4).
    pub skipped: Option<String>,
}

impl ForwardBackward {
    /// Adds what another part of the same optimizer batch saw; the later part has seen the gradient of both.
    pub fn merge(&mut self, other: ForwardBackward) {
        let tokens = self.tokens + other.tokens;
        let entropy = self.entropy * self.tokens as f64 + other.entropy * other.tokens as f64;
        self.entropy = entropy / tokens.max(1) as f64;
        self.tokens = tokens;
        self.loss += other.loss;
        self.grad_norm = other.grad_norm;
        self.input_tokens += other.input_tokens;
        self.saved_tokens += other.saved_tokens;
        self.micro_batches += other.micro_batches;
        self.gap.merge(&other.gap);
        self.metrics.merge(&other.metrics);
        self.skipped = self.skipped.take().or(other.skipped);
    }

    /// With `scale` times the loss and its gradient.
    pub fn scaled(mut self, scale: f64) -> Self {
        self.loss *= scale;
        self.grad_norm *= scale;
        self.metrics.policy_loss *= scale;
        self.metrics.nll = self.metrics.nll.map(|nll| nll * scale);
        self
    }
}

/// How an update is made, where it is not as the backend would make it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Update {
    /// What the gradient is multiplied by first: 1, unless it was accumulated before its denominator was known
    /// ([`collate_part`](super::collate_part)). Norms are those of the scaled gradient.
    pub scale: f64,
    /// Where its learning rate is taken from.
    pub schedule: Option<Schedule>,
}

impl Default for Update {
    fn default() -> Self {
        Update { scale: 1.0, schedule: None }
    }
}

/// What `optim_step` did.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OptimStep {
    /// Updates so far: 1 after the first.
    pub step: u64,
    /// The rate of this update.
    pub lr: f64,
    /// Norm of the gradient as it came.
    pub grad_norm: f64,
    /// Norm after clipping.
    pub grad_norm_clipped: f64,
    /// Why no update was made, where the policy is to skip (law N4). `step` then stands still.
    pub skipped: Option<String>,
}

/// A published copy of the weights.
#[derive(Debug)]
pub struct Snapshot<W> {
    /// Which publish this is.
    pub version: Version,
    /// Updates that these weights have seen.
    pub step: u64,
    /// The copy.
    pub weights: Arc<W>,
}

impl<W> Clone for Snapshot<W> {
    fn clone(&self) -> Self {
        Snapshot { version: self.version, step: self.step, weights: self.weights.clone() }
    }
}

/// Where to save, and what to write down beside the weights.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SaveCheckpoint {
    /// The run's folder; the checkpoint becomes `checkpoints/step_000123` in it.
    pub run_folder: PathBuf,
    /// The step to name it by.
    pub step: u64,
    /// Numbers for `metadata.json`.
    pub metrics: BTreeMap<String, f64>,
    /// Further files, by name.
    pub files: BTreeMap<String, Vec<u8>>,
    /// Folders that lie beside the run's on one disk and are moved into the checkpoint, by the name that they get there.
    pub folders: BTreeMap<String, PathBuf>,
}

/// How a backend stands.
#[derive(Clone, Debug, Default)]
pub struct BackendState {
    /// Updates made.
    pub step: u64,
    /// Publishes made (law V1).
    pub weight_version: Version,
    /// Rate of the next update.
    pub lr: f64,
    /// Trainable numbers.
    pub parameters: usize,
    /// Precision of the weights, as `float32`.
    pub dtype: &'static str,
    /// Where they live, as `cpu` or `cuda:0`.
    pub device: String,
    /// The first failure, after which nothing but saving is done.
    pub poisoned: Option<TrainError>,
}

/// A command that failed.
#[derive(Clone, Debug, thiserror::Error)]
pub enum TrainError {
    /// An earlier command failed.
    #[error("the trainer refuses further work because an earlier command failed: {cause}; load a checkpoint into a new backend")]
    Poisoned {
        /// The first failure.
        cause: Arc<TrainError>,
    },
    /// NaN or infinity where a number must be (law N4).
    #[error("{what} is not finite; it comes from {}", names.join(", "))]
    NonFinite {
        /// Which quantity.
        what: &'static str,
        /// Samples or tensors.
        names: Vec<String>,
    },
    /// The loss couldn't work with the batch.
    #[error(transparent)]
    Loss(#[from] LossError),
    /// `optim_step` without a gradient.
    #[error("optim_step came before any forward_backward: there is no gradient")]
    NoGradient,
    /// A batch without trained tokens.
    #[error("the batch has no token to train on")]
    EmptyBatch,
    /// Weights of another model.
    #[error("these weights are another model's; differing tensors: {}", tensors.join(", "))]
    Shape {
        /// The tensors, with both shapes.
        tensors: Vec<String>,
    },
    /// Saving or loading failed.
    #[error(transparent)]
    Checkpoint(Arc<CheckpointError>),
    /// The tensor library failed.
    #[error("the tensor library failed: {0}")]
    Tensor(String),
    /// The backend's thread is gone.
    #[error("the trainer ended before it answered")]
    Ended,
}

impl From<CheckpointError> for TrainError {
    fn from(error: CheckpointError) -> Self {
        TrainError::Checkpoint(Arc::new(error))
    }
}
