//! What a run takes of memory, before it runs: a formula a part, held to measured peaks by `tests/memory.rs`.
//!
//! It counts what is alive at the same time at the busiest moment of a step. What it can't know (prompts of a file that nobody has read)
//! it assumes, and says so.

use std::fmt;
use std::path::Path;

use super::generate::OnNewWeights;
use super::lora::AdapterSync;
use super::model::{DeviceName, ModelSource, Precision};
use super::plan::{Pipeline, Plan};
use super::reference_policy::ReferencePolicy;
use super::setting::Problem;
use super::task::{Arithmetic, TaskData};
use super::train::Optimization;
use crate::hub;
use crate::model::{Dtype, Factors, Family, Head, Layout, Lora, ModelConfig, ModelError, QkNorm, RopeScaling, fused, gpu_memory};

/// The program itself: its code, libtorch's, and what threads and allocators hold.
const PROGRAM: u64 = 150 << 20;
/// Numbers of logits in a trainer's chunk ([`LocalConfig::logits_chunk`](crate::train::LocalConfig)).
const LOGITS_CHUNK: u64 = 1 << 25;
/// Parameters up to which trainers take micro-batches side by side.
const SIDE_BY_SIDE: u64 = 1 << 24;
/// Tokens that a prompt is assumed to have where nobody has read the data.
const PROMPT_ASSUMED: u64 = 256;

/// What a run takes on its device, part by part, and what there is.
#[derive(Clone, Debug, PartialEq)]
pub struct MemoryPlan {
    /// The device's name in recipes.
    pub device: String,
    /// What takes how much.
    pub parts: Vec<MemoryPart>,
    /// What the device has, if that is known.
    pub has: Option<u64>,
}

/// One thing that takes memory.
#[derive(Clone, Debug, PartialEq)]
pub struct MemoryPart {
    /// What.
    pub what: &'static str,
    /// Bytes.
    pub bytes: u64,
    /// How that comes about.
    pub why: String,
}

impl MemoryPlan {
    /// What `plan` takes on its device. Reads the model's `config.json`, and no weights.
    pub fn of(plan: &Plan) -> Result<Self, ModelError> {
        let mut parts = Parts { plan, model: shape(plan)?, all: Vec::new() };
        parts.collect()?;
        let has = match plan.model.device {
            DeviceName::Cpu => machine_memory(),
            DeviceName::Cuda(index) => gpu_memory(index),
        };
        Ok(MemoryPlan { device: plan.model.device.word(), parts: parts.all, has })
    }

    /// All parts together.
    pub fn total(&self) -> u64 {
        self.parts.iter().map(|part| part.bytes).sum()
    }

    /// Whether it is more than there is.
    pub fn exceeds(&self) -> bool {
        self.has.is_some_and(|has| self.total() > has)
    }
}

impl fmt::Display for MemoryPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let has = self.has.map_or_else(|| "of an unknown amount".to_owned(), |has| format!("of {}", size(has)));
        writeln!(f, "  memory on {:<8} about {} {has}", self.device, size(self.total()))?;
        for MemoryPart { what, bytes, why } in &self.parts {
            writeln!(f, "    {what:<16} {:>9}  {why}", size(*bytes))?;
        }
        Ok(())
    }
}

/// A run that can't fit, with what would help and how much.
pub(crate) fn problems(plan: &Plan) -> Vec<Problem> {
    if !plan.model.check_memory {
        return Vec::new();
    }
    // What is wrong with the model is said where it is loaded.
    let Ok(memory) = MemoryPlan::of(plan) else { return Vec::new() };
    if !memory.exceeds() {
        return Vec::new();
    }
    let has = memory.has.unwrap_or(0);
    let mut largest: Vec<&MemoryPart> = memory.parts.iter().collect();
    largest.sort_by_key(|part| std::cmp::Reverse(part.bytes));
    let largest: Vec<String> = largest.iter().take(3).map(|part| format!("{} {}", part.what, size(part.bytes))).collect();
    let message = format!(
        "the run takes about {} on {}, which has {}: most of it is {}",
        size(memory.total()),
        memory.device,
        size(has),
        largest.join(", ")
    );
    let help = format!("{}; model.check_memory = false runs it all the same", knobs(plan, &memory).join("; "));
    vec![Problem { key: "model".to_owned(), from: Vec::new(), message, help }]
}

/// Single changes that help, with what the run would take.
fn knobs(plan: &Plan, memory: &MemoryPlan) -> Vec<String> {
    let mut tried: Vec<(String, Plan)> = Vec::new();
    let mut try_out = |text: String, change: &dyn Fn(&mut Plan)| {
        let mut changed = plan.clone();
        change(&mut changed);
        tried.push((text, changed));
    };
    if let Some((section, of)) = optimization(plan) {
        let fewer = (of.micro_batch_tokens / 4).max(256);
        try_out(format!("{section}.micro_batch_tokens = {fewer}"), &move |plan| {
            optimizations(plan).for_each(|of| of.micro_batch_tokens = fewer);
        });
        try_out(format!("{section}.gradient_checkpointing = true"), &|plan| {
            optimizations(plan).for_each(|of| of.gradient_checkpointing = true);
        });
    }
    try_out("model.dtype = \"bf16\"".to_owned(), &|plan| plan.model.dtype = Precision::Bf16);
    if plan.pipeline != Pipeline::RewardModel && plan.lora.is_none() {
        try_out("[lora]".to_owned(), &|plan| plan.lora = Some(Default::default()));
    }
    if plan.pipeline.reinforces() {
        let fewer = (plan.most_slots() / 4).max(1);
        try_out(format!("generate.slots = {fewer}"), &move |plan| plan.generate.slots = fewer);
    }
    let worth = |(text, changed): (String, Plan)| {
        let total = MemoryPlan::of(&changed).ok()?.total();
        (total + total / 50 < memory.total()).then(|| format!("with {text} it takes {}", size(total)))
    };
    let mut help: Vec<String> = tried.into_iter().filter_map(worth).collect();
    help.push("a smaller model takes less of everything".to_owned());
    help
}

fn optimizations(plan: &mut Plan) -> impl Iterator<Item = &mut Optimization> {
    let sft = plan.sft.as_mut().map(|sft| &mut sft.optimization);
    let reward = plan.reward_model.as_mut().map(|of| &mut of.optimization);
    let critic = plan.critic.as_mut().map(|critic| &mut critic.optimization);
    [Some(&mut plan.train.optimization), sft, reward, critic].into_iter().flatten()
}

/// The last phase's section and how it trains.
fn optimization(plan: &Plan) -> Option<(&'static str, &Optimization)> {
    match plan.pipeline {
        Pipeline::Grpo | Pipeline::SftThenGrpo | Pipeline::GrpoOffline => Some(("train", &plan.train.optimization)),
        Pipeline::Sft => plan.sft.as_ref().map(|sft| ("sft", &sft.optimization)),
        Pipeline::RewardModel => plan.reward_model.as_ref().map(|of| ("reward_model", &of.optimization)),
    }
}

struct Parts<'a> {
    plan: &'a Plan,
    model: ModelConfig,
    all: Vec<MemoryPart>,
}

/// One trainer's work.
struct Work<'a> {
    model: &'a ModelConfig,
    of: &'a Optimization,
    /// Tokens of a whole batch.
    batch_tokens: u64,
    /// Tokens of the longest sequence.
    longest: u64,
    /// Parameters of its adapters, where they are what is trained.
    adapters: Option<u64>,
}

impl Parts<'_> {
    fn add(&mut self, what: &'static str, bytes: u64, why: String) {
        if bytes > 0 {
            self.all.push(MemoryPart { what, bytes, why });
        }
    }

    fn collect(&mut self) -> Result<(), ModelError> {
        let (plan, model) = (self.plan, self.model.clone());
        let (parameters, on_host) = (parameters(&model), plan.model.device == DeviceName::Cpu);
        let f32s = |copies: u64| 4 * copies * parameters;
        if on_host {
            self.add("program", PROGRAM, "code, libtorch, threads".to_owned());
            self.add("first weights", f32s(1), format!("{} in f32", count(parameters)));
        }
        let longest = self.prompt() + self.answer();
        let samples = plan.samples_per_step() as u64;
        if let Some((_, of)) = optimization(plan) {
            let model = if plan.pipeline == Pipeline::RewardModel { model.scoring() } else { model.clone() };
            self.trainer(
                ["weights", "gradients", "optimizer", "activations", "logits"],
                &Work { model: &model, of, batch_tokens: samples * longest, longest, adapters: adapters(plan, &model)? },
            );
        }
        if !plan.pipeline.reinforces() {
            return Ok(());
        }
        if let Some(critic) = &plan.critic {
            let model = match &critic.path {
                Some(path) => ModelConfig::from_dir(&hub::locate(path)?)?.scoring(),
                None => model.scoring(),
            };
            let names = ["critic weights", "its gradients", "its optimizer", "its activations", "its scores"];
            let work = Work { model: &model, of: &critic.optimization, batch_tokens: samples * longest, longest, adapters: None };
            self.trainer(names, &work);
        }
        let held = if plan.generate.on_new_weights == OnNewWeights::Finish { 3 } else { 2 };
        match plan.lora.as_ref().map(|lora| lora.sync) {
            Some(AdapterSync::Adapter) => {
                let bytes = 4 * held * adapters(plan, &model)?.unwrap_or(0);
                self.add("published", bytes, format!("{held} copies of the adapters in f32: served, and on the way"));
            }
            _ => self.add("published", f32s(held), format!("{held} copies in f32: served, and on the way")),
        }
        let engines = plan.generators() as u64;
        if self.bytes() != 4 {
            let why = format!("{engines} × the generator's copy in {}", plan.model.dtype.word());
            self.add("served", engines * self.bytes() * parameters, why);
        }
        self.cache(engines, longest);
        self.reference(parameters)?;
        for path in plan.reward.rule.folders().map(|(_, path)| path.clone()).collect::<Vec<_>>() {
            let scorer = parameters_of(&path)?;
            self.add("reward model", 8 * scorer, format!("{}: {} in f32, twice", path.display(), count(scorer)));
        }
        Ok(())
    }

    /// Bytes of a number that is computed with.
    fn bytes(&self) -> u64 {
        if self.plan.model.dtype == Precision::F32 { 4 } else { 2 }
    }

    fn prompt(&self) -> u64 {
        match &self.plan.task.data {
            TaskData::Arithmetic(Arithmetic { digits, .. }) => 2 * u64::from(*digits) + 3,
            TaskData::Jsonl(_) | TaskData::Data(_) | TaskData::Rollouts(_) => PROMPT_ASSUMED,
        }
    }

    fn answer(&self) -> u64 {
        match (&self.plan.task.data, self.plan.pipeline) {
            (_, Pipeline::Grpo | Pipeline::SftThenGrpo | Pipeline::GrpoOffline) => {
                let turns = self.plan.environment.as_ref().map_or(1, |environment| environment.max_turns as u64);
                self.plan.generate.max_new_tokens as u64 * turns
            }
            (TaskData::Arithmetic(Arithmetic { digits, .. }), _) => u64::from(*digits) + 2,
            (TaskData::Jsonl(_) | TaskData::Data(_) | TaskData::Rollouts(_), _) => PROMPT_ASSUMED,
        }
    }

    fn trainer(&mut self, [weights, gradients, optimizer, activations, logits]: [&'static str; 5], work: &Work) {
        let (model, of, bytes) = (work.model, work.of, self.bytes());
        let whole = parameters(model);
        let (copy, also) = if bytes == 4 { (0, "") } else { (bytes, ", and a copy to compute with") };
        // Under adapters the weights are the first weights themselves.
        let parameters = work.adapters.unwrap_or(whole);
        let computed = if work.adapters.is_some() { copy * whole } else { 0 };
        let what = if work.adapters.is_some() { "adapters: " } else { "" };
        self.add(weights, (4 + copy) * parameters + computed, format!("the trainer's {what}{} in f32{also}", count(parameters)));
        let side_by_side = self.plan.model.device == DeviceName::Cpu && whole <= SIDE_BY_SIDE;
        let replicas = if side_by_side { of.threads as u64 } else { 1 };
        let tokens = work.batch_tokens.min((of.micro_batch_tokens as u64).max(work.longest));
        let micro_batches = work.batch_tokens.div_ceil(tokens.max(1));
        let at_once = replicas.min(micro_batches);
        // Pieces and their concatenation, unless they are written into place.
        let pass = if of.gradient_checkpointing { 4 } else { 2 * bytes + if bytes == 4 { 0 } else { 4 } };
        let sum = if micro_batches > 1 { 4 } else { 0 };
        let why = format!("{at_once} at a time, {pass} bytes a parameter, and their sum");
        self.add(gradients, (at_once * pass + sum) * parameters, why);
        self.add(optimizer, 8 * parameters, "two moments in f32".to_owned());
        let fused =
            bytes == 4 && self.plan.model.device == DeviceName::Cpu && work.longest as usize <= fused::LONGEST_FUSED_SEQUENCE;
        let layer = per_token_of_layer(model, fused) * bytes;
        let (layers, stream) = (model.layers() as u64, model.hidden_size as u64 * bytes);
        let (held, why) = match of.gradient_checkpointing {
            true => (layers * stream + 2 * layer, "layers' inputs, and one layer"),
            // The last to be computed and the first to be differentiated: two layers' worth is on its way.
            false => ((layers + 2) * layer, "every layer's"),
        };
        let why = format!("{at_once} × {tokens} tokens × {:.1} KiB: {why}", held as f64 / 1024.0);
        self.add(activations, at_once * tokens * held, why);
        if model.head == Head::Words {
            let rows = tokens.min((LOGITS_CHUNK / model.vocab_size as u64).max(1));
            let why = format!("{rows} rows × {} × 4 in f32", model.vocab_size);
            self.add(logits, at_once * rows * model.vocab_size as u64 * 16, why);
        }
    }

    fn cache(&mut self, engines: u64, longest: u64) {
        let evaluated = self.plan.eval.as_ref().filter(|eval| eval.every > 0).map_or(0, |eval| eval.slots as u64 + 1);
        let slots = self.plan.most_slots() as u64 + engines + evaluated;
        let positions = longest.next_multiple_of(32).min(self.model.max_positions as u64);
        let (layers, width) = (self.model.layers() as u64, (self.model.kv_heads * self.model.head_dim) as u64);
        let known = matches!(self.plan.task.data, TaskData::Arithmetic(_));
        let assumed = if known { "" } else { " (prompts of 256 assumed)" };
        let why = format!("{slots} slots × {positions} tokens × {layers} layers × {} numbers{assumed}", 2 * width);
        self.add("kv cache", slots * positions * layers * 2 * width * self.bytes(), why);
        let vocab = self.model.vocab_size as u64;
        self.add("sampling", slots * vocab * 16, format!("{slots} rows × {vocab} × 4 in f32"));
    }

    fn reference(&mut self, parameters: u64) -> Result<(), ModelError> {
        let Some(reference) = &self.plan.reference else { return Ok(()) };
        let copy = if self.bytes() == 4 { 0 } else { self.bytes() };
        let (bytes, why) = match &reference.policy {
            ReferencePolicy::Frozen(frozen) => match &frozen.path {
                Some(path) => ((4 + copy) * parameters_of(path)?, "a folder's weights in f32"),
                None => (copy * parameters, "the first weights, to compute with"),
            },
            _ => ((8 + copy) * parameters, "its weights in f32, and the next"),
        };
        self.add("reference", bytes, why.to_owned());
        Ok(())
    }
}

/// Numbers a token that autograd keeps of one layer, from what its operations save.
fn per_token_of_layer(model: &ModelConfig, fused: bool) -> u64 {
    let (hidden, inner) = (model.hidden_size as u64, model.intermediate_size as u64);
    let (q, k) = ((model.heads * model.head_dim) as u64, (model.kv_heads * model.head_dim) as u64);
    // Norms keep what they get, projections too, attention its input and output, the gate both halves and its product.
    let plain = 4 * hidden + (q + 2 * k) + q + 3 * inner;
    let normed = if model.family.qk_norm() == QkNorm::None { 0 } else { 2 * q + 3 * k };
    // Rotated queries and keys, keys and values for every query head, the output once more; the gate's own result.
    let apart = if fused { 0 } else { (q + k) + 2 * q + q + 2 * inner };
    plain + normed + apart
}

fn parameters(model: &ModelConfig) -> u64 {
    Layout::new(model).total() as u64
}

fn parameters_of(folder: &Path) -> Result<u64, ModelError> {
    Ok(parameters(&ModelConfig::from_dir(&hub::locate(folder)?)?))
}

/// How many parameters the adapters of `[lora]` have.
fn adapters(plan: &Plan, model: &ModelConfig) -> Result<Option<u64>, ModelError> {
    let Some(of) = &plan.lora else { return Ok(None) };
    let targets: Vec<&str> = of.targets.iter().map(|target| target.word()).collect();
    Ok(Some(Lora::new(of.rank, of.alpha, &targets)?.layout(model).total() as u64))
}

/// The shape of the recipe's model.
fn shape(plan: &Plan) -> Result<ModelConfig, ModelError> {
    let tiny = match &plan.model.source {
        ModelSource::Folder(folder) => return ModelConfig::from_dir(&hub::locate(&folder.name())?),
        ModelSource::Tiny(tiny) => tiny,
    };
    Ok(ModelConfig {
        family: Family::Llama,
        head: Head::Words,
        vocab_size: tiny.vocab,
        hidden_size: tiny.hidden,
        intermediate_size: tiny.intermediate,
        heads: tiny.heads,
        kv_heads: tiny.kv_heads,
        head_dim: tiny.hidden / tiny.heads.max(1),
        max_positions: 2048,
        rms_norm_eps: 1e-6,
        rope_theta: 10_000.0,
        rope_scaling: RopeScaling::Default,
        windows: vec![None; tiny.layers],
        unrotated: Vec::new(),
        factors: Factors::ONE,
        qkv_bias: false,
        output_bias: false,
        mlp_bias: false,
        tied: true,
        initializer_range: 0.02,
        dtype: Dtype::F32,
        eos_token_ids: Vec::new(),
        pad_token_id: None,
        other: Default::default(),
    })
}

/// What this process may take: the machine's memory, or what its control groups allow.
fn machine_memory() -> Option<u64> {
    let read = |path: &Path| std::fs::read_to_string(path).ok();
    let meminfo = read(Path::new("/proc/meminfo"))?;
    let kib = |line: &str| line.strip_prefix("MemTotal:")?.trim().strip_suffix("kB")?.trim().parse::<u64>().ok();
    let total = meminfo.lines().find_map(kib)? * 1024;
    let group = read(Path::new("/proc/self/cgroup")).unwrap_or_default();
    let own = group.lines().find_map(|line| line.strip_prefix("0::/")).unwrap_or("").to_owned();
    let root = Path::new("/sys/fs/cgroup");
    let levels = Path::new(&own).ancestors().map(|level| root.join(level).join("memory.max"));
    let limits = levels.chain([root.join("memory/memory.limit_in_bytes")]).filter_map(|path| read(&path)?.trim().parse().ok());
    limits.chain([total]).min()
}

fn count(parameters: u64) -> String {
    match parameters {
        0..10_000_000 => format!("{:.2} million parameters", parameters as f64 / 1e6),
        10_000_000..1_000_000_000 => format!("{:.0} million parameters", parameters as f64 / 1e6),
        _ => format!("{:.2} billion parameters", parameters as f64 / 1e9),
    }
}

/// `3.4 GiB`.
fn size(bytes: u64) -> String {
    let mib = bytes as f64 / f64::from(1 << 20);
    if mib < 1000.0 { format!("{mib:.1} MiB") } else { format!("{:.2} GiB", mib / 1024.0) }
}
