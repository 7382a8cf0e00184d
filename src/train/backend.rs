//! Training backends: commands are submitted, results awaited.
//!
//! Commands run in submission order. Gradients accumulate over `forward_backward` until
//! `optim_step`. A failed command poisons the backend: later ones fail with the first cause. Saving
//! and scoring are read-only, and their failure poisons nothing.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::{Algorithm, CheckpointMetadata, TrainBatch, TrainError, TrainFuture};
use crate::algo::{LogProbGap, LossMetrics, Schedule};
use crate::data::Version;

/// Trains one model. `Weights` is the type that it publishes and generators read.
pub trait TrainingBackend: Send + Sync {
    /// A published copy of the weights.
    type Weights: Send + Sync + 'static;

    /// Accumulates the batch's gradient.
    fn forward_backward(&self, batch: Arc<TrainBatch>) -> TrainFuture<ForwardBackward>;

    /// Log-probabilities of the batch's trained tokens under the current weights, one list per
    /// sequence. With a score head, the scores at the rows that predict those tokens. Read-only.
    fn score(&self, batch: Arc<TrainBatch>) -> TrainFuture<Vec<Vec<f64>>>;

    /// Updates the weights by the accumulated gradient and clears it.
    fn optim_step(&self) -> TrainFuture<OptimStep> {
        self.update(1.0, None)
    }

    /// [`TrainingBackend::optim_step`] with the gradient times `scale`, and with this learning-rate
    /// schedule instead of the backend's. Norms are of the scaled gradient. `scale` is not 1 if the
    /// gradient was accumulated before its denominator was known
    /// ([`collate_part`](super::collate_part)).
    fn update(&self, scale: f64, schedule: Option<Schedule>) -> TrainFuture<OptimStep>;

    /// Returns true if it trains on a batch in parts by this algorithm, or by its own
    /// ([`Loss::is_sum`](crate::algo::Loss::is_sum)).
    fn takes_parts(&self, algorithm: Option<&Algorithm>) -> bool {
        algorithm.is_some_and(Algorithm::takes_parts)
    }

    /// Copies the weights for generators and increments the version (law V1): 1, 2, …, never
    /// reused.
    fn snapshot(&self) -> TrainFuture<Snapshot<Self::Weights>>;

    /// Current weights under the version last published, for the first publish after a resume.
    fn current(&self) -> TrainFuture<Snapshot<Self::Weights>>;

    /// Replaces the weights; optimizer, step and version stay.
    fn load_weights(&self, weights: Arc<Self::Weights>) -> TrainFuture<()>;

    /// Copies the state, then writes a complete checkpoint while later commands run.
    fn save_checkpoint(&self, request: SaveCheckpoint) -> SavedCheckpoint;

    /// Restores weights, optimizer, step and version from a folder that `save_checkpoint` wrote.
    fn load_checkpoint(&self, folder: &Path) -> TrainFuture<CheckpointMetadata>;

    /// Current state, without waiting.
    fn state(&self) -> BackendState;
}

/// A backend that is used elsewhere, too, such as for its weights after the run.
impl<B: TrainingBackend + ?Sized> TrainingBackend for Arc<B> {
    type Weights = B::Weights;

    fn forward_backward(&self, batch: Arc<TrainBatch>) -> TrainFuture<ForwardBackward> {
        (**self).forward_backward(batch)
    }

    fn score(&self, batch: Arc<TrainBatch>) -> TrainFuture<Vec<Vec<f64>>> {
        (**self).score(batch)
    }

    fn optim_step(&self) -> TrainFuture<OptimStep> {
        (**self).optim_step()
    }

    fn update(&self, scale: f64, schedule: Option<Schedule>) -> TrainFuture<OptimStep> {
        (**self).update(scale, schedule)
    }

    fn takes_parts(&self, algorithm: Option<&Algorithm>) -> bool {
        (**self).takes_parts(algorithm)
    }

    fn snapshot(&self) -> TrainFuture<Snapshot<Self::Weights>> {
        (**self).snapshot()
    }

    fn current(&self) -> TrainFuture<Snapshot<Self::Weights>> {
        (**self).current()
    }

    fn load_weights(&self, weights: Arc<Self::Weights>) -> TrainFuture<()> {
        (**self).load_weights(weights)
    }

    fn save_checkpoint(&self, request: SaveCheckpoint) -> SavedCheckpoint {
        (**self).save_checkpoint(request)
    }

    fn load_checkpoint(&self, folder: &Path) -> TrainFuture<CheckpointMetadata> {
        (**self).load_checkpoint(folder)
    }

    fn state(&self) -> BackendState {
        (**self).state()
    }
}

/// Result of `forward_backward`. Sequences that were skipped for zero advantage count in
/// `saved_tokens` only; entropy, gap and counts cover the computed ones. Loss and gradient are bit
/// for bit the same either way.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ForwardBackward {
    /// The batch's share of the optimizer batch's loss.
    pub loss: f64,
    /// Trained tokens that were computed.
    pub tokens: usize,
    /// Tokens read, prompts included.
    pub input_tokens: usize,
    /// Tokens that did not have to be read, prompts included.
    pub saved_tokens: usize,
    /// Micro-batches it was cut into.
    pub micro_batches: usize,
    /// Mean entropy at trained tokens; NaN if the backend can't know it.
    pub entropy: f64,
    /// Trainer against generator (law N3), over the tokens that a policy sampled.
    pub gap: LogProbGap,
    /// The part of the loss that spreads tokens over experts, if the trainer has one.
    pub router_loss: Option<f64>,
    /// The generator's routing against the trainer's, if that is wanted and known.
    pub router_mismatch: RouterMismatch,
    /// Counts of the loss.
    pub metrics: LossMetrics,
    /// The trainer's numbers of every token, if the batch asked for them ([`TrainBatch::scored`]).
    pub scores: Vec<TokenScores>,
    /// Reason to skip the step, if the policy is to skip (law N4).
    pub skipped: Option<String>,
}

/// The trainer's numbers of one sequence's trained tokens, one entry per token.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TokenScores {
    /// Id of the source sample's group.
    pub group: u64,
    /// Index of the source sample in its group.
    pub index: u32,
    /// Part of the source sample in its rollout.
    pub part: u32,
    /// Places of the tokens in the sample, prompt included.
    pub positions: Vec<usize>,
    /// Log-probabilities before the update, in nats.
    pub log_probs: Vec<f32>,
    /// Entropies of the distributions that predict the tokens, in nats; empty if the backend can't know
    /// them.
    pub entropies: Vec<f32>,
}

/// Experts that computed tokens in the generator, over all sparse layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RouterMismatch {
    /// Those that the trainer's routers do not choose.
    pub other: u64,
    /// All that are known.
    pub all: u64,
}

impl RouterMismatch {
    /// Adds those of other tokens.
    pub fn merge(&mut self, more: RouterMismatch) {
        self.other += more.other;
        self.all += more.all;
    }

    /// The share that the trainer's routers do not choose; `None` if no experts are known.
    pub fn share(&self) -> Option<f64> {
        (self.all > 0).then(|| self.other as f64 / self.all as f64)
    }
}

impl ForwardBackward {
    /// Adds the result of a later part of the same optimizer batch.
    pub fn merge(&mut self, other: ForwardBackward) {
        let tokens = self.tokens + other.tokens;
        let entropy = self.entropy * self.tokens as f64 + other.entropy * other.tokens as f64;
        self.entropy = entropy / tokens.max(1) as f64;
        self.tokens = tokens;
        self.loss += other.loss;
        self.router_loss = self.router_loss.map(|own| own + other.router_loss.unwrap_or(0.0)).or(other.router_loss);
        self.router_mismatch.merge(other.router_mismatch);
        self.input_tokens += other.input_tokens;
        self.saved_tokens += other.saved_tokens;
        self.micro_batches += other.micro_batches;
        self.gap.merge(&other.gap);
        self.metrics.merge(&other.metrics);
        self.scores.extend(other.scores);
        self.skipped = self.skipped.take().or(other.skipped);
    }

    /// Multiplies the loss by `scale`.
    pub fn scaled(mut self, scale: f64) -> Self {
        self.loss *= scale;
        self.router_loss = self.router_loss.map(|loss| loss * scale);
        self.metrics.policy_loss *= scale;
        self.metrics.nll = self.metrics.nll.map(|nll| nll * scale);
        self
    }
}

/// Result of `optim_step`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OptimStep {
    /// Updates so far: 1 after the first.
    pub step: u64,
    /// The rate of this update.
    pub lr: f64,
    /// Norm of the gradient as it came; NaN if the backend can't know it.
    pub grad_norm: f64,
    /// Norm after clipping; NaN if the backend can't know it.
    pub grad_norm_clipped: f64,
    /// Reason for which no update was made, if the policy is to skip (law N4). `step` is unchanged
    /// then.
    pub skipped: Option<String>,
}

/// A published copy of the weights.
#[derive(Debug)]
pub struct Snapshot<W> {
    /// Number of this publish.
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

/// Request for a checkpoint.
#[derive(Clone, Default)]
pub struct SaveCheckpoint {
    /// The run's folder; the checkpoint becomes `checkpoints/step_000123` in it.
    pub run_folder: PathBuf,
    /// The step to name it by.
    pub step: u64,
    /// Numbers for `metadata.json`.
    pub metrics: BTreeMap<String, f64>,
    /// Further files, by name.
    pub files: BTreeMap<String, Vec<u8>>,
    /// Folders to move into the checkpoint, by their name there, when they are written. They must be
    /// on the run folder's disk.
    pub folders: BTreeMap<String, TrainFuture<PathBuf>>,
}

/// A checkpoint that is being written.
#[derive(Clone)]
#[must_use = "the checkpoint may fail to be written: wait for it"]
pub struct SavedCheckpoint {
    /// Resolves when the state is copied. Later commands change what the checkpoint does not hold.
    pub copied: TrainFuture<()>,
    /// Resolves to the checkpoint's folder when it is durable, or to the first error of copying and
    /// writing.
    pub written: TrainFuture<PathBuf>,
}

impl SavedCheckpoint {
    /// A checkpoint that is written already, or failed.
    pub fn ready(written: Result<PathBuf, TrainError>) -> Self {
        SavedCheckpoint { copied: TrainFuture::ready(Ok(())), written: TrainFuture::ready(written) }
    }

    /// Blocks until the checkpoint is durable. Not for async code.
    pub fn wait(&self) -> Result<PathBuf, TrainError> {
        self.written.wait()
    }
}

/// State of a backend.
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
    /// Device, as `cpu` or `cuda:0`.
    pub device: String,
    /// First failure. Afterwards only saving works.
    pub poisoned: Option<TrainError>,
}
