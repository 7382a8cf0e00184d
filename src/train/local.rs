//! Training in this process, on libtorch: one thread with a queue of commands.
//!
//! Dropping the backend finishes what was submitted and joins the thread. The queue is as long as callers let it grow: they bound
//! it by waiting for answers. Cost: the model's parameters four times in fp32 (weights, gradient, two moments), or once and its adapters four times
//! ([`Adapter`](crate::model::Adapter)), once more in the format that is computed with if that is another, activations of one micro-batch, and one
//! chunk of logits.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

use crossbeam_channel::Sender;
use parking_lot::Mutex;
use tch::Device;

use super::worker::Worker;
use super::{
    AdamW, Algorithm, BackendState, CheckpointMetadata, ForwardBackward, NonFinitePolicy, OptimStep, ParamGroups, SaveCheckpoint,
    Snapshot, TrainBatch, TrainError, TrainFuture, TrainingBackend, Update, promise,
};
use crate::algo::{Loss, OffPolicy, Schedule};
use crate::model::{Compute, Dtype, FrozenWeights, ModelConfig, Weights};

/// How to train.
#[derive(Clone)]
pub struct LocalConfig {
    /// What is minimised. The only difference between supervised and reinforcement learning.
    pub loss: Arc<dyn Loss>,
    /// Where its trust region is centred, and how tokens of another policy are corrected.
    pub off_policy: OffPolicy,
    /// The optimizer.
    pub adamw: AdamW,
    /// Tensors that decay, and learning rates by group.
    pub groups: ParamGroups,
    /// The learning rate.
    pub schedule: Schedule,
    /// Bound on the gradient's norm; `None` doesn't clip.
    pub max_grad_norm: Option<f64>,
    /// Most tokens read by one forward pass. Changes memory and speed, not results (law N1).
    pub micro_batch_tokens: usize,
    /// Most logits in memory at a time, in numbers.
    pub logits_chunk: usize,
    /// Divides logits, as the sampler does: log-probabilities are those of the distribution sampled from. Scores are not divided.
    pub temperature: f64,
    /// What to do about NaN.
    pub non_finite: NonFinitePolicy,
    /// Threads to compute with; `None` leaves the library's choice. Up to 16 million parameters they take micro-batches side by side, each
    /// with a gradient of its own; a larger model's work inside one operation.
    pub threads: Option<usize>,
    /// Where to train, and in which format. Parameters, moments and sums of gradients are f32 all the same.
    pub compute: Compute,
    /// Devices that take micro-batches of the same step beside that one, each with a copy of the model in the format that is computed with. Gradients are
    /// summed, and parameters and moments held, on `compute`'s device; copies are brought up to date after each step. The step is the same (law N1), but
    /// for the order in which its gradients are summed where a batch is cut into more pieces. Cost: a copy each, and its way after every step.
    pub replica_devices: Vec<Device>,
    /// Computes each layer's activations once more in the backward pass rather than keep them all. The gradient is the same.
    pub gradient_checkpointing: bool,
    /// The format of the weights in checkpoints; `None`: that of the model's folder. Where it is not f32, a checkpoint holds the f32 parameters
    /// beside the moments, so that a resumed run goes on exactly. Adapters are f32 in any case.
    pub save_dtype: Option<Dtype>,
    /// Whether adapters are merged into the weights that are published, which costs a copy of the model and spares generators their products.
    pub merge: bool,
    /// If true, published weights are in the format of `compute`, which spares a copy in f32. For readers that compute in that format. Default: false.
    /// Adapters that are not merged are f32 in any case.
    pub publish_rounded: bool,
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
            groups: ParamGroups::default(),
            schedule,
            max_grad_norm: Some(1.0),
            micro_batch_tokens: 16_384,
            logits_chunk: 1 << 25,
            temperature: 1.0,
            non_finite: NonFinitePolicy::Stop,
            threads: None,
            compute: Compute::default(),
            replica_devices: Vec::new(),
            gradient_checkpointing: false,
            save_dtype: None,
            merge: true,
            publish_rounded: false,
            companions: Vec::new(),
        }
    }
}

type Command = Box<dyn FnOnce(&mut Worker) + Send>;

/// A backend on a thread of its own, of a language model or of one whose head gives one number per trained row ([`Head`](crate::model::Head)).
/// Shared by reference or `Arc`; every method may be called from anywhere.
pub struct LocalBackend {
    commands: Option<Sender<Command>>,
    state: Arc<Mutex<BackendState>>,
    thread: Option<JoinHandle<()>>,
    takes_parts: bool,
}

impl LocalBackend {
    /// Starts the thread `train` with a copy of `weights`. Fails when the system has no thread to give, when a device is missing, and when
    /// `config.groups` scales the learning rate of tensors that the model does not have.
    pub fn new(config: LocalConfig, model: ModelConfig, weights: Weights) -> std::io::Result<Self> {
        let own = Algorithm { loss: config.loss.clone(), off_policy: config.off_policy.clone() };
        let takes_parts = own.takes_parts();
        let (commands, queue) = crossbeam_channel::unbounded::<Command>();
        let (ready, started) = crossbeam_channel::bounded(1);
        let body = move || {
            let mut worker = match Worker::new(config, model, weights) {
                Ok(worker) => worker,
                Err(error) => return drop(ready.send(Err(error))),
            };
            // The receiver waits right below.
            drop(ready.send(Ok(worker.state())));
            for command in queue {
                command(&mut worker);
            }
        };
        let thread = std::thread::Builder::new().name("train".into()).spawn(body)?;
        let state = started.recv().map_err(|_| std::io::Error::other("the trainer's thread failed to start"))??;
        Ok(LocalBackend { commands: Some(commands), state: Arc::new(Mutex::new(state)), thread: Some(thread), takes_parts })
    }

    /// Queues a command that changes something: refused after a failure, and its own failure poisons the backend.
    fn change<T: Clone + Send + 'static>(
        &self,
        command: impl FnOnce(&mut Worker) -> Result<T, TrainError> + Send + 'static,
    ) -> TrainFuture<T> {
        let state = self.state.clone();
        self.submit(move |worker| {
            if let Some(cause) = state.lock().poisoned.clone() {
                return Err(TrainError::Poisoned { cause: Arc::new(cause) });
            }
            let answer = guarded(worker, command);
            let poisoned = answer.as_ref().err().cloned();
            *state.lock() = BackendState { poisoned, ..worker.state() };
            answer
        })
    }

    fn submit<T: Send + 'static>(
        &self,
        command: impl FnOnce(&mut Worker) -> Result<T, TrainError> + Send + 'static,
    ) -> TrainFuture<T> {
        let (promise, future) = promise();
        let command: Command = Box::new(move |worker| promise.fulfil(command(worker)));
        // A thread that is gone drops the command, and with it the promise, which then answers `Ended`.
        self.commands.as_ref().map(|commands| commands.send(command).ok());
        future
    }
}

/// Runs a command; tensor operations report misuse by panicking.
fn guarded<T>(worker: &mut Worker, command: impl FnOnce(&mut Worker) -> Result<T, TrainError>) -> Result<T, TrainError> {
    catch_unwind(AssertUnwindSafe(|| command(worker))).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
        Err(TrainError::Tensor(text.unwrap_or("no message").to_owned()))
    })
}

impl TrainingBackend for LocalBackend {
    type Weights = FrozenWeights;

    fn forward_backward(&self, batch: Arc<TrainBatch>) -> TrainFuture<ForwardBackward> {
        self.change(move |worker| worker.forward_backward(&batch))
    }

    fn score(&self, batch: Arc<TrainBatch>) -> TrainFuture<Vec<Vec<f64>>> {
        self.submit(move |worker| guarded(worker, |worker| Ok(worker.score(&batch))))
    }

    fn update(&self, update: Update) -> TrainFuture<OptimStep> {
        self.change(move |worker| worker.update(update))
    }

    fn takes_parts(&self) -> bool {
        self.takes_parts
    }

    fn snapshot(&self) -> TrainFuture<Snapshot<FrozenWeights>> {
        self.change(|worker| Ok(worker.snapshot()))
    }

    fn current(&self) -> TrainFuture<Snapshot<FrozenWeights>> {
        self.submit(|worker| Ok(worker.current()))
    }

    fn load_weights(&self, weights: Arc<FrozenWeights>) -> TrainFuture<()> {
        self.change(move |worker| worker.load_weights(&weights.read()))
    }

    fn save_checkpoint(&self, request: SaveCheckpoint) -> TrainFuture<PathBuf> {
        self.submit(move |worker| guarded(worker, |worker| worker.save_checkpoint(&request)))
    }

    fn load_checkpoint(&self, folder: &Path) -> TrainFuture<CheckpointMetadata> {
        let folder = folder.to_owned();
        self.change(move |worker| worker.load_checkpoint(&folder))
    }

    fn state(&self) -> BackendState {
        self.state.lock().clone()
    }
}

impl Drop for LocalBackend {
    fn drop(&mut self) {
        self.commands = None;
        if let Some(thread) = self.thread.take() {
            // A panic outside a command was printed by the thread itself.
            drop(thread.join());
        }
    }
}

/// The files beside a model that make it usable elsewhere: for [`LocalConfig::companions`]. Missing ones are left out.
pub fn companions(model_folder: &Path) -> std::io::Result<Vec<(String, Vec<u8>)>> {
    let names = [
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "merges.txt",
        "chat_template.jinja",
    ];
    let present = names.into_iter().filter(|name| model_folder.join(name).is_file());
    present.map(|name| Ok((name.to_owned(), std::fs::read(model_folder.join(name))?))).collect()
}
