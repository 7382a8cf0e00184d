//! Training in this process, on libtorch, on a thread of the backend.
//!
//! Memory: parameters, gradient and two moments in f32 ([`MasterFormat`], [`MomentFormat`]), or the
//! parameters once and these four for adapters ([`Lora`](crate::model::Lora)). In addition, a copy in the
//! format of computation if that is not f32, the activations of one micro-batch, and one chunk of logits.

use std::path::Path;
use std::sync::Arc;

use tch::Device;

use super::commands::{Commands, guarded};
use super::team::MakeAlgorithm;
use super::worker::Worker;
use super::{
    AdamW, Algorithm, BackendState, CheckpointMetadata, DecayScope, ForwardBackward, LrScale, MasterFormat, MomentFormat,
    NonFinitePolicy, OptimStep, RouterReplay, SaveCheckpoint, SavedCheckpoint, Snapshot, TrainBatch, TrainError, TrainFuture,
    TrainerRanks, TrainingBackend, promise,
};
use crate::algo::{Loss, OffPolicy, Schedule};
use crate::flow::caught;
use crate::hub::{MORE_TEMPLATES, TOKENIZER_FILES};
use crate::model::{Compute, Dtype, FrozenWeights, ModelConfig, Weights};
use crate::ranks::Member;

/// Settings of a [`LocalBackend`].
#[derive(Clone)]
pub struct LocalConfig {
    /// Loss function: the only difference between supervised and reinforcement learning.
    pub loss: Arc<dyn Loss>,
    /// Centre of the trust region, and correction of off-policy tokens.
    pub off_policy: OffPolicy,
    /// The optimizer.
    pub adamw: AdamW,
    /// Tensors that weight decay shrinks.
    pub decay: DecayScope,
    /// Factors of the learning rate by part of the model.
    pub lr_scale: LrScale,
    /// The learning rate.
    pub schedule: Schedule,
    /// Bound on the gradient's norm; `None` doesn't clip.
    pub max_grad_norm: Option<f64>,
    /// Most tokens read by one forward pass. Changes memory and speed, not results (law N1).
    pub micro_batch_tokens: usize,
    /// Most logits in memory at a time, in numbers; `None`: 128 MiB of them on a
    /// processor, 1 GiB on a GPU.
    pub logits_chunk: Option<usize>,
    /// Divisor of the logits, as in the sampler: log-probabilities are those of the sampled
    /// distribution. Scores are not divided.
    pub temperature: f64,
    /// Policy for a loss or gradient that is not finite.
    pub non_finite: NonFinitePolicy,
    /// Threads; `None`: the machine's, divided among the ranks on it. Models of up to 16 million parameters
    /// compute one micro-batch per thread, each with a separate gradient. For larger models, threads share
    /// each operation.
    pub threads: Option<usize>,
    /// Device and number format of the layers. Gradient sums are f32 in any case, parameters and moments by
    /// `masters` and `moments`.
    pub compute: Compute,
    /// Further devices that compute micro-batches of the same step, each with a copy of the model.
    ///
    /// Gradients are summed, and parameters and moments held, on the device of `compute`; copies
    /// are updated after each step. The result is the same (law N1) up to the order of sums, if
    /// there are more micro-batches. Cost: one copy per device, transferred after every step.
    pub replica_devices: Vec<Device>,
    /// Weight of the loss that spreads tokens over experts, as transformers' `router_aux_loss_coef`; 0
    /// without. It is of each micro-batch, weighted by its trained tokens, so that `micro_batch_tokens` and
    /// the number of ranks change it. A model without experts has none.
    pub router_loss: f64,
    /// Use of the experts that computed a sequence in the generator ([`Routes`](crate::data::Routes)).
    pub router_replay: RouterReplay,
    /// If true, the backward pass computes each layer's activations again instead of keeping all.
    /// The gradient is the same.
    pub gradient_checkpointing: bool,
    /// Format of the parameters that the optimizer updates. Those of adapters are f32.
    pub masters: MasterFormat,
    /// Format of the optimizer's moments.
    pub moments: MomentFormat,
    /// If true, memory that a step freed on GPUs is given back to the driver after it, for other processes:
    /// servers that sleep meanwhile.
    pub gives_back_memory: bool,
    /// If true, layers' inputs that `gradient_checkpointing` keeps for the backward pass are in the host's
    /// memory.
    pub activations_on_host: bool,
    /// Format of the weights in checkpoints; `None`: that of the model's folder. If it is not f32,
    /// the f32 parameters are saved with the moments, so that a resume is exact. Adapters are
    /// always f32.
    pub save_dtype: Option<Dtype>,
    /// If true, published weights have adapters merged. This costs a copy of the model and saves
    /// generators the low-rank products.
    pub merge: bool,
    /// If true, published weights are in the format of `compute`, without a copy in f32, for
    /// readers that compute in that format. Default: false. Unmerged adapters are always f32.
    pub publish_rounded: bool,
    /// Other ranks that share the work: the batch is divided among them, and weights, optimizer and
    /// result are the same on all, up to the order of sums. `None`: this process alone.
    pub ranks: Option<TrainerRanks>,
    /// Files put into every checkpoint as they are (tokenizer, chat template), by name.
    pub companions: Vec<(String, Vec<u8>)>,
}

impl LocalConfig {
    /// Common settings for a loss and a rate.
    pub fn new(loss: impl Loss + 'static, schedule: Schedule) -> Self {
        LocalConfig {
            loss: Arc::new(loss),
            off_policy: OffPolicy::default(),
            adamw: AdamW::default(),
            decay: DecayScope::default(),
            lr_scale: LrScale::default(),
            schedule,
            max_grad_norm: Some(1.0),
            micro_batch_tokens: 16_384,
            logits_chunk: None,
            temperature: 1.0,
            non_finite: NonFinitePolicy::Stop,
            threads: None,
            compute: Compute::default(),
            replica_devices: Vec::new(),
            router_loss: 0.0,
            router_replay: RouterReplay::Off,
            gradient_checkpointing: false,
            masters: MasterFormat::F32,
            moments: MomentFormat::F32,
            gives_back_memory: false,
            activations_on_host: false,
            save_dtype: None,
            merge: true,
            publish_rounded: false,
            ranks: None,
            companions: Vec::new(),
        }
    }

    /// Loss and correction, for batches that bring none.
    pub(super) fn algorithm(&self) -> Algorithm {
        Algorithm { loss: self.loss.clone(), off_policy: self.off_policy.clone(), key: None }
    }

    /// Micro-batches of a batch, at least `least`. Some attention on a GPU runs over rectangles, not `packed`.
    pub(super) fn micro_batches(&self, batch: &TrainBatch, model: &ModelConfig, packed: bool, least: usize) -> Vec<Vec<usize>> {
        match packed {
            true => batch.micro_batches(self.micro_batch_tokens, least, |length| model.cost_of(length)),
            false => batch.rectangles(self.micro_batch_tokens, least),
        }
    }
}

/// Training backend on its own thread, for a language model or a model with a score head
/// ([`ModelConfig::scores`]). Shared by reference or `Arc`; methods may be called from any
/// thread.
pub struct LocalBackend {
    commands: Commands<Worker>,
    takes_parts: bool,
}

impl LocalBackend {
    /// Starts the thread `train` with a copy of `weights`.
    ///
    /// Fails if the thread cannot start, if a device is missing, or if `config.lr_scale` scales
    /// the learning rate of tensors that the model does not have.
    pub fn new(config: LocalConfig, model: ModelConfig, weights: Weights) -> std::io::Result<Self> {
        let takes_parts = config.algorithm().takes_parts();
        let commands = Commands::start("train", move || Worker::new(config, model, weights))?;
        Ok(LocalBackend { commands, takes_parts })
    }

    /// Updates by these settings from now on, as clients of a server choose them for each update.
    /// Not for a trainer that shares its work with other ranks.
    pub fn optimize_by(&self, adamw: AdamW, max_grad_norm: Option<f64>) -> TrainFuture<()> {
        self.commands.change(move |worker| {
            worker.optimize_by(adamw, max_grad_norm);
            Ok(())
        })
    }

    /// [`TrainingBackend::forward_backward`] for batches of clients. A pass that fails drops the gradient
    /// since the last update, and the backend continues. Not for a trainer that shares its work with other
    /// ranks.
    pub fn try_forward_backward(&self, batch: Arc<TrainBatch>) -> TrainFuture<ForwardBackward> {
        let undo = |worker: &mut Worker, _: &TrainError| {
            worker.accumulated = Default::default();
            true
        };
        self.commands.attempt(move |worker| worker.forward_backward(&batch), undo)
    }

    /// Drops the gradient since the last update, as a pass that fails does. Not for a trainer that shares its
    /// work with other ranks.
    pub fn drop_gradient(&self) -> TrainFuture<()> {
        self.commands.change(|worker| {
            worker.accumulated = Default::default();
            Ok(())
        })
    }

    /// [`TrainingBackend::update`] for clients. After a gradient that is not finite, which leaves the weights
    /// unchanged, the backend continues.
    pub fn try_update(&self, scale: f64, schedule: Option<Schedule>) -> TrainFuture<OptimStep> {
        let undo = |_: &mut Worker, error: &TrainError| matches!(error, TrainError::NonFinite(..));
        self.commands.attempt(move |worker| worker.update(scale, schedule), undo)
    }
}

/// Follows a trainer of rank 0 on another rank, until rank 0 ends it. `number`: the order's
/// ([`Order::Follow`](crate::ranks::Order)). `config` is the trainer's, without
/// [`LocalConfig::ranks`]; model and weights come from rank 0. `algorithms` makes those that batches
/// bring.
///
/// # Errors
/// A rank is lost, or this one cannot follow. Errors that rank 0 reports too are rank 0's to handle.
pub fn follow(config: LocalConfig, member: &Arc<Member>, number: u64, algorithms: &MakeAlgorithm) -> Result<(), TrainError> {
    let body = || Worker::following(config, member, number)?.follow(algorithms);
    let ended = caught(body).unwrap_or_else(|message| Err(TrainError::Tensor(message)));
    if let Err(error) = &ended {
        member.fail(&error.to_string());
    }
    ended
}

impl TrainingBackend for LocalBackend {
    type Weights = FrozenWeights;

    fn forward_backward(&self, batch: Arc<TrainBatch>) -> TrainFuture<ForwardBackward> {
        self.commands.change(move |worker| worker.forward_backward(&batch))
    }

    fn score(&self, batch: Arc<TrainBatch>) -> TrainFuture<Vec<Vec<f64>>> {
        self.commands.submit(move |worker| worker.score(&batch))
    }

    fn update(&self, scale: f64, schedule: Option<Schedule>) -> TrainFuture<OptimStep> {
        self.commands.change(move |worker| worker.update(scale, schedule))
    }

    fn takes_parts(&self, algorithm: Option<&Algorithm>) -> bool {
        algorithm.map_or(self.takes_parts, Algorithm::takes_parts)
    }

    fn snapshot(&self) -> TrainFuture<Snapshot<FrozenWeights>> {
        self.commands.change(Worker::snapshot)
    }

    fn current(&self) -> TrainFuture<Snapshot<FrozenWeights>> {
        self.commands.submit(Worker::current)
    }

    fn load_weights(&self, weights: Arc<FrozenWeights>) -> TrainFuture<()> {
        self.commands.change(move |worker| worker.load_weights(&weights.read()))
    }

    fn save_checkpoint(&self, request: SaveCheckpoint) -> SavedCheckpoint {
        let ((copied, is_copied), (written, is_written)) = (promise(), promise());
        self.commands.send(move |worker| match guarded(worker, |worker| worker.copy_checkpoint(request)) {
            Ok(write) => {
                copied(Ok(()));
                worker.background.start(move || {
                    let done = caught(write).unwrap_or_else(|message| Err(TrainError::Tensor(message)));
                    // An error that no caller waits for is the next save's, or is logged.
                    if written(done.clone()) { Ok(()) } else { done.map(drop) }
                });
            }
            Err(error) => {
                copied(Err(error.clone()));
                written(Err(error));
            }
        });
        SavedCheckpoint { copied: is_copied, written: is_written }
    }

    fn load_checkpoint(&self, folder: &Path) -> TrainFuture<CheckpointMetadata> {
        let folder = folder.to_owned();
        self.commands.change(move |worker| worker.load_checkpoint(&folder))
    }

    fn state(&self) -> BackendState {
        self.commands.state()
    }
}

/// Files of a model folder other than weights and configuration, for [`LocalConfig::companions`].
/// Missing ones are skipped.
pub fn companions(model_folder: &Path) -> std::io::Result<Vec<(String, Vec<u8>)>> {
    let templates = std::fs::read_dir(model_folder.join(MORE_TEMPLATES)).into_iter().flatten().flatten();
    let templates = templates.map(|file| format!("{MORE_TEMPLATES}/{}", file.file_name().to_string_lossy()));
    let names = TOKENIZER_FILES.into_iter().map(str::to_owned).chain(templates);
    let present = names.filter(|name| model_folder.join(name).is_file());
    present.map(|name| std::fs::read(model_folder.join(&name)).map(|content| (name, content))).collect()
}
