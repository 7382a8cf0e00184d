//! The tensors of a local backend and the commands on them. Lives on one thread and never leaves it.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::{ControlFlow, Range};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tch::{Device, Tensor};

use super::groups::ParamGroups;
use super::optimizer::{Optimizer, grad_norm};
use super::replica::{Part, Replica};
use super::side_by_side::SideBySide;
use super::team::{Command, MakeAlgorithm, Team, key_of};
use super::{
    Algorithm, BackendState, CheckpointMetadata, ForwardBackward, LocalConfig, NonFinitePolicy, OptimStep, SaveCheckpoint,
    Snapshot, TrainBatch, TrainError, checkpoint, clip_scale,
};
use crate::algo::{LossOutput, Schedule};
use crate::data::Version;
use crate::flow::caught;
use crate::model::{Compute, Dtype, Entry, FrozenWeights, Layout, ModelConfig, Weights, load_adapter, load_hf, part, save_hf};
use crate::ranks::Member;

/// Largest number of parameters for parallel micro-batches with separate gradients (64 MB each).
/// Larger models have matrices large enough for threads to share.
const SIDE_BY_SIDE: usize = 1 << 24;

pub(super) struct Worker {
    config: Arc<LocalConfig>,
    /// For batches that bring none.
    algorithm: Arc<Algorithm>,
    model: ModelConfig,
    /// The masters, in f32.
    weights: Weights,
    /// Weights of the computation: the masters themselves, or a copy in another format.
    computed: Weights,
    /// On further devices.
    copies: Vec<Weights>,
    replicas: SideBySide<Replica>,
    accumulated: Accumulated,
    optimizer: Optimizer,
    version: Version,
    /// The other ranks, in a run of several.
    team: Option<Team>,
}

/// Accumulated gradient of the next optimizer step.
#[derive(Default)]
struct Accumulated {
    gradient: Option<Tensor>,
    norm: f64,
    /// Reason to skip the step.
    skip: Option<String>,
}

impl Accumulated {
    fn add(&mut self, gradient: Tensor) {
        self.gradient = Some(match self.gradient.take() {
            None => gradient,
            Some(mut sum) => sum.g_add_(&gradient),
        });
    }

    /// Law N4: the names in an error, or in a step that will be skipped.
    fn give_up(
        &mut self,
        policy: NonFinitePolicy,
        what: &'static str,
        names: Vec<String>,
        seen: &mut ForwardBackward,
    ) -> Result<(), TrainError> {
        let error = TrainError::NonFinite(what, shorten(names));
        match policy {
            NonFinitePolicy::Stop => Err(error),
            NonFinitePolicy::Skip => {
                tracing::warn!("skipping this step: {error}");
                seen.skipped = Some(error.to_string());
                self.skip.get_or_insert(error.to_string());
                Ok(())
            }
        }
    }
}

impl Worker {
    /// Fails if a thread cannot start or a device is missing.
    pub fn new(config: LocalConfig, model: ModelConfig, weights: Weights) -> std::io::Result<Self> {
        let config = Arc::new(config);
        let device = config.compute.device;
        for device in std::iter::once(&device).chain(&config.replica_devices) {
            Compute { device: *device, ..config.compute }.check().map_err(std::io::Error::other)?;
        }
        let groups = ParamGroups { decay: config.decay, lr_scale: config.lr_scale };
        groups.check(weights.trained().0).map_err(std::io::Error::other)?;
        // Nothing is copied twice.
        let masters = weights.masters(device);
        let moved = masters.trained().1.data_ptr() != weights.trained().1.data_ptr();
        let weights = if moved { masters } else { masters.copy() };
        let computed = weights.on(config.compute);
        let copy = |there: &Device| match *there == device {
            true => computed.copy(),
            false => computed.on(Compute { device: *there, ..config.compute }),
        };
        let copies: Vec<Weights> = config.replica_devices.iter().map(copy).collect();
        let small = device == Device::Cpu && weights.layout.total() <= SIDE_BY_SIDE;
        let here = if small && copies.is_empty() { config.threads.unwrap_or(1).max(1) } else { 1 };
        let each = std::iter::repeat_n(&computed, here).chain(&copies);
        let each: Vec<Replica> = each.map(|weights| Replica::new(&config, &model, weights)).collect();
        let threads = config.threads.map(|threads| (threads / each.len()).max(1) as i32);
        let start = move || threads.into_iter().for_each(tch::set_num_threads);
        start();
        let mut worker = Worker {
            replicas: SideBySide::new(each, "train", start)?,
            accumulated: Accumulated::default(),
            optimizer: Optimizer::new(config.adamw, groups, weights.trained().0, weights.trained().1),
            version: 0,
            algorithm: Arc::new(config.algorithm()),
            config,
            model,
            weights,
            computed,
            copies,
            team: None,
        };
        if let Some(ranks) = worker.config.ranks.clone() {
            worker.team = Some(Team::lead(ranks, &worker.model, &worker.weights).map_err(std::io::Error::other)?);
        }
        Ok(worker)
    }

    /// Starts a worker on a rank that follows rank 0.
    pub fn following(config: LocalConfig, member: &Arc<Member>, number: u64) -> Result<Self, TrainError> {
        let (mut team, model, weights) = Team::follow(member, number)?;
        let worker = Worker::new(config, model, weights);
        let failed = worker.as_ref().err().map(ToString::to_string);
        team.agree(failed.map_or(Ok(()), |text| Err(TrainError::Tensor(text))))?;
        let mut worker = worker.map_err(|error| TrainError::Tensor(error.to_string()))?;
        worker.team = Some(team);
        Ok(worker)
    }

    /// Runs rank 0's commands until it ends.
    pub fn follow(&mut self, algorithms: &MakeAlgorithm) -> Result<(), TrainError> {
        loop {
            let Some(team) = &mut self.team else { return Ok(()) };
            let done = match team.next()? {
                Command::End => return Ok(()),
                Command::ForwardBackward(batch, key) => {
                    let (mut batch, algorithm) = (batch.into_owned(), key.map(algorithms).transpose());
                    match algorithm {
                        Ok(algorithm) => {
                            batch.algorithm = algorithm;
                            self.forward_backward(&batch).map(drop)
                        }
                        Err(why) => {
                            team.abandon(&why);
                            Err(TrainError::Ranks(why))
                        }
                    }
                }
                Command::Score(batch) => self.score(&batch).map(drop),
                Command::Update { scale, schedule } => self.update(scale, schedule).map(drop),
                Command::LoadWeights => self.take_weights(),
                Command::Restore { step } => self.take_state(step),
            };
            // Rank 0 has the same error, and decides.
            if let Err(error @ TrainError::Ranks(_)) = done {
                return Err(error);
            }
        }
    }

    /// Sends a command to the other ranks, if this is rank 0 of several.
    fn command(&mut self, command: impl FnOnce() -> Result<Command<'static>, TrainError>) -> Result<(), TrainError> {
        match &mut self.team {
            Some(team) if team.leads() => team.command(&command()?),
            _ => Ok(()),
        }
    }

    /// Ends the other ranks' part in this trainer.
    pub fn leave(&mut self) {
        if let Some(team) = self.team.as_mut().filter(|team| team.leads()) {
            drop(team.command(&Command::End));
        }
    }

    /// Ends the run on all ranks, which are out of step after a panic.
    pub fn abandon(&self, reason: &str) {
        self.team.iter().for_each(|team| team.abandon(reason));
    }

    /// Micro-batches of all ranks, as many for each as for the others if possible.
    fn micro_batches(&self, batch: &TrainBatch) -> Vec<Vec<usize>> {
        let ranks = self.team.as_ref().map_or(1, Team::size);
        let cut = |least| self.config.micro_batches(batch, &self.model, least);
        let parts = cut(self.replicas.len() * ranks);
        match parts.len() % ranks {
            0 => parts,
            odd => cut(parts.len() + ranks - odd),
        }
    }

    /// Indices of this rank's micro-batches.
    fn own(&self, parts: usize) -> Vec<usize> {
        let (rank, size) = self.team.as_ref().map_or((0, 1), |team| (team.rank(), team.size()));
        (rank..parts).step_by(size).collect()
    }

    pub fn state(&self) -> BackendState {
        BackendState {
            step: self.optimizer.step,
            weight_version: self.version,
            lr: self.config.schedule.at(self.optimizer.step),
            parameters: self.weights.trained().0.total(),
            dtype: self.config.compute.dtype.name(),
            device: self.config.compute.device_name(),
            poisoned: None,
        }
    }

    pub fn forward_backward(&mut self, batch: &TrainBatch) -> Result<ForwardBackward, TrainError> {
        let mut parts = self.micro_batches(batch);
        if parts.is_empty() {
            return Err(TrainError::NothingToTrain(batch.sequences.len()));
        }
        self.command(|| Ok(Command::ForwardBackward(Cow::Owned(batch.clone()), key_of(batch)?)))?;
        let algorithm = batch.algorithm.clone().unwrap_or_else(|| self.algorithm.clone());
        let saved_tokens = if algorithm.ignores_zero_advantage() { leave_out(batch, &mut parts) } else { 0 };
        let judged = self.judge_whole_batch(&algorithm, batch, &parts)?;
        let mut seen = match self.team.is_some() {
            true => self.passes_of_all(&algorithm, batch, &parts, &judged)?,
            false => self.passes(&algorithm, batch, &parts, &judged)?,
        };
        seen.saved_tokens = saved_tokens;
        if parts.is_empty() {
            // The zero gradient that their passes would have given.
            self.accumulated.add(self.weights.trained().1.zeros_like());
        }
        if seen.skipped.is_some() {
            return Ok(seen);
        }
        self.accumulated.norm = self.accumulated.gradient.as_ref().map_or(0.0, grad_norm);
        seen.grad_norm = self.accumulated.norm;
        if !seen.grad_norm.is_finite() {
            let gradient = self.accumulated.gradient.as_ref();
            let bad = |entry: &&Entry| gradient.is_some_and(|of| part(of, entry.range()).isfinite().all().int64_value(&[]) == 0);
            let names = self.weights.trained().0.entries().iter().filter(bad).map(|entry| entry.name.clone()).collect();
            self.accumulated.give_up(self.config.non_finite, "the gradient", names, &mut seen)?;
        }
        Ok(seen)
    }

    /// [`Worker::passes`] on every rank over its own parts, with one result and one gradient.
    fn passes_of_all(
        &mut self,
        algorithm: &Algorithm,
        batch: &TrainBatch,
        parts: &[Vec<usize>],
        judged: &[LossOutput],
    ) -> Result<ForwardBackward, TrainError> {
        let earlier = self.accumulated.gradient.take();
        let own = caught(|| self.passes(algorithm, batch, parts, judged));
        let own = own.unwrap_or_else(|message| Err(TrainError::Tensor(message)));
        let Some(team) = &mut self.team else { return own };
        let mut seen = ForwardBackward::default();
        team.agree(own)?.into_iter().for_each(|other| seen.merge(other));
        if let Some(reason) = &seen.skipped {
            self.accumulated.skip.get_or_insert(reason.clone());
            return Ok(seen);
        }
        let mut gradient = self.accumulated.gradient.take().unwrap_or_else(|| self.weights.trained().1.zeros_like());
        if !parts.is_empty() {
            team.sum(&mut gradient)?;
        }
        self.accumulated.gradient = earlier;
        self.accumulated.add(gradient);
        Ok(seen)
    }

    /// Forward and backward passes over this rank's parts, whose gradients are accumulated.
    fn passes(
        &mut self,
        algorithm: &Algorithm,
        batch: &TrainBatch,
        parts: &[Vec<usize>],
        judged: &[LossOutput],
    ) -> Result<ForwardBackward, TrainError> {
        let own = self.own(parts.len());
        let mut seen = ForwardBackward { micro_batches: own.len(), ..Default::default() };
        let mut ended = Ok(());
        let (accumulated, policy) = (&mut self.accumulated, self.config.non_finite);
        // A score head has no log-probabilities to compare with the generator's.
        let words = !self.model.scores;
        let device = self.config.compute.device;
        let work = |replica: &mut Replica, at: usize| {
            replica.differentiate(algorithm, batch, &parts[own[at]], judged.get(own[at]).cloned())
        };
        self.replicas.run(own.len(), work, |at, part| {
            ended = part.map_err(TrainError::from).and_then(|Part { scored, output, gradient }| {
                let part = &parts[own[at]];
                seen.loss += output.loss;
                seen.tokens += scored.log_probs.len();
                seen.input_tokens += batch.input_tokens(part);
                seen.entropy += scored.entropies.iter().sum::<f64>();
                seen.metrics.merge(&output.metrics);
                if words {
                    seen.gap.merge(&batch.gap(part, &scored.log_probs));
                }
                match gradient {
                    Ok(gradient) => {
                        accumulated.add(gradient.to_device(device));
                        Ok(())
                    }
                    Err(names) => accumulated.give_up(policy, "the loss", names, &mut seen),
                }
            });
            if ended.is_err() || seen.skipped.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        ended?;
        seen.entropy /= seen.tokens.max(1) as f64;
        Ok(seen)
    }

    /// Log-probabilities of trained tokens, or scores at their rows, sequence by sequence.
    pub fn score(&mut self, batch: &TrainBatch) -> Result<Vec<Vec<f64>>, TrainError> {
        self.command(|| Ok(Command::Score(Cow::Owned(batch.clone()))))?;
        let parts = self.micro_batches(batch);
        Ok(self.columns(batch, &parts)?.into_iter().map(|[log_probs, _]| log_probs).collect())
    }

    /// Log-probabilities and entropies of the sequences in `parts`, by sequence.
    fn columns(&mut self, batch: &TrainBatch, parts: &[Vec<usize>]) -> Result<Vec<[Vec<f64>; 2]>, TrainError> {
        let own = self.own(parts.len());
        let score = |replica: &mut Replica, at: usize| replica.score(batch, &parts[own[at]]);
        let mut scored = Vec::new();
        let replicas = &mut self.replicas;
        let mut work = || {
            replicas.run(own.len(), score, |_, part| {
                scored.extend(part);
                ControlFlow::Continue(())
            });
            Ok(std::mem::take(&mut scored))
        };
        let all = match &mut self.team {
            Some(team) => team.agree_on(work)?.concat(),
            None => work()?,
        };
        let mut columns = vec![[Vec::new(), Vec::new()]; batch.sequences.len()];
        all.into_iter().for_each(|(sequence, own)| columns[sequence] = own);
        Ok(columns)
    }

    /// Loss of each part for algorithms that need the whole batch together: all log-probabilities
    /// first, then the loss, then its split. Empty for other algorithms, and if there is one part.
    fn judge_whole_batch(
        &mut self,
        algorithm: &Algorithm,
        batch: &TrainBatch,
        parts: &[Vec<usize>],
    ) -> Result<Vec<LossOutput>, TrainError> {
        if parts.len() == 1 || !algorithm.whole_batch() {
            return Ok(Vec::new());
        }
        let columns = self.columns(batch, parts)?;
        // The loss takes sequences in batch order.
        let mut own = parts.concat();
        own.sort_unstable();
        let packed = |column: usize| own.iter().flat_map(|&at| &columns[at][column]).copied().collect::<Vec<f64>>();
        let Algorithm { loss, off_policy, .. } = algorithm;
        let mut whole = batch.evaluate(&own, loss.as_ref(), off_policy, &packed(0), &packed(1))?;
        let mut end = 0;
        let place = |&at: &usize| {
            end += batch.sequences[at].rows.len();
            (at, end - batch.sequences[at].rows.len()..end)
        };
        let places: BTreeMap<usize, Range<usize>> = own.iter().map(place).collect();
        let of = |column: &[f64], part: &[usize]| part.iter().flat_map(|at| &column[places[at].clone()]).copied().collect();
        let take = |part: &Vec<usize>| LossOutput {
            grad: of(&whole.grad, part),
            entropy_grad: whole.entropy_grad.as_deref().map(|grad| of(grad, part)),
            // Value and counts belong to the first part, so that the sum over parts is the whole.
            loss: std::mem::take(&mut whole.loss),
            metrics: std::mem::take(&mut whole.metrics),
        };
        Ok(parts.iter().map(take).collect())
    }

    pub fn update(&mut self, scale: f64, schedule: Option<Schedule>) -> Result<OptimStep, TrainError> {
        self.command(|| Ok(Command::Update { scale, schedule }))?;
        if let Some(team) = &mut self.team {
            team.check_equal("gradient norm", self.accumulated.norm)?;
        }
        let Accumulated { gradient, norm, skip } = std::mem::take(&mut self.accumulated);
        let grad_norm = norm * scale;
        let lr = schedule.unwrap_or(self.config.schedule).at(self.optimizer.step);
        if let Some(reason) = skip {
            return Ok(OptimStep { step: self.optimizer.step, lr, grad_norm, grad_norm_clipped: 0.0, skipped: Some(reason) });
        }
        let gradient = gradient.ok_or(TrainError::NoGradient)?;
        let clip = self.config.max_grad_norm.map_or(1.0, |max| clip_scale(grad_norm, max));
        self.optimizer.update(lr, scale * clip, self.weights.trained_mut(), gradient);
        self.round();
        // Otherwise a GPU would do the work within the next step's time.
        if let Device::Cuda(index) = self.config.compute.device {
            tch::Cuda::synchronize(index as i64);
        }
        Ok(OptimStep { step: self.optimizer.step, lr, grad_norm, grad_norm_clipped: grad_norm * clip, skipped: None })
    }

    /// Copies the masters to the weights of the computation.
    fn round(&mut self) {
        let _guard = tch::no_grad_guard();
        if self.config.compute.dtype != Dtype::F32 {
            self.computed.trained_mut().copy_(self.weights.trained().1);
        }
        for copy in &mut self.copies {
            copy.trained_mut().copy_(self.computed.trained().1);
        }
    }

    pub fn snapshot(&mut self) -> Snapshot<FrozenWeights> {
        self.version += 1;
        self.current()
    }

    pub fn current(&self) -> Snapshot<FrozenWeights> {
        let (rounded, adapted) = (self.config.publish_rounded, self.weights.adapter.is_some());
        let weights = match adapted && self.config.merge {
            true if rounded => FrozenWeights::of_own(self.weights.merged().on(self.config.compute)),
            true => FrozenWeights::of_own(self.weights.merged()),
            false if rounded && !adapted => self.computed.freeze(),
            false => self.weights.freeze(),
        };
        Snapshot { version: self.version, step: self.optimizer.step, weights: Arc::new(weights) }
    }

    pub fn load_weights(&mut self, weights: &Weights) -> Result<(), TrainError> {
        let (ours, theirs) = (self.weights.trained().0, weights.trained().0);
        if ours != theirs {
            let shape = |of: &Layout, name: &str| of.find(name).map_or("none".to_owned(), |entry| format!("{:?}", entry.shape));
            let added = theirs.entries().iter().filter(|entry| ours.find(&entry.name).is_none());
            let both =
                ours.entries().iter().chain(added).map(|Entry { name, .. }| (name, shape(ours, name), shape(theirs, name)));
            let differing = both.filter(|(_, here, there)| here != there);
            let tensors = differing.map(|(name, here, there)| format!("{name} ({here} here, {there} there)"));
            return Err(TrainError::Shape(shorten(tensors.collect())));
        }
        {
            let _guard = tch::no_grad_guard();
            self.weights.trained_mut().copy_(weights.trained().1);
        }
        self.command(|| Ok(Command::LoadWeights))?;
        self.take_weights()
    }

    /// Takes over rank 0's trained weights.
    fn take_weights(&mut self) -> Result<(), TrainError> {
        if let Some(team) = &mut self.team {
            team.share(self.weights.trained_mut())?;
        }
        self.round();
        Ok(())
    }

    /// Takes over rank 0's optimizer after `step` updates.
    fn take_state(&mut self, step: u64) -> Result<(), TrainError> {
        self.accumulated = Accumulated::default();
        let Some(team) = &mut self.team else { return Ok(()) };
        self.optimizer.step = step;
        self.optimizer.moments_mut().try_for_each(|moment| team.share(moment))
    }

    pub fn save_checkpoint(&self, request: &SaveCheckpoint) -> Result<PathBuf, TrainError> {
        let metadata = CheckpointMetadata {
            step: request.step,
            weight_version: self.version,
            metrics: request.metrics.clone(),
            ..Default::default()
        };
        let fill = |folder: &Path| {
            let dtype = self.config.save_dtype.unwrap_or(self.model.dtype);
            let model = ModelConfig { dtype, ..self.model.clone() };
            save_hf(folder, &model, &self.weights).map_err(TrainError::of_model(folder))?;
            let rounded = dtype != Dtype::F32 && self.weights.adapter.is_none();
            self.optimizer.save(folder, Some(&self.weights.flat).filter(|_| rounded))?;
            let companions = self.config.companions.iter().map(|(name, content)| (name, content));
            for (name, content) in companions.chain(&request.files) {
                let path = folder.join(name);
                std::fs::write(&path, content).map_err(TrainError::io(&path))?;
            }
            for (name, from) in &request.folders {
                std::fs::rename(from, folder.join(name)).map_err(TrainError::io(from))?;
            }
            Ok(())
        };
        checkpoint::write(&request.run_folder.join(checkpoint::CHECKPOINTS), request.step, metadata, fill)
    }

    pub fn load_checkpoint(&mut self, folder: &Path) -> Result<CheckpointMetadata, TrainError> {
        let metadata = checkpoint::verify(folder)?;
        let weights = match &self.weights.adapter {
            Some(ours) => load_adapter(folder, &self.model).and_then(|saved| {
                saved.lora.check_is(&ours.lora, folder)?;
                Ok(self.weights.under(saved))
            }),
            None => load_hf(folder).map(|(_, weights)| weights),
        };
        let mut weights = weights.map_err(TrainError::of_model(folder))?;
        if let Some(masters) = self.optimizer.load(folder)? {
            *weights.trained_mut() = masters;
        }
        self.load_weights(&weights)?;
        self.version = self.version.max(metadata.weight_version);
        let step = self.optimizer.step;
        self.command(|| Ok(Command::Restore { step }))?;
        self.take_state(step)?;
        Ok(metadata)
    }
}

/// Names listed in one error; the rest is counted.
const NAMED: usize = 5;

/// The first few names, and how many more there are.
fn shorten(mut names: Vec<String>) -> Vec<String> {
    let more = names.len().saturating_sub(NAMED);
    if more > 0 {
        names.truncate(NAMED);
        names.push(format!("{more} more"));
    }
    names
}

/// Removes parts with zero advantage, and returns their number of input tokens.
fn leave_out(batch: &TrainBatch, parts: &mut Vec<Vec<usize>>) -> usize {
    let indifferent = |part: &Vec<usize>| part.iter().all(|&at| batch.sequences[at].is_indifferent());
    let saved = parts.split_off(parts.partition_point(|part| !indifferent(part)));
    batch.input_tokens(&saved.concat())
}
