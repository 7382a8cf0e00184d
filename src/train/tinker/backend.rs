//! Training on a server of the Tinker API.
//!
//! Any loss of this library trains on any such server: a forward pass gives log-probabilities, the
//! loss gives its derivative by each, and a second pass applies them, as the SDK's
//! `forward_backward_custom` does. Denominators are already global in the weights (law N1).
//!
//! Gradients are sent with the update, so that an update whose passes failed, or whose loss is not
//! finite, leaves nothing on the server.
//!
//! Where the server has the same loss, one pass computes and applies it. Its gradient is on the server
//! before the loss is known: a loss that is not finite then ends the run.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rollflow_tinker::TinkerError;
use rollflow_tinker::message::{AdamParams, Datum, LoraConfig, Tensor};

use super::address::{ADDRESS, Address, address_of};
use super::dialect::{Dialect, Reduction};
use super::model::{CROSS_ENTROPY, IMPORTANCE_SAMPLING, Loss as PassLoss, RemoteModel};
use super::one_pass;
use super::service::TinkerService;
use crate::algo::{Loss, OffPolicy, Schedule};
use crate::net::Tasks;
use crate::train::commands::{Commanded, Commands, guarded};
use crate::train::error::given_up;
use crate::train::{
    AdamW, Algorithm, BackendState, CheckpointMetadata, ForwardBackward, NonFinitePolicy, OptimStep, SaveCheckpoint,
    SavedCheckpoint, Snapshot, TrainBatch, TrainError, TrainFuture, TrainSequence, TrainingBackend, checkpoint, promise,
};

/// Longest time for which the end of a run waits for the server.
const GOODBYE: Duration = Duration::from_secs(5);

/// Settings of a [`TinkerBackend`].
#[derive(Clone)]
pub struct TinkerConfig {
    /// Loss function.
    pub loss: Arc<dyn Loss>,
    /// Centre of the trust region, and correction of off-policy tokens.
    pub off_policy: OffPolicy,
    /// The optimizer.
    pub adamw: AdamW,
    /// The learning rate.
    pub schedule: Schedule,
    /// Bound on the gradient's norm; `None` doesn't clip.
    pub max_grad_norm: Option<f64>,
    /// Policy for a loss that is not finite.
    pub non_finite: NonFinitePolicy,
    /// If true, each version is saved under a path by which it is downloaded, for engines elsewhere.
    pub downloads: bool,
}

/// Weights on a server, for sampling.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SamplerWeights {
    /// Name of their sampling session; none if they are downloaded.
    pub session: Option<String>,
    /// Their path on the server, if they are downloaded.
    pub path: Option<String>,
}

/// A sequence with its part of the next update's gradient.
struct Slope {
    datum: Datum,
    /// Places of the trained tokens in it.
    rows: Vec<usize>,
    log_probs: Vec<f64>,
    /// ∂loss/∂log_prob.
    slopes: Vec<f64>,
}

struct Trainer {
    tasks: Tasks,
    model: RemoteModel,
    config: TinkerConfig,
    algorithm: Algorithm,
    dialect: Dialect,
    base_model: String,
    lora: LoraConfig,
    gradient: Vec<Slope>,
    /// If true, the server has the gradient of the next update.
    applied: bool,
    skip: Option<String>,
    step: u64,
    version: u64,
}

/// Training backend on a server, as one model of its session. Commands run in order on a thread of
/// their own.
///
/// Unknown numbers are NaN: the entropy, and the gradient's norm if the server reports none.
pub struct TinkerBackend {
    commands: Commands<Trainer>,
    algorithm: Algorithm,
    /// Losses that are computed in one pass, over a whole batch.
    built_in: Vec<String>,
}

impl TinkerBackend {
    /// Creates a model on the server.
    ///
    /// # Errors
    /// The server refuses, or no thread can be started.
    pub fn new(service: &TinkerService, lora: LoraConfig, config: TinkerConfig) -> Result<Self, TrainError> {
        let algorithm = Algorithm { loss: config.loss.clone(), off_policy: config.off_policy.clone(), key: None };
        let built_in = if config.non_finite == NonFinitePolicy::Stop { service.dialect().built_in.clone() } else { Vec::new() };
        let io = |error| TrainError::io(Path::new("the trainer's thread"))(error);
        let trainer = Trainer {
            model: service.tasks().block_on(service.create_model(lora))?,
            tasks: Tasks::new().map_err(io)?,
            config,
            algorithm: algorithm.clone(),
            dialect: Dialect { built_in: built_in.clone(), ..service.dialect().clone() },
            base_model: service.base_model().to_owned(),
            lora,
            gradient: Vec::new(),
            applied: false,
            skip: None,
            step: 0,
            version: 0,
        };
        let commands = Commands::start("tinker", move || Ok(trainer)).map_err(io)?;
        Ok(TinkerBackend { commands, algorithm, built_in })
    }
}

impl Commanded for Trainer {
    fn state(&self) -> BackendState {
        BackendState {
            step: self.step,
            weight_version: self.version,
            lr: self.config.schedule.at(self.step),
            parameters: 0,
            dtype: "the server's",
            device: self.model.connection.name().to_owned(),
            poisoned: None,
        }
    }

    /// Gives the server its room back. Saved weights stay.
    fn leave(self) {
        let unloaded = self.tasks.block_on(async { tokio::time::timeout(GOODBYE, self.model.unload()).await });
        if !matches!(unloaded, Ok(Ok(()))) {
            tracing::debug!("the model stays on the server until the session ends");
        }
    }
}

impl Trainer {
    fn lacks(&self, lacks: &str) -> TrainError {
        TinkerError::Lacks { server: self.model.connection.name().to_owned(), lacks: lacks.to_owned() }.into()
    }

    /// Sequences with trained tokens, by their places in the batch, and their log-probabilities
    /// there. With a loss, and data for it, the pass applies it.
    fn scored(&self, batch: &TrainBatch, loss: Option<&PassLoss>) -> Result<Vec<(usize, Datum, Vec<f64>)>, TrainError> {
        let trained: Vec<usize> = batch.all().into_iter().filter(|&at| !batch.sequences[at].rows.is_empty()).collect();
        if trained.iter().any(|&at| batch.sequences[at].temperature.is_some_and(|temperature| temperature != 1.0)) {
            return Err(self.lacks("computes log-probabilities at temperature 1 only; set generate.temperature = 1"));
        }
        let data: Vec<Datum> = trained.iter().map(|&at| datum(&batch.sequences[at])).collect();
        let scores = match loss {
            None => self.tasks.block_on(self.model.forward(data.clone()))?,
            Some(loss) => {
                let complete = |(at, datum): (&usize, &Datum)| one_pass::complete(datum.clone(), &batch.sequences[*at]);
                let sampled: Option<Vec<Datum>> = trained.iter().zip(&data).map(complete).collect();
                let sampled = sampled.ok_or_else(|| self.lacks("trains by this loss on sampled tokens alone"))?;
                let lengths: Vec<usize> = data.iter().map(|datum| datum.loss_fn_inputs["target_tokens"].len()).collect();
                self.tasks.block_on(async {
                    let requests = self.model.submit_passes("forward_backward", sampled, loss, false).await?;
                    self.model.scores("forward_backward", &requests, &lengths).await
                })?
            }
        };
        let of_rows = |(at, (datum, scores)): (usize, (Datum, Vec<f32>))| {
            let log_probs = batch.sequences[at].rows.iter().map(|&row| f64::from(scores[row])).collect();
            (at, datum, log_probs)
        };
        Ok(trained.into_iter().zip(data.into_iter().zip(scores)).map(of_rows).collect())
    }

    fn score(&self, batch: &TrainBatch) -> Result<Vec<Vec<f64>>, TrainError> {
        let mut scores = vec![Vec::new(); batch.sequences.len()];
        self.scored(batch, None)?.into_iter().for_each(|(at, _, log_probs)| scores[at] = log_probs);
        Ok(scores)
    }

    fn forward_backward(&mut self, batch: &TrainBatch) -> Result<ForwardBackward, TrainError> {
        let algorithm = batch.algorithm.as_deref().unwrap_or(&self.algorithm);
        let form = one_pass::form(algorithm, &self.dialect.built_in);
        let scored = self.scored(batch, form.as_ref())?;
        self.applied |= form.is_some() && !scored.is_empty();
        if scored.is_empty() {
            return Err(TrainError::NothingToTrain(batch.sequences.len()));
        }
        let part: Vec<usize> = scored.iter().map(|(at, ..)| *at).collect();
        let log_probs: Vec<f64> = scored.iter().flat_map(|(.., log_probs)| log_probs).copied().collect();
        let entropies = vec![f64::NAN; log_probs.len()];
        let output = batch.evaluate(&part, algorithm.loss.as_ref(), &algorithm.off_policy, &log_probs, &entropies, None)?;
        if output.entropy_grad.is_some() {
            return Err(self.lacks(
                "gives log-probabilities of the sampled tokens alone, so that no loss has an entropy term; set train.entropy_coef = 0",
            ));
        }
        let mut seen = ForwardBackward {
            loss: output.loss,
            tokens: log_probs.len(),
            input_tokens: batch.input_tokens(&part),
            micro_batches: 1,
            entropy: f64::NAN,
            gap: batch.gap(&part, &log_probs),
            scores: batch.scores(&part, &log_probs, &entropies),
            metrics: output.metrics,
            ..ForwardBackward::default()
        };
        let mut start = 0;
        let mut bad = Vec::new();
        for (at, datum, log_probs) in scored {
            let slopes = output.grad[start..start + log_probs.len()].to_vec();
            start += log_probs.len();
            if slopes.iter().chain(&log_probs).any(|value| !value.is_finite()) {
                bad.push(batch.sequences[at].name());
            }
            let rows = batch.sequences[at].rows.clone();
            if form.is_none() {
                self.gradient.push(Slope { datum, rows, log_probs, slopes });
            }
        }
        if !output.loss.is_finite() || !bad.is_empty() {
            let reason = given_up(self.config.non_finite, "the loss", bad)?;
            self.skip.get_or_insert_with(|| reason.clone());
            seen.skipped = Some(reason);
        }
        Ok(seen)
    }

    fn update(&mut self, scale: f64, schedule: Option<Schedule>) -> Result<OptimStep, TrainError> {
        let (gradient, skip) = (std::mem::take(&mut self.gradient), self.skip.take());
        let lr = schedule.unwrap_or(self.config.schedule).at(self.step);
        if let Some(reason) = skip {
            let (step, norm) = (self.step, f64::NAN);
            return Ok(OptimStep { step, lr, grad_norm: norm, grad_norm_clipped: norm, skipped: Some(reason) });
        }
        let applied = std::mem::take(&mut self.applied);
        if gradient.is_empty() && !applied {
            return Err(TrainError::NoGradient);
        }
        if applied && scale != 1.0 {
            return Err(
                self.lacks("has the gradient already, which can't be scaled: a batch in parts needs a loss of two passes")
            );
        }
        let passes = (!gradient.is_empty()).then(|| self.applied(gradient, scale));
        let AdamW { beta1, beta2, epsilon, weight_decay, .. } = self.config.adamw;
        let max = self.config.max_grad_norm.filter(|max| max.is_finite());
        let adam = AdamParams { learning_rate: lr, beta1, beta2, eps: epsilon, weight_decay, grad_clip_norm: max.unwrap_or(0.0) };
        let model = &self.model;
        let norm = self.tasks.block_on(async {
            // All are submitted together: a server may work in cycles of seconds.
            let passes = match passes {
                Some((loss, data)) => model.submit_passes("forward_backward", data, &PassLoss::named(loss), false).await?,
                None => Vec::new(),
            };
            let update = model.submit_update(adam).await?;
            model.outputs("forward_backward", &passes).await?;
            model.updated(&update).await
        })?;
        self.step += 1;
        let norm = norm.unwrap_or(f64::NAN);
        let clipped = max.filter(|max| self.dialect.clips && norm > *max).unwrap_or(norm);
        Ok(OptimStep { step: self.step, lr, grad_norm: norm, grad_norm_clipped: clipped, skipped: None })
    }

    /// The pass that has this gradient, times `scale`: its loss and its data.
    fn applied(&self, mut gradient: Vec<Slope>, scale: f64) -> (&'static str, Vec<Datum>) {
        // Sequences without a slope change nothing, but an update needs one.
        if gradient.iter().any(|of| of.slopes.iter().any(|slope| *slope != 0.0)) {
            gradient.retain(|of| of.slopes.iter().any(|slope| *slope != 0.0));
        } else {
            gradient.truncate(1);
        }
        let sequences = gradient.len() as f64;
        let apply = |Slope { mut datum, rows, log_probs, slopes }: Slope| {
            let len = datum.loss_fn_inputs["target_tokens"].len();
            let spread = |values: &mut dyn Iterator<Item = f64>| {
                let mut all = vec![0.0_f32; len];
                rows.iter().zip(values).for_each(|(&row, value)| all[row] = value as f32);
                Tensor::Floats(all)
            };
            match self.dialect.reduction {
                Reduction::Sum => {
                    datum.loss_fn_inputs.insert("weights".to_owned(), spread(&mut slopes.iter().map(|slope| -slope * scale)));
                }
                Reduction::Mean => {
                    // Weights of 1 have a known sum; a ratio of 1 leaves the slope unchanged.
                    let undo = rows.len() as f64 * sequences * scale;
                    datum.loss_fn_inputs.insert("logprobs".to_owned(), spread(&mut log_probs.iter().copied()));
                    datum.loss_fn_inputs.insert("advantages".to_owned(), spread(&mut slopes.iter().map(|slope| -slope * undo)));
                }
            }
            datum
        };
        let loss = match self.dialect.reduction {
            Reduction::Sum => CROSS_ENTROPY,
            Reduction::Mean => IMPORTANCE_SAMPLING,
        };
        (loss, gradient.into_iter().map(apply).collect())
    }

    fn current(&self) -> Result<Snapshot<SamplerWeights>, TrainError> {
        let weights = match self.config.downloads {
            true => {
                let path = self.tasks.block_on(self.model.save_for_sampler(&unique(&format!("version-{}", self.version))))?;
                SamplerWeights { path: Some(path), ..SamplerWeights::default() }
            }
            false => SamplerWeights { session: Some(self.tasks.block_on(self.model.sampler())?), ..SamplerWeights::default() },
        };
        Ok(Snapshot { version: self.version, step: self.step, weights: Arc::new(weights) })
    }

    fn snapshot(&mut self) -> Result<Snapshot<SamplerWeights>, TrainError> {
        self.version += 1;
        self.current()
    }

    fn save(&self, request: SaveCheckpoint) -> Result<PathBuf, TrainError> {
        let SaveCheckpoint { run_folder, step, metrics, files, .. } = request;
        let name = unique(&checkpoint::step_folder(step));
        let (path, sampler_path) = self.tasks.block_on(async {
            let path = self.model.save(&name).await?;
            Ok::<_, TinkerError>((path, Some(self.model.save_for_sampler(&name).await?)))
        })?;
        let server = self.model.connection.address().to_owned();
        let address = Address { server, path, sampler_path, base_model: self.base_model.clone(), rank: self.lora.rank };
        let metadata =
            CheckpointMetadata { step: self.step, weight_version: self.version, metrics, ..CheckpointMetadata::default() };
        checkpoint::write(&run_folder.join(checkpoint::CHECKPOINTS), step, metadata, |folder| {
            let write = |name: &str, content: &[u8]| {
                let path = folder.join(name);
                std::fs::write(&path, content).map_err(TrainError::io(&path))
            };
            files.iter().try_for_each(|(name, content)| write(name, content))?;
            write(ADDRESS, &serde_json::to_vec_pretty(&address).unwrap_or_default())
        })
    }

    fn load(&mut self, folder: &Path) -> Result<CheckpointMetadata, TrainError> {
        let metadata = checkpoint::verify(folder)?;
        let (file, Address { path, base_model, rank, .. }) = (folder.join(ADDRESS), address_of(folder)?);
        if (&base_model, rank) != (&self.base_model, self.lora.rank) {
            let (base, own) = (&self.base_model, self.lora.rank);
            let reason = format!("it is of {base_model} with rank {rank}, and this run trains {base} with rank {own}");
            return Err(TrainError::malformed(&file, reason));
        }
        self.tasks.block_on(self.model.load(&path))?;
        (self.step, self.version) = (metadata.step, metadata.weight_version);
        Ok(metadata)
    }
}

/// What the server reads of a sequence: labels are shifted already (law D5).
fn datum(sequence: &TrainSequence) -> Datum {
    let TrainSequence { inputs, rows, targets, .. } = sequence;
    let mut all: Vec<i64> = inputs.iter().skip(1).copied().collect();
    all.extend(targets.last());
    let mut weights = vec![0.0; all.len()];
    for (&row, &target) in rows.iter().zip(targets) {
        (all[row], weights[row]) = (target, 1.0);
    }
    Datum::new(inputs.clone(), [("target_tokens", Tensor::Ints(all)), ("weights", Tensor::Floats(weights))])
}

/// A name that no other save has: a name that is taken is refused.
fn unique(name: &str) -> String {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    format!("{name}-{:x}", since.as_nanos())
}

impl TrainingBackend for TinkerBackend {
    type Weights = SamplerWeights;

    fn forward_backward(&self, batch: Arc<TrainBatch>) -> TrainFuture<ForwardBackward> {
        self.commands.change(move |worker| worker.forward_backward(&batch))
    }

    fn score(&self, batch: Arc<TrainBatch>) -> TrainFuture<Vec<Vec<f64>>> {
        self.commands.submit(move |worker| worker.score(&batch))
    }

    fn update(&self, scale: f64, schedule: Option<Schedule>) -> TrainFuture<OptimStep> {
        self.commands.change(move |worker| worker.update(scale, schedule))
    }

    /// A loss of one pass needs the batch's denominator before it.
    fn takes_parts(&self, algorithm: Option<&Algorithm>) -> bool {
        let algorithm = algorithm.unwrap_or(&self.algorithm);
        algorithm.takes_parts() && one_pass::form(algorithm, &self.built_in).is_none()
    }

    fn snapshot(&self) -> TrainFuture<Snapshot<SamplerWeights>> {
        self.commands.change(Trainer::snapshot)
    }

    fn current(&self) -> TrainFuture<Snapshot<SamplerWeights>> {
        self.commands.submit(|worker| worker.current())
    }

    /// Fails: a server takes no weights from outside.
    fn load_weights(&self, _: Arc<SamplerWeights>) -> TrainFuture<()> {
        self.commands.submit(|worker| Err(worker.lacks("takes weights only from its own checkpoints")))
    }

    fn save_checkpoint(&self, request: SaveCheckpoint) -> SavedCheckpoint {
        let ((copied, is_copied), (written, is_written)) = (promise(), promise());
        self.commands.send(move |worker| {
            let saved = guarded(worker, |worker| worker.save(request));
            copied(saved.as_ref().map(drop).map_err(Clone::clone));
            written(saved);
        });
        SavedCheckpoint { copied: is_copied, written: is_written }
    }

    fn load_checkpoint(&self, folder: &Path) -> TrainFuture<CheckpointMetadata> {
        let folder = folder.to_owned();
        self.commands.change(move |worker| worker.load(&folder))
    }

    fn state(&self) -> BackendState {
        self.commands.state()
    }
}

impl From<TinkerError> for TrainError {
    fn from(error: TinkerError) -> Self {
        TrainError::Tinker(Arc::new(error))
    }
}
