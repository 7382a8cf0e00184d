//! Low-rank adapters (Hu et al., LoRA, 2021): `W + alpha/rank · B·A` instead of some projections
//! `W`, which stay fixed.
//!
//! The adapters of a model are one flat tensor with a [`Layout`] and PEFT's names. Gradient,
//! moments and publishes have its size, a few megabytes. `B·A` is never computed in a forward pass,
//! nor a gradient of `W`: projections of one input share a thin product `x·Aᵀ`, and a second one
//! adds `·Bᵀ`. B starts at 0, so that an adapted model equals its base bit for bit.
//!
//! A score head is trained in full alongside the adapters. Its copy is the last of their tensors,
//! as in PEFT's `modules_to_save`.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tch::{Device, Kind, Tensor};

use super::layout::{Group, SCORE_HEAD, SHARED_GATE, groups, part};
use super::low_rank::{ExpertRank, LayerRanks, LowRank};
use super::views::split;
use super::weights::uniform;
use super::{Compute, Entry, ExpertLayer, Experts, Layout, ModelConfig, ModelError, Weights};

/// PEFT's prefix of tensor names.
const PREFIX: &str = "base_model.model";

/// Settings of adapters: projections, rank and scale.
#[derive(Clone, Debug, PartialEq)]
pub struct Lora {
    /// Rows of each A, columns of each B.
    pub rank: usize,
    /// `B·A` is multiplied by `alpha / rank`.
    pub alpha: f64,
    /// Subset of [`Lora::PROJECTIONS`], [`Lora::JOINT`], [`Lora::DELTA`], [`Lora::EXPERTS`] and
    /// [`Lora::ROUTERS`], in that order.
    targets: Vec<&'static str>,
    /// Rank of the joint gate and up projection of each expert.
    gate_up_rank: usize,
    /// Folder of the base model, or its id on the hub if it is not in the cache. A folder of adapters has the
    /// id of a model of the hub.
    pub base: Option<PathBuf>,
}

impl Lora {
    /// Names of projections in transformers.
    pub const PROJECTIONS: [&str; 7] = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];
    /// Names of joint projections, in families that store several projections as one tensor
    /// (Phi-3).
    pub const JOINT: [&str; 2] = ["qkv_proj", "gate_up_proj"];
    /// Names of projections of gated delta nets (Qwen3.5).
    pub const DELTA: [&str; 5] = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"];
    /// The gate of a mixture's expert of every token (Qwen3.5).
    pub const SHARED_GATE: &str = SHARED_GATE;
    /// The projections of all experts of a mixture, each expert by itself.
    pub const EXPERTS: &str = "experts";
    /// The routers of a mixture.
    pub const ROUTERS: &str = "routers";
    /// All that a model has, but for experts and routers.
    pub const ALL: &str = "all-linear";
    /// The largest rank.
    pub const MOST_RANK: usize = 1 << 16;

    /// Creates adapters of these projections, or of [`Lora::ALL`]. Needs at least one projection,
    /// and a rank from 1 to [`Lora::MOST_RANK`].
    pub fn new<S: AsRef<str>>(rank: usize, alpha: f64, targets: &[S]) -> Result<Self, ModelError> {
        let all: Vec<&'static str> = Self::linear().chain(Self::OF_MIXTURES).collect();
        let refuse = |target: &str| Err(ModelError::Target(target.to_owned(), all.join(", ")));
        let known = |name: &str| name == Self::ALL || all.contains(&name);
        if let Some(unknown) = targets.iter().map(AsRef::as_ref).find(|name| !known(name)) {
            return refuse(unknown);
        }
        let means = |target: &str, name: &str| target == name || target == Self::ALL && !Self::OF_MIXTURES.contains(&name);
        let asked = |name: &&str| targets.iter().any(|target| means(target.as_ref(), name));
        let targets: Vec<_> = all.iter().copied().filter(asked).collect();
        if targets.is_empty() || !(1..=Self::MOST_RANK).contains(&rank) {
            return refuse("nothing");
        }
        // Gate and up are one matrix of an expert. PEFT gives it the rank of two.
        Ok(Lora { rank, alpha, targets, gate_up_rank: 2 * rank, base: None })
    }

    /// What only mixtures have.
    const OF_MIXTURES: [&str; 2] = [Self::EXPERTS, Self::ROUTERS];

    /// Names of projections that are matrices by themselves.
    fn linear() -> impl Iterator<Item = &'static str> {
        Self::PROJECTIONS.into_iter().chain(Self::JOINT).chain(Self::DELTA).chain([Self::SHARED_GATE])
    }

    /// Rank of gate and up of each expert, which are one matrix: twice the rank, as in PEFT, or what a folder
    /// says.
    pub fn gate_up_rank(&self) -> usize {
        self.gate_up_rank
    }

    /// Sets [`gate_up_rank`](Self::gate_up_rank).
    pub(crate) fn with_gate_up_rank(self, gate_up_rank: usize) -> Self {
        Lora { gate_up_rank, ..self }
    }

    /// Returns true if experts are adapted.
    pub fn adapts_experts(&self) -> bool {
        self.targets.contains(&Self::EXPERTS)
    }

    /// Returns true if routers are adapted.
    pub fn adapts_routers(&self) -> bool {
        self.targets.contains(&Self::ROUTERS)
    }

    /// Adapted projections.
    pub fn targets(&self) -> &[&'static str] {
        &self.targets
    }

    /// Restricts the projections to those of a model. Rejects an explicitly named projection that
    /// the model lacks.
    pub fn on_model(&self, config: &ModelConfig) -> Result<Self, ModelError> {
        let known = projections(config);
        let is_all = Self::linear().all(|name| self.targets.contains(&name));
        let is_named = |name: &&str| !is_all || Self::OF_MIXTURES.contains(name);
        if let Some(missing) = self.targets.iter().find(|name| is_named(name) && !known.contains(name)) {
            let target = format!("{missing} of a {} model", config.family.model_type());
            return Err(ModelError::Target(target, known.join(", ")));
        }
        Ok(self.clone().of_those(&known))
    }

    /// Adapted projections of a group, and their rows.
    fn chosen(&self, group: &Group) -> Vec<(&'static str, usize)> {
        group.projections.iter().copied().filter(|(name, _)| self.targets.contains(name)).collect()
    }

    fn of_those(self, known: &[&str]) -> Self {
        let targets = self.targets.iter().copied().filter(|name| known.contains(name)).collect();
        Lora { targets, ..self }
    }

    /// Rejects adapters in `dir` that differ from the requested ones: the same numbers would mean
    /// another model.
    pub fn check_is(&self, asked: &Lora, dir: &Path) -> Result<(), ModelError> {
        let of = |lora: &Lora| (lora.rank, lora.alpha, lora.targets.clone(), lora.adapts_experts().then_some(lora.gate_up_rank));
        if of(self) == of(asked) {
            return Ok(());
        }
        let problem = "ask for the same, or merge them into the model first";
        Err(ModelError::malformed(dir, format!("its adapters have {self}, and those asked for {asked}; {problem}")))
    }

    /// Layout of a model's adapters, followed by its score head if it has one.
    pub fn layout(&self, config: &ModelConfig) -> Layout {
        let mut layout = Layout::empty();
        for layer in 0..config.layers() {
            layout.begin_layer();
            for group in groups(config, layer) {
                let chosen = self.chosen(&group);
                let name = |projection, side| format!("{PREFIX}.{}.lora_{side}.weight", group.name(layer, projection));
                if !chosen.is_empty() {
                    let downs: Vec<String> = chosen.iter().map(|(projection, _)| name(projection, 'A')).collect();
                    layout.add(&downs, &vec![self.rank; chosen.len()], Some(group.input));
                }
                for (projection, rows) in chosen {
                    layout.add(&[name(projection, 'B')], &[rows], Some(self.rank));
                }
            }
            let sparse = config.experts_of(layer);
            if let Some(experts) = sparse.filter(|_| self.adapts_routers()) {
                let name = |side| [format!("{PREFIX}.model.layers.{layer}.mlp.gate.lora_{side}.weight")];
                layout.add(&name('A'), &[self.rank], Some(config.hidden_size));
                layout.add(&name('B'), &[experts.count], Some(self.rank));
            }
            if let Some(experts) = sparse.filter(|_| self.adapts_experts()) {
                for of in self.of_experts(experts, config.hidden_size) {
                    let name = |side| [format!("{PREFIX}.model.layers.{layer}.mlp.{}.lora_{side}.weight", of.module)];
                    layout.add(&name('A'), &[experts.count * of.rank], Some(of.input));
                    layout.add(&name('B'), &[of.rows], Some(of.rank * experts.count));
                }
            }
        }
        layout.begin_layer();
        if config.scores {
            layout.add(&[format!("{PREFIX}.{SCORE_HEAD}")], &[1], Some(config.hidden_size));
        }
        layout
    }
}

/// Adapters of one matrix of each expert of a layer, as PEFT holds them: A of the experts one after the
/// other, `[experts · rank, input]`, and B with the experts innermost, `[rows, rank · experts]`.
struct OfExperts {
    module: &'static str,
    rank: usize,
    input: usize,
    rows: usize,
}

impl Lora {
    /// Adapters of gate and up, and of down. PEFT wraps the second around the first.
    fn of_experts(&self, of: &Experts, hidden: usize) -> [OfExperts; 2] {
        [
            OfExperts { module: "experts.base_layer", rank: self.gate_up_rank, input: hidden, rows: 2 * of.width },
            OfExperts { module: "experts", rank: self.rank, input: of.width, rows: hidden },
        ]
    }
}

impl fmt::Display for Lora {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}, alpha {}, targets {}", self.rank, self.alpha, self.targets.join(", "))
    }
}

/// Projections of a model that can be adapted, experts and routers.
fn projections(config: &ModelConfig) -> Vec<&'static str> {
    let mut names = Vec::new();
    for group in (0..config.layers()).flat_map(|layer| groups(config, layer)) {
        let new = group.projections.iter().map(|(name, _)| *name).filter(|name| !names.contains(name));
        names.extend(new.collect::<Vec<_>>());
    }
    // gpt-oss's experts and routers have no adapters.
    let adapted = config.experts.iter().filter(|of| of.layer == ExpertLayer::SwiGlu);
    names.extend(adapted.flat_map(|_| Lora::OF_MIXTURES));
    names
}

/// The numbers of all adapters of a model.
#[derive(Debug)]
pub struct Adapter {
    /// Adapter settings.
    pub lora: Arc<Lora>,
    /// Tensors, with PEFT's names.
    pub layout: Arc<Layout>,
    /// 1-D, f32, `layout.total()` long.
    pub flat: Tensor,
}

impl Adapter {
    /// New adapters: A is drawn like PEFT's, from a random stream per tensor, and B is zero.
    /// Projections that the model lacks are skipped ([`Lora::on_model`] rejects them). A score head
    /// is zero; [`Weights::adapted`] copies the model's.
    pub(super) fn fresh(config: &ModelConfig, lora: Lora, seed: u64) -> Self {
        let lora = lora.of_those(&projections(config));
        let layout = lora.layout(config);
        let mut flat = vec![0f32; layout.total()];
        for (stream, entry) in layout.entries().iter().enumerate().filter(|(_, entry)| entry.name.ends_with("lora_A.weight")) {
            let (bound, mut unit) = (1.0 / (entry.shape[1] as f64).sqrt(), uniform(seed, b"lora", stream));
            flat[entry.range()].fill_with(|| ((2.0 * unit() - 1.0) * bound) as f32);
        }
        Adapter { lora: Arc::new(lora), layout: Arc::new(layout), flat: Tensor::from_slice(&flat) }
    }

    /// Adapters of equal settings with the numbers `flat`.
    pub(crate) fn with(&self, flat: Tensor) -> Self {
        Adapter { lora: self.lora.clone(), layout: self.layout.clone(), flat }
    }

    fn scale(&self) -> f64 {
        self.lora.alpha / self.lora.rank as f64
    }

    /// Flat `alpha/rank · B·A` of the projection whose weight has this name, if it is adapted.
    pub(super) fn delta(&self, weight: &str) -> Option<Tensor> {
        if let Some((module, expert)) = weight.split_once(".mlp.experts.") {
            return self.delta_of_expert(module, expert);
        }
        let name = |side| Some(format!("{PREFIX}.{}.lora_{side}.weight", weight.strip_suffix(".weight")?));
        let (up, down) = (self.layout.find(&name('B')?)?, self.layout.find(&name('A')?)?);
        let matrix = |entry: &Entry| {
            let shape: Vec<i64> = entry.shape.iter().map(|size| *size as i64).collect();
            part(&self.flat.detach(), entry.range()).view(shape.as_slice())
        };
        Some((matrix(up) * self.scale()).matmul(&matrix(down)).reshape([-1]))
    }

    /// The same of `expert` of a layer, as in `3.up_proj.weight`.
    fn delta_of_expert(&self, layer: &str, expert: &str) -> Option<Tensor> {
        let (number, projection) = expert.strip_suffix(".weight")?.split_once('.')?;
        let number: i64 = number.parse().ok()?;
        let (module, rank) = match projection {
            "down_proj" => ("experts", self.lora.rank as i64),
            _ => ("experts.base_layer", self.lora.gate_up_rank as i64),
        };
        let find = |side| self.layout.find(&format!("{PREFIX}.{layer}.mlp.{module}.lora_{side}.weight"));
        let (up, down) = (find('B')?, find('A')?);
        let matrix = |entry: &Entry| part(&self.flat.detach(), entry.range()).view([entry.shape[0] as i64, -1]);
        let up = matrix(up).view([up.shape[0] as i64, rank, -1]).select(2, number);
        let down = matrix(down).narrow(0, number * rank, rank);
        let delta = (up * self.scale()).matmul(&down);
        let rows = delta.size()[0] / 2;
        Some(match projection {
            "gate_proj" => delta.narrow(0, 0, rows).reshape([-1]),
            "up_proj" => delta.narrow(0, rows, rows).reshape([-1]),
            _ => delta.reshape([-1]),
        })
    }

    /// Low-rank products of each layer, and the score head if
    /// there is one. Uses one split of the flat tensor, as [`Views`](super::Views) do, so that
    /// gradients are flat.
    pub(super) fn views(&self, config: &ModelConfig) -> (Vec<LayerRanks>, Option<Tensor>) {
        let mut next = split(&self.flat, self.layout.units());
        let low_ranks = (0..config.layers()).map(|layer| self.take(config, layer, &mut next)).collect();
        (low_ranks, self.layout.score_head().map(|_| next()))
    }

    /// Copies the score head of a base, if there is one.
    fn take_head_of(&self, base: &Weights) {
        let _guard = tch::no_grad_guard();
        if let Some((from, to)) = base.layout.score_head().zip(self.layout.score_head()) {
            part(&self.flat, to).copy_(&base.numbers(from));
        }
    }

    /// The score head's weight, flat, if these adapters have one.
    pub(super) fn score_head(&self) -> Option<Tensor> {
        self.layout.score_head().map(|range| part(&self.flat.detach(), range))
    }

    /// Writes the gradient of the score head into a flat f32 gradient.
    pub(crate) fn set_head_gradient(&self, gradient: &Tensor, by_head: Option<&Tensor>) {
        let _guard = tch::no_grad_guard();
        if let Some(head) = self.layout.score_head() {
            let mut own = part(gradient, head);
            match by_head {
                Some(by_head) => own.copy_(&by_head.reshape([-1])),
                None => drop(own.zero_()),
            }
        }
    }

    /// Low-rank products of one layer, from its part of the numbers.
    pub(super) fn low_ranks_of_layer(&self, config: &ModelConfig, layer: usize, part: &Tensor) -> LayerRanks {
        self.take(config, layer, &mut split(part, self.layout.units_of_layer(layer)))
    }

    fn take(&self, config: &ModelConfig, layer: usize, next: &mut impl FnMut() -> Tensor) -> LayerRanks {
        let groups = groups(config, layer).map(|group| {
            let chosen = self.lora.chosen(&group).len() as i64;
            if chosen == 0 {
                return None;
            }
            let (down, rank, mut at) = (next(), self.lora.rank as i64, 0);
            // A block matrix of the B matrices, zero outside the blocks and without adapter.
            let row = |(name, rows): &(&str, usize)| {
                if !self.lora.targets.contains(name) {
                    return Tensor::zeros([*rows as i64, chosen * rank], (self.flat.kind(), self.flat.device()));
                }
                at += rank;
                next().constant_pad_nd([at - rank, chosen * rank - at])
            };
            let up = match &group.projections[..] {
                [_] => next(),
                all => Tensor::cat(&all.iter().map(row).collect::<Vec<_>>(), 0),
            };
            Some(LowRank { down, up: up * self.scale() })
        });
        let sparse = config.experts_of(layer);
        let router = sparse.filter(|_| self.lora.adapts_routers()).map(|_| LowRank { down: next(), up: next() * self.scale() });
        let experts = sparse.filter(|_| self.lora.adapts_experts()).map(|experts| {
            let count = experts.count as i64;
            self.lora.of_experts(experts, config.hidden_size).map(|of| {
                let [rank, input, rows] = [of.rank, of.input, of.rows].map(|size| size as i64);
                let down = next().view([count, rank, input]);
                let up = next().view([rows, rank, count]).permute([2, 0, 1]).contiguous();
                ExpertRank { down, up: up * self.scale() }
            })
        });
        LayerRanks { groups, router, experts }
    }
}

/// Copies the score head from one flat tensor to another, if both have one.
fn copy_head(from_layout: &Layout, from: &Tensor, to_layout: &Layout, to: &Tensor) {
    let _guard = tch::no_grad_guard();
    if let Some((from_head, to_head)) = from_layout.score_head().zip(to_layout.score_head()) {
        part(to, to_head).copy_(&part(from, from_head));
    }
}

impl Weights {
    /// Adds new adapters, which replace the weights as what is trained, and copies a score head
    /// into them. The base is shared, not copied. Existing adapters are merged first.
    pub fn adapted(&self, config: &ModelConfig, lora: Lora, seed: u64) -> Self {
        let base = if self.adapter.is_some() { self.merged() } else { self.share() };
        let adapter = Adapter::fresh(config, lora, seed);
        adapter.take_head_of(&base);
        base.under(adapter)
    }

    /// Adds an adapter of matching layout. The base is shared.
    pub fn under(&self, adapter: Adapter) -> Self {
        let adapter = adapter.with(adapter.flat.to_device(self.flat.device()));
        Weights { adapter: Some(adapter), ..self.without_adapter() }
    }

    /// The base weights, shared.
    pub fn without_adapter(&self) -> Self {
        Weights { adapter: None, ..self.map(Tensor::shallow_clone, Tensor::shallow_clone) }
    }

    /// Merges adapters into a copy of the weights: base plus `alpha/rank · B·A`, rounded once.
    /// What is in 4 bits becomes whole. Without both, returns the weights, shared.
    pub fn merged(&self) -> Self {
        let _guard = tch::no_grad_guard();
        let flat = match (&self.adapter, self.is_quantised()) {
            (None, false) => return self.share(),
            (_, true) => self.whole(),
            (Some(_), false) => self.flat.detach().copy(),
        };
        let Some(adapter) = &self.adapter else { return Weights::new(self.layout.clone(), flat) };
        for entry in self.layout.entries() {
            if let Some(delta) = adapter.delta(&entry.name) {
                let _sum = part(&flat, entry.range()).g_add_(&delta);
            }
        }
        copy_head(&adapter.layout, &adapter.flat, &self.layout, &flat);
        Weights::new(self.layout.clone(), flat)
    }

    /// Trained parameters: the adapters if there are any, else all weights.
    pub fn trained(&self) -> (&Arc<Layout>, &Tensor) {
        match &self.adapter {
            Some(adapter) => (&adapter.layout, &adapter.flat),
            None => (&self.layout, &self.flat),
        }
    }

    /// Trained parameters, mutable.
    pub fn trained_mut(&mut self) -> &mut Tensor {
        match &mut self.adapter {
            Some(adapter) => &mut adapter.flat,
            None => &mut self.flat,
        }
    }

    /// Moves the weights to a device and format, detached. Copies only if either differs.
    pub fn on(&self, compute: Compute) -> Self {
        let Compute { device, dtype } = compute;
        let moved = |flat: &Tensor| flat.detach().to_device(device).to_kind(dtype.kind());
        self.map(moved, moved)
    }

    /// Weights as a trainer starts with: trained parameters in f32, base weights unchanged. Copies
    /// only if needed.
    pub fn masters(&self, device: Device) -> Self {
        let there = |flat: &Tensor| flat.detach().to_device(device);
        let exact = |flat: &Tensor| there(flat).to_kind(Kind::Float);
        if self.adapter.is_some() { self.map(there, exact) } else { self.map(exact, exact) }
    }

    /// Applies `base` to the model's numbers and `own` to the adapters'.
    pub(super) fn map(&self, base: impl Fn(&Tensor) -> Tensor, own: impl Fn(&Tensor) -> Tensor) -> Self {
        let adapter = self.adapter.as_ref().map(|adapter| adapter.with(own(&adapter.flat)));
        let flat = base(&self.flat);
        Weights { layout: self.layout.clone(), quantised: self.quantised_by(&flat), flat, adapter }
    }
}
