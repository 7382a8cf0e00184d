//! The tensors of a local backend and the commands on them. Lives on one thread and never leaves it.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tch::{Device, Tensor};

use super::background::Background;
use super::commands::Commanded;
use super::error::given_up;
use super::groups::ParamGroups;
use super::optimizer::Optimizer;
use super::passes::Accumulated;
use super::replica::Replica;
use super::shards::{Gathered, Shards};
use super::side_by_side::SideBySide;
use super::team::{Command, MakeAlgorithm, Team};
use super::{AdamW, Algorithm, BackendState, LocalConfig, MasterFormat, OptimStep, TrainError, clip_scale};
use crate::algo::Schedule;
use crate::data::Version;
use crate::model::{Compute, Dtype, ModelConfig, Weights, release_helpers, stream, use_threads};
use crate::ranks::{CollectiveError, Member, Shard};
use crate::util::cores::cores;

/// Largest number of parameters for parallel micro-batches with separate gradients (64 MB each).
/// Larger models have matrices large enough for threads to share.
const SIDE_BY_SIDE: usize = 1 << 24;

pub(super) struct Worker {
    pub(super) config: Arc<LocalConfig>,
    /// For batches that bring none.
    pub(super) algorithm: Arc<Algorithm>,
    pub(super) model: ModelConfig,
    /// The masters. Without numbers if `divided` has them.
    pub(super) weights: Weights,
    /// Weights of the computation: the masters themselves, or a copy in another format.
    pub(super) computed: Weights,
    /// On further devices.
    copies: Vec<Weights>,
    pub(super) replicas: SideBySide<Replica>,
    pub(super) cut: Cut,
    pub(super) accumulated: Accumulated,
    pub(super) optimizer: Optimizer,
    pub(super) version: Version,
    /// The other ranks, in a run of several.
    pub(super) team: Option<Team>,
    /// Division of gradient and moments among the ranks.
    pub(super) shards: Option<Shards>,
    /// This rank's part of the parameters, if they are divided, too.
    pub(super) divided: Option<Divided>,
    /// Writes checkpoints.
    pub(super) background: Background,
    /// Set once a rank was found not to see the run's folder.
    pub(super) warned: bool,
    /// Whether a batch without the experts of its generator was reported.
    pub(super) warned_of_routes: bool,
}

/// Facts about the machine that decide how batches are cut. The ranks of a trainer agree on them, because
/// each cuts the batch itself.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub(super) struct Cut {
    /// Replicas that compute in parallel, the smallest number of a rank.
    pub replicas: usize,
    /// If true, no rank computes padding.
    pub packed: bool,
}

/// A rank's part of the parameters.
pub(super) struct Divided {
    /// In the format of [`LocalConfig::masters`].
    pub masters: Tensor,
    /// For passes.
    pub gathered: Arc<Gathered>,
}

impl Commanded for Worker {
    fn state(&self) -> BackendState {
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

    /// Ends the run on all ranks, which are out of step after a panic.
    fn abandon(&mut self, reason: &str) {
        self.team.iter().for_each(|team| team.abandon(reason));
    }

    fn rest(&mut self) {
        release_helpers();
    }

    /// Lets the other ranks end.
    fn leave(mut self) {
        if let Some(team) = self.team.as_mut().filter(|team| team.leads()) {
            drop(team.command(&Command::End));
        }
    }
}

impl Worker {
    /// Starts the trainer of `weights`, and on rank 0 of several its followers. Fails if a thread
    /// cannot start or a device is missing.
    pub fn new(config: LocalConfig, model: ModelConfig, weights: Weights) -> std::io::Result<Self> {
        // Nothing is copied twice.
        let masters = masters(&config, &weights);
        let moved = masters.trained().1.data_ptr() != weights.trained().1.data_ptr();
        let lead = |ranks| Team::lead(ranks, &model, &masters).map_err(std::io::Error::other);
        let team = config.ranks.clone().map(lead).transpose()?;
        let divided = team.as_ref().is_some_and(|team| team.shard() == Shard::Parameters);
        let masters = if moved || divided { masters } else { masters.copy() };
        Worker::start(config, model, masters, team).map_err(std::io::Error::other)
    }

    /// Starts a worker on a rank that follows rank 0.
    pub fn following(config: LocalConfig, member: &Arc<Member>, number: u64) -> Result<Self, TrainError> {
        let (team, model, weights) = Team::follow(member, number, config.compute.device)?;
        let weights = masters(&config, &weights);
        Worker::start(config, model, weights, Some(team))
    }

    /// `masters` are replaced by rank 0's on other ranks.
    fn start(config: LocalConfig, model: ModelConfig, masters: Weights, mut team: Option<Team>) -> Result<Self, TrainError> {
        let config = Arc::new(config);
        let (layout, compute) = (masters.trained().0.clone(), config.compute);
        let threads = config.threads.unwrap_or_else(cores).max(1);
        let small = compute.device == Device::Cpu && layout.total() <= SIDE_BY_SIDE;
        let here = if small && config.replica_devices.is_empty() { threads } else { 1 };
        let shard = team.as_ref().map(Team::shard).unwrap_or_default();
        let replicas = if shard == Shard::Parameters { 1 } else { here + config.replica_devices.len() };
        let checked = checked(&config, &model, &masters, team.as_ref());
        let own = checked.map(|()| Cut { replicas, packed: model.is_packed_on(compute) });
        let cut = match &mut team {
            Some(team) => {
                let common = |a: Cut, b: Cut| Cut { replicas: a.replicas.min(b.replicas), packed: a.packed && b.packed };
                team.agree(own)?.into_iter().fold(Cut { replicas, packed: true }, common)
            }
            None => own?,
        };
        let shards = match (team.as_ref().map(Team::mesh), shard) {
            (None, _) | (_, Shard::Nothing) => None,
            (Some(mesh), Shard::Optimizer | Shard::Gradients) => Some(Shards::of_pieces(mesh, layout.total())),
            (Some(mesh), Shard::Parameters) => Some(Shards::of_units(mesh, &layout)),
        };
        let groups = ParamGroups { decay: config.decay, lr_scale: config.lr_scale };
        let (weights, divided) = match (&mut team, &shards) {
            (Some(team), Some(shards)) if shard == Shard::Parameters => {
                let whole = team.leads().then_some(&masters.flat);
                let own = shards.sent_by_first(whole, compute.device).map_err(|error| team.explain(error))?;
                drop(masters);
                let own = own.to_kind(config.masters.kind());
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
        let each: Vec<Replica> = match &divided {
            // Exchanges have one order.
            Some(divided) => vec![Replica::of_part(&config, &model, &layout, &divided.gathered)],
            None => {
                let each = std::iter::repeat_n(&computed, here).chain(&copies);
                each.map(|weights| Replica::new(&config, &model, weights)).collect()
            }
        };
        let of_each = threads / each.len();
        let start = move || use_threads(of_each);
        start();
        let optimizer = match &shards {
            None => Optimizer::new(config.adamw, groups, &layout, config.moments),
            Some(shards) => {
                let slices = shards.slices(&groups.slices(config.adamw.weight_decay, &layout));
                Optimizer::of_slices(config.adamw, groups, slices, shards.own_len(), config.moments)
            }
        };
        Ok(Worker {
            replicas: SideBySide::new(each, "train", start).map_err(|error| TrainError::Tensor(error.to_string()))?,
            cut,
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
            background: Background::default(),
            warned: false,
            warned_of_routes: false,
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
                Command::Save(order) => {
                    let member = team.member().clone();
                    self.save_part(order, &member)
                }
                Command::Load { folder, mark } => self.take_checkpoint(&folder, mark),
                Command::Gather { computed } => self.whole(computed).map(drop),
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

    /// Replaces the optimizer's settings; its moments stay.
    pub fn optimize_by(&mut self, adamw: AdamW, max_grad_norm: Option<f64>) {
        let config = Arc::make_mut(&mut self.config);
        (config.adamw, config.max_grad_norm) = (adamw, max_grad_norm);
        self.optimizer.configure(adamw, &self.weights.trained().0.clone());
    }

    pub fn update(&mut self, scale: f64, schedule: Option<Schedule>) -> Result<OptimStep, TrainError> {
        self.command(|| Ok(Command::Update { scale, schedule }))?;
        let accumulated = std::mem::take(&mut self.accumulated);
        let lr = schedule.unwrap_or(self.config.schedule).at(self.optimizer.step);
        let skip = |worker: &Self, grad_norm, reason| {
            worker.divided.iter().for_each(|divided| drop(divided.gathered.take_sums()));
            OptimStep { step: worker.optimizer.step, lr, grad_norm, grad_norm_clipped: f64::NAN, skipped: Some(reason) }
        };
        if let Some(reason) = accumulated.skip {
            return Ok(skip(self, f64::NAN, reason));
        }
        if !accumulated.begun {
            return Err(TrainError::NoGradient);
        }
        let gradient = self.summed(accumulated.gradient)?;
        let (norm, names) = self.norm_of_all(&gradient)?;
        let grad_norm = norm * scale;
        if !norm.is_finite() {
            return Ok(skip(self, grad_norm, given_up(self.config.non_finite, "the gradient", names)?));
        }
        let clip = self.config.max_grad_norm.map_or(1.0, |max| clip_scale(grad_norm, max));
        self.step_by(lr, scale * clip, gradient)?;
        self.round();
        // Otherwise a GPU would do the work within the next step's time.
        stream::synchronize(self.config.compute.device);
        if self.config.gives_back_memory {
            stream::give_back_memory(self.config.compute.device);
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
    pub(super) fn explain(&self, error: CollectiveError) -> TrainError {
        self.team.as_ref().map_or_else(|| TrainError::Ranks(error.to_string()), |team| team.explain(error.clone()))
    }

    /// Copies the masters to the weights of the computation.
    pub(super) fn round(&mut self) {
        let _guard = tch::no_grad_guard();
        if let Some(Divided { masters, gathered }) = &self.divided {
            return gathered.round(masters);
        }
        if self.config.compute.dtype != Dtype::F32 && self.config.masters == MasterFormat::F32 {
            self.computed.trained_mut().copy_(self.weights.trained().1);
        }
        for copy in &mut self.copies {
            copy.trained_mut().copy_(self.computed.trained().1);
        }
    }
}

/// The parameters of a trainer that begins with `weights`. Copies only if needed.
fn masters(config: &LocalConfig, weights: &Weights) -> Weights {
    match config.masters {
        MasterFormat::F32 => weights.masters(config.compute.device),
        MasterFormat::Bf16 => weights.on(Compute { dtype: Dtype::Bf16, ..config.compute }),
    }
}

/// Rejects what a trainer cannot begin with.
fn checked(config: &LocalConfig, model: &ModelConfig, masters: &Weights, team: Option<&Team>) -> Result<(), TrainError> {
    for device in std::iter::once(&config.compute.device).chain(&config.replica_devices) {
        Compute { device: *device, ..config.compute }.check().map_err(|error| TrainError::Tensor(error.to_string()))?;
    }
    if team.is_some_and(|team| team.shard() == Shard::Parameters) && masters.adapter.is_some() {
        return Err(TrainError::Setting(
            "ranks.shard = \"parameters\" divides weights that are trained; adapters need \"optimizer\"",
        ));
    }
    if masters.is_quantised() && masters.adapter.is_none() {
        return Err(TrainError::Setting("weights in 4 bits are not trained: add adapters, as [lora] does"));
    }
    if config.masters == MasterFormat::Bf16 {
        if config.compute.dtype != Dtype::Bf16 {
            return Err(TrainError::Setting("parameters in bf16 are for computation in bf16: leave `masters` at \"f32\""));
        }
        if masters.adapter.is_some() {
            return Err(TrainError::Setting("parameters in bf16 are for whole weights: leave `masters` at \"f32\" with [lora]"));
        }
    }
    if config.router_loss > 0.0 && model.experts.is_none() {
        return Err(TrainError::Setting("router_aux_loss is for a mixture of experts, which this model is not: leave it out"));
    }
    let groups = ParamGroups { decay: config.decay, lr_scale: config.lr_scale };
    groups.check(masters.trained().0).map_err(TrainError::Tensor)
}
