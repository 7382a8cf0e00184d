//! The tensors of a local backend and the commands on them. Lives on one thread and never leaves it.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::{ControlFlow, Range};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use tch::{Device, Tensor};

use super::groups::ParamGroups;
use super::optimizer::{Optimizer, grad_norm};
use super::replica::{Part, PassError, Replica};
use super::shards::{Gathered, Shards};
use super::side_by_side::SideBySide;
use super::team::{Command, MakeAlgorithm, Team, key_of};
use super::{
    Algorithm, BackendState, ForwardBackward, LocalConfig, NonFinitePolicy, OptimStep, TrainBatch, TrainError, clip_scale,
};
use crate::algo::{LossOutput, Schedule};
use crate::data::Version;
use crate::flow::caught;
use crate::model::{Compute, Dtype, Entry, Layout, ModelConfig, Weights, part, return_freed_memory};
use crate::ranks::{CollectiveError, Member, Shard};

/// Largest number of parameters for parallel micro-batches with separate gradients (64 MB each).
/// Larger models have matrices large enough for threads to share.
const SIDE_BY_SIDE: usize = 1 << 24;

pub(super) struct Worker {
    pub(super) config: Arc<LocalConfig>,
    /// For batches that bring none.
    algorithm: Arc<Algorithm>,
    pub(super) model: ModelConfig,
    /// The masters, in f32. Without numbers if `divided` has them.
    pub(super) weights: Weights,
    /// Weights of the computation: the masters themselves, or a copy in another format.
    pub(super) computed: Weights,
    /// On further devices.
    copies: Vec<Weights>,
    replicas: SideBySide<Replica>,
    pub(super) accumulated: Accumulated,
    pub(super) optimizer: Optimizer,
    pub(super) version: Version,
    /// The other ranks, in a run of several.
    pub(super) team: Option<Team>,
    /// Division of gradient and moments among the ranks.
    pub(super) shards: Option<Shards>,
    /// This rank's part of the parameters, if they are divided, too.
    pub(super) divided: Option<Divided>,
}

/// A rank's part of the parameters.
pub(super) struct Divided {
    /// In f32.
    pub masters: Tensor,
    /// For passes.
    pub gathered: Arc<Gathered>,
}

/// Accumulated gradient of the next optimizer step.
#[derive(Default)]
pub(super) struct Accumulated {
    /// This rank's part, if it is divided.
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
    /// Starts the trainer of `weights`, and on rank 0 of several its followers. Fails if a thread
    /// cannot start or a device is missing.
    pub fn new(config: LocalConfig, model: ModelConfig, weights: Weights) -> std::io::Result<Self> {
        // Nothing is copied twice.
        let masters = weights.masters(config.compute.device);
        let moved = masters.trained().1.data_ptr() != weights.trained().1.data_ptr();
        let lead = |ranks| Team::lead(ranks, &model, &masters).map_err(std::io::Error::other);
        let team = config.ranks.clone().map(lead).transpose()?;
        let divided = team.as_ref().is_some_and(|team| team.shard() == Shard::Parameters);
        let masters = if moved || divided { masters } else { masters.copy() };
        Worker::start(config, model, masters, team).map_err(std::io::Error::other)
    }

    /// Starts a worker on a rank that follows rank 0.
    pub fn following(config: LocalConfig, member: &Arc<Member>, number: u64) -> Result<Self, TrainError> {
        let (team, model, weights) = Team::follow(member, number)?;
        let weights = weights.masters(config.compute.device);
        Worker::start(config, model, weights, Some(team))
    }

    /// `masters` are replaced by rank 0's on other ranks.
    fn start(config: LocalConfig, model: ModelConfig, masters: Weights, mut team: Option<Team>) -> Result<Self, TrainError> {
        let config = Arc::new(config);
        let checked = checked(&config, &masters, team.as_ref());
        if let Some(team) = &mut team {
            team.agree(checked)?;
        } else {
            checked?;
        }
        let layout = masters.trained().0.clone();
        let (group, shard) = (team.as_ref().map(Team::group), team.as_ref().map(Team::shard).unwrap_or_default());
        let shards = match (group, shard) {
            (None, _) | (_, Shard::Nothing) => None,
            (Some(group), Shard::Optimizer) => Some(Shards::of_pieces(group, layout.total())),
            (Some(group), Shard::Parameters) => Some(Shards::of_units(group, &layout)),
        };
        if shards.is_some() {
            return_freed_memory();
        }
        let (compute, groups) = (config.compute, ParamGroups { decay: config.decay, lr_scale: config.lr_scale });
        let (weights, divided) = match (&mut team, &shards) {
            (Some(team), Some(shards)) if shard == Shard::Parameters => {
                let whole = team.leads().then_some(&masters.flat);
                let own = shards.sent_by_first(whole, compute.device).map_err(|error| team.explain(error))?;
                // Copied also in f32, for the masters change while it is gathered.
                let computed = own.to_kind(compute.dtype.kind()).copy();
                let gathered = Arc::new(Gathered::new(shards.clone(), layout.clone(), computed));
                let none = Tensor::zeros([0], (tch::Kind::Float, compute.device));
                (Weights::new(layout.clone(), none), Some(Divided { masters: own, gathered }))
            }
            (Some(team), _) => {
                team.share_weights(&masters)?;
                (masters, None)
            }
            (None, _) => (masters, None),
        };
        let computed = weights.on(compute);
        let copy = |there: &Device| match *there == compute.device {
            true => computed.copy(),
            false => computed.on(Compute { device: *there, ..compute }),
        };
        let copies: Vec<Weights> = config.replica_devices.iter().map(copy).collect();
        let small = compute.device == Device::Cpu && layout.total() <= SIDE_BY_SIDE;
        let here = if small && copies.is_empty() { config.threads.unwrap_or(1).max(1) } else { 1 };
        let each: Vec<Replica> = match &divided {
            // Exchanges have one order.
            Some(divided) => vec![Replica::of_part(&config, &model, &layout, &divided.gathered)],
            None => {
                let each = std::iter::repeat_n(&computed, here).chain(&copies);
                each.map(|weights| Replica::new(&config, &model, weights)).collect()
            }
        };
        let threads = config.threads.map(|threads| (threads / each.len()).max(1) as i32);
        let start = move || threads.into_iter().for_each(tch::set_num_threads);
        start();
        let optimizer = match &shards {
            None => Optimizer::new(config.adamw, groups, &layout, compute.device),
            Some(shards) => {
                let slices = shards.slices(&groups.slices(config.adamw.weight_decay, &layout));
                Optimizer::of_slices(config.adamw, groups, slices, shards.own_len(), compute.device)
            }
        };
        Ok(Worker {
            replicas: SideBySide::new(each, "train", start).map_err(|error| TrainError::Tensor(error.to_string()))?,
            accumulated: Accumulated::default(),
            optimizer,
            version: 0,
            algorithm: Arc::new(config.algorithm()),
            config,
            model,
            weights,
            computed,
            copies,
            team,
            shards,
            divided,
        })
    }

    /// Runs rank 0's commands until it ends. `algorithms` makes those that batches bring.
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
                Command::LoadWeights => self.take_weights(None),
                Command::Restore { step } => self.take_moments(step, None),
                Command::Gather { computed } => self.whole(computed).map(drop),
                Command::GatherMoments => self.whole_moments().map(drop),
            };
            // Rank 0 has the same error, and decides.
            if let Err(error @ TrainError::Ranks(_)) = done {
                return Err(error);
            }
        }
    }

    /// Sends a command to the other ranks, if this is rank 0 of several.
    pub(super) fn command(&mut self, command: impl FnOnce() -> Result<Command<'static>, TrainError>) -> Result<(), TrainError> {
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
            self.accumulated.add(self.zero_gradient());
        }
        if seen.skipped.is_some() {
            return Ok(seen);
        }
        let (norm, names) = self.norm_of_all()?;
        (self.accumulated.norm, seen.grad_norm) = (norm, norm);
        if !norm.is_finite() {
            self.accumulated.give_up(self.config.non_finite, "the gradient", names, &mut seen)?;
        }
        Ok(seen)
    }

    /// This rank's part of a gradient of zeros.
    fn zero_gradient(&self) -> Tensor {
        let len = self.shards.as_ref().map_or_else(|| self.weights.trained().0.total(), Shards::own_len);
        Tensor::zeros([len as i64], (tch::Kind::Float, self.config.compute.device))
    }

    /// Norm of the accumulated gradient, over all ranks, and the tensors with numbers that are not
    /// finite, if it is not.
    fn norm_of_all(&mut self) -> Result<(f64, Vec<String>), TrainError> {
        let norm = self.accumulated.gradient.as_ref().map_or(0.0, grad_norm);
        match (&self.shards, &mut self.team) {
            (Some(shards), Some(team)) => {
                let (gradient, layout) = (self.accumulated.gradient.as_ref(), self.weights.trained().0);
                let held: Vec<_> = shards.held().collect();
                let own = if norm.is_finite() { Vec::new() } else { bad_tensors(layout, gradient, &held) };
                let all = team.agree(Ok((norm, own)))?;
                let square = all.iter().map(|(norm, _)| norm * norm).sum::<f64>();
                let mut names: Vec<String> = all.into_iter().flat_map(|(_, names)| names).collect();
                names.dedup();
                Ok((square.sqrt(), names))
            }
            _ if norm.is_finite() => Ok((norm, Vec::new())),
            _ => {
                let layout = self.weights.trained().0;
                Ok((norm, bad_tensors(layout, self.accumulated.gradient.as_ref(), &[(0..layout.total(), 0)])))
            }
        }
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
        let divided = self.divided.as_ref().and_then(|divided| divided.gathered.take_sums());
        if let Some(reason) = &seen.skipped {
            self.accumulated.skip.get_or_insert(reason.clone());
            return Ok(seen);
        }
        let gradient = match (divided, &self.shards) {
            (Some(own), _) => own,
            _ if parts.is_empty() => self.zero_gradient(),
            (None, shards) => {
                let own = self.accumulated.gradient.take();
                let mut whole = own.unwrap_or_else(|| self.weights.trained().1.zeros_like());
                match shards {
                    Some(shards) => shards.sum(&whole).map_err(|error| team.explain(error))?,
                    None => {
                        team.sum(&mut whole)?;
                        whole
                    }
                }
            }
        };
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
        let (own, count) = (self.own(parts.len()), self.passes_of_each(parts.len()));
        let mut seen = ForwardBackward { micro_batches: own.len(), ..Default::default() };
        let (mut ended, mut broken) = (Ok(()), None);
        let (accumulated, policy) = (&mut self.accumulated, self.config.non_finite);
        // A score head has no log-probabilities to compare with the generator's.
        let words = !self.model.scores;
        let (device, in_step) = (self.config.compute.device, self.divided.is_some());
        let over = AtomicBool::new(false);
        let work = |replica: &mut Replica, at: usize| match own.get(at) {
            Some(&piece) if !over.load(Relaxed) => {
                replica.differentiate(algorithm, batch, &parts[piece], judged.get(piece).cloned()).map(Some)
            }
            _ => replica.accompany(true).map(|()| None),
        };
        self.replicas.run(count, work, |at, part| {
            let mut take = |Part { scored, output, gradient }: Part| {
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
                        gradient.into_iter().for_each(|gradient| accumulated.add(gradient.to_device(device)));
                        Ok(())
                    }
                    Err(names) => accumulated.give_up(policy, "the loss", names, &mut seen),
                }
            };
            match part {
                Ok(Some(part)) if ended.is_ok() => ended = take(part),
                Ok(_) => {}
                Err(PassError::Loss(error)) => ended = Err(error.into()),
                Err(PassError::Ranks(error)) => broken = Some(error),
            }
            let stop = ended.is_err() || seen.skipped.is_some();
            over.store(stop, Relaxed);
            // The others pass as often as this rank would have.
            if broken.is_some() || stop && !in_step { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        broken.map_or(Ok(()), |error| Err(self.explain(error)))?;
        ended?;
        seen.entropy /= seen.tokens.max(1) as f64;
        Ok(seen)
    }

    /// Passes of each rank over `parts` micro-batches: all pass equally often if they gather
    /// parameters for it.
    fn passes_of_each(&self, parts: usize) -> usize {
        match (&self.divided, &self.team) {
            (Some(_), Some(team)) => parts.div_ceil(team.size()),
            _ => self.own(parts).len(),
        }
    }

    /// Log-probabilities of trained tokens, or scores at their rows, sequence by sequence.
    pub fn score(&mut self, batch: &TrainBatch) -> Result<Vec<Vec<f64>>, TrainError> {
        self.command(|| Ok(Command::Score(Cow::Owned(batch.clone()))))?;
        let parts = self.micro_batches(batch);
        Ok(self.columns(batch, &parts)?.into_iter().map(|[log_probs, _]| log_probs).collect())
    }

    /// Log-probabilities and entropies of the sequences in `parts`, by sequence.
    fn columns(&mut self, batch: &TrainBatch, parts: &[Vec<usize>]) -> Result<Vec<[Vec<f64>; 2]>, TrainError> {
        let (own, count) = (self.own(parts.len()), self.passes_of_each(parts.len()));
        let score = |replica: &mut Replica, at: usize| match own.get(at) {
            Some(&piece) => replica.score(batch, &parts[piece]),
            None => replica.accompany(false).map(|()| Vec::new()),
        };
        let (replicas, mut broken) = (&mut self.replicas, None);
        let mut work = || {
            let mut scored = Vec::new();
            replicas.run(count, score, |_, part| match part {
                Ok(part) => {
                    scored.extend(part);
                    ControlFlow::Continue(())
                }
                Err(error) => {
                    broken = Some(error);
                    ControlFlow::Break(())
                }
            });
            scored
        };
        let own = match &self.team {
            Some(_) => caught(work).map_err(TrainError::Tensor),
            None => Ok(work()),
        };
        match broken {
            Some(PassError::Ranks(error)) => return Err(self.explain(error)),
            Some(PassError::Loss(error)) => return Err(error.into()),
            None => {}
        }
        let all = match &mut self.team {
            Some(team) => team.agree(own)?.concat(),
            None => own?,
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
        self.step_by(lr, scale * clip, gradient)?;
        self.round();
        // Otherwise a GPU would do the work within the next step's time.
        if let Device::Cuda(index) = self.config.compute.device {
            tch::Cuda::synchronize(index as i64);
        }
        Ok(OptimStep { step: self.optimizer.step, lr, grad_norm, grad_norm_clipped: grad_norm * clip, skipped: None })
    }

    /// Updates the masters, each rank its part of them if the moments are divided.
    fn step_by(&mut self, lr: f64, scale: f64, gradient: Tensor) -> Result<(), TrainError> {
        match (&mut self.divided, &self.shards, &self.team) {
            (Some(Divided { masters, .. }), ..) => self.optimizer.update(lr, scale, masters, gradient),
            (None, Some(shards), Some(team)) => {
                let _guard = tch::no_grad_guard();
                let whole = self.weights.trained_mut();
                let mut own = shards.own(whole);
                self.optimizer.update(lr, scale, &mut own, gradient);
                shards.gather(&own, Some(whole)).map_err(|error| team.explain(error))?;
            }
            _ => self.optimizer.update(lr, scale, self.weights.trained_mut(), gradient),
        }
        Ok(())
    }

    /// The error of an exchange that failed during a pass.
    fn explain(&self, error: CollectiveError) -> TrainError {
        self.team.as_ref().map_or_else(|| TrainError::Ranks(error.to_string()), |team| team.explain(error.clone()))
    }

    /// Copies the masters to the weights of the computation.
    pub(super) fn round(&mut self) {
        let _guard = tch::no_grad_guard();
        if let Some(Divided { masters, gathered }) = &self.divided {
            return gathered.round(masters);
        }
        if self.config.compute.dtype != Dtype::F32 {
            self.computed.trained_mut().copy_(self.weights.trained().1);
        }
        for copy in &mut self.copies {
            copy.trained_mut().copy_(self.computed.trained().1);
        }
    }
}

/// Rejects what a trainer cannot begin with.
fn checked(config: &LocalConfig, masters: &Weights, team: Option<&Team>) -> Result<(), TrainError> {
    for device in std::iter::once(&config.compute.device).chain(&config.replica_devices) {
        Compute { device: *device, ..config.compute }.check().map_err(|error| TrainError::Tensor(error.to_string()))?;
    }
    if team.is_some_and(|team| team.shard() == Shard::Parameters) && masters.adapter.is_some() {
        return Err(TrainError::Setting(
            "ranks.shard = \"parameters\" divides weights that are trained; adapters need \"optimizer\"",
        ));
    }
    let groups = ParamGroups { decay: config.decay, lr_scale: config.lr_scale };
    groups.check(masters.trained().0).map_err(TrainError::Tensor)
}

/// Tensors with numbers that are not finite, of a gradient that has these ranges of the whole from
/// these places on.
fn bad_tensors(layout: &Layout, gradient: Option<&Tensor>, held: &[(Range<usize>, usize)]) -> Vec<String> {
    let is_bad = |entry: &&Entry| {
        held.iter().any(|(range, at)| {
            let (start, end) = (range.start.max(entry.range().start), range.end.min(entry.range().end));
            let own = || at + start - range.start..at + end - range.start;
            start < end && gradient.is_some_and(|of| part(of, own()).isfinite().all().int64_value(&[]) == 0)
        })
    };
    layout.entries().iter().filter(is_bad).map(|entry| entry.name.clone()).collect()
}

/// Names listed in one error; the rest is counted.
const NAMED: usize = 5;

/// The first few names, and how many more there are.
pub(super) fn shorten(mut names: Vec<String>) -> Vec<String> {
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
