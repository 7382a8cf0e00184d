//! Memory plan of a run, one formula per part, compared with measured peaks by
//! `tests/models/memory.rs`.
//!
//! Counts memory that is in use at the same time at the peak of a step. Unknown sizes, such as
//! prompts of an unread file, are assumed and reported as assumptions. Limits of the model's own shape
//! are checked here too.

mod parts;
mod per_token;
mod ranks;
mod servers;
mod shape;
#[cfg(test)]
mod tests;

use std::fmt;

use super::lora::BaseFormat;
use super::model::{DeviceName, ModelSource};
use super::plan::{Pipeline, Plan};
use super::train::Optimization;
use super::trainer::TrainerBackend;
use crate::engine::settings::Engine;
use crate::model::{Dtype, Family, Layout, Lora, ModelConfig, ModelError, gpu_memory, gpu_total};
use crate::ranks::Shard;
use crate::settings::error::Problem;
use crate::train::{MasterFormat, MomentFormat};
use crate::util::cores::cores;
use crate::util::memory::machine_memory;
use ranks::Division;
use shape::{adapters, in_4_bits, shape};

/// Memory of a run on one device, by part, and the memory available.
#[derive(Clone, Debug, PartialEq)]
pub struct MemoryPlan {
    /// The device's name in recipes.
    pub device: String,
    /// Parts and their sizes.
    pub parts: Vec<MemoryPart>,
    /// Available memory, if known: the processor's, or a GPU's free memory, which other processes
    /// may use as well.
    pub has: Option<u64>,
}

/// One thing that takes memory.
#[derive(Clone, Debug, PartialEq)]
pub struct MemoryPart {
    /// Name of the part.
    pub what: &'static str,
    /// Bytes.
    pub bytes: u64,
    /// Derivation of the size.
    pub why: String,
    /// When it is taken.
    pub taken: Taken,
}

/// When a part of memory is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taken {
    /// Always.
    Always,
    /// Only while a step is trained.
    InSteps,
    /// Only between steps: by servers that sleep meanwhile.
    BetweenSteps,
    /// Only before the other parts are there: everything that a first phase takes.
    Before,
}

impl MemoryPlan {
    /// Computes the memory plan of each device, the policy's first. Reads the model's
    /// `config.json`, and no weights. Empty if a server trains and samples. Of several ranks it is
    /// rank 0's, which takes the most; without a launcher's variables their number is not known.
    pub fn of(plan: &Plan) -> Result<Vec<Self>, ModelError> {
        Self::of_ranks(plan, ranks::here())
    }

    /// [`MemoryPlan::of`] rank 0 of this number of ranks.
    pub fn of_ranks(plan: &Plan, ranks: Option<usize>) -> Result<Vec<Self>, ModelError> {
        let mut all: Vec<MemoryPlan> = Vec::new();
        if plan.trainer.backend == TrainerBackend::Tinker {
            return Ok(all);
        }
        check_bounds(plan, &shape(plan)?)?;
        for (device, part) in parts::parts(plan, ranks)? {
            let word = device.word();
            if all.iter().all(|of| of.device != word) {
                let has = match device {
                    DeviceName::Cpu => machine_memory(),
                    DeviceName::Cuda(index) => gpu_memory(index).map(|memory| memory.free),
                };
                all.push(MemoryPlan { device: word.clone(), parts: Vec::new(), has });
            }
            all.iter_mut().filter(|of| of.device == word).for_each(|of| of.parts.push(part.clone()));
        }
        servers::add(&plan.engine, &mut all, &gpu_total);
        for phase in Self::of_warm_up(plan, ranks)? {
            let why = format!("[sft] alone, before the rest: {}", phase.largest());
            let part = MemoryPart { what: "warm-up", bytes: phase.peak(), why, taken: Taken::Before };
            match all.iter_mut().find(|of| of.device == phase.device) {
                Some(of) => of.parts.push(part),
                None => all.push(MemoryPlan { parts: vec![part], ..phase }),
            }
        }
        for of in &mut all {
            let total = of.total();
            of.parts.retain(|part| part.taken != Taken::Before || part.bytes > total);
        }
        Ok(all)
    }

    /// The memory plan of the supervised phase before reinforcement, if there is one.
    fn of_warm_up(plan: &Plan, ranks: Option<usize>) -> Result<Vec<Self>, ModelError> {
        if plan.sft.is_none() || !plan.pipeline.reinforces() {
            return Ok(Vec::new());
        }
        // Only that of `sft_then_grpo` saves checkpoints.
        let saves = plan.pipeline == Pipeline::SftThenGrpo;
        let alone = Plan { pipeline: Pipeline::Sft, engine: Engine::default(), mix: None, ..plan.clone() };
        let mut all = Self::of_ranks(&alone, ranks)?;
        all.iter_mut().for_each(|of| of.parts.retain(|part| saves || part.what != "checkpoint"));
        all.retain(|of| !of.parts.is_empty());
        Ok(all)
    }

    fn taken(&self, when: Taken) -> u64 {
        self.parts.iter().filter(|part| part.taken == when).map(|part| part.bytes).sum()
    }

    /// The most that is taken together, once all parts are there.
    pub fn total(&self) -> u64 {
        self.taken(Taken::Always) + self.taken(Taken::InSteps).max(self.taken(Taken::BetweenSteps))
    }

    /// The most that is taken together at any time.
    pub fn peak(&self) -> u64 {
        let before = self.parts.iter().filter(|part| part.taken == Taken::Before).map(|part| part.bytes).max();
        self.total().max(before.unwrap_or(0))
    }

    /// The three largest parts of those that make the peak.
    fn largest(&self) -> String {
        let before = self.peak() > self.total();
        let mut largest: Vec<&MemoryPart> = self.parts.iter().filter(|part| (part.taken == Taken::Before) == before).collect();
        largest.sort_by_key(|part| std::cmp::Reverse(part.bytes));
        let named = |part: &MemoryPart| match before {
            true => format!("{} {} ({})", part.what, size(part.bytes), part.why),
            false => format!("{} {}", part.what, size(part.bytes)),
        };
        largest.into_iter().take(if before { 1 } else { 3 }).map(named).collect::<Vec<_>>().join(", ")
    }

    /// What is taken between the steps of the trainers.
    pub fn between_steps(&self) -> u64 {
        self.taken(Taken::Always) + self.taken(Taken::BetweenSteps)
    }

    /// Returns true if the run needs more memory than there is.
    pub fn exceeds(&self) -> bool {
        self.has.is_some_and(|has| self.peak() > has)
    }
}

impl fmt::Display for MemoryPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let has = self.has.map_or_else(|| "of an unknown amount".to_owned(), |has| format!("of {}", size(has)));
        writeln!(f, "  memory on {:<8} about {} {has}", self.device, size(self.peak()))?;
        for MemoryPart { what, bytes, why, .. } in &self.parts {
            writeln!(f, "    {what:<16} {:>9}  {why}", size(*bytes))?;
        }
        Ok(())
    }
}

/// Reports limits of the model that the recipe exceeds. Reads its `config.json`, and no weights; errors of
/// the model itself are reported when it is loaded.
pub(super) fn limits(plan: &Plan) -> Vec<Problem> {
    let model = match shape(plan) {
        Ok(model) => model,
        Err(wrong @ (ModelError::Context(..) | ModelError::FixedContext(_))) => {
            return vec![Problem::of("model.context", wrong.to_string(), "leave it out for the context of pre-training")];
        }
        Err(_) => return Vec::new(),
    };
    let without_effect = inputs_that_stay(plan, &model);
    adapters_without_a_place(plan, &model)
        .into_iter()
        .chain(texts_beyond_its_positions(plan, &model))
        .chain(turns_with_channels(plan, &model))
        .chain(without_effect)
        .collect()
}

/// Layers' inputs that shall wait on the host under adapters over a folder, which is not in 4 bits.
fn inputs_that_stay(plan: &Plan, model: &ModelConfig) -> Vec<Problem> {
    let stored = plan.lora.as_ref().is_some_and(|lora| lora.base == BaseFormat::Stored);
    let is_on_gpu = matches!(plan.model.source, ModelSource::Folder(_)) && plan.model.device != DeviceName::Cpu;
    if !stored || !is_on_gpu || plan.ranks.shard == Shard::Parameters {
        return Vec::new();
    }
    // The numbers below a new score head are whole.
    let again = |section: &str| in_4_bits(plan) && (section != "reward_model" || model.scores);
    let sections = plan
        .optimizations()
        .filter(|(section, of)| *section != "critic" && of.activations_on_host && !of.gradient_checkpointing && !again(section));
    let problem = |(section, _)| {
        let key = format!("{section}.activations_on_host");
        let why = "the folder is not in 4 bits, and without gradient_checkpointing all that layers compute is kept where it is computed";
        Problem::of(&*key, format!("`{key}` has no effect: {why}"), "leave it out")
    };
    sections.map(problem).collect()
}

fn adapters_without_a_place(plan: &Plan, model: &ModelConfig) -> Option<Problem> {
    // A rank out of its range is reported by its own key.
    plan.lora.as_ref().filter(|of| (1..=Lora::MOST_RANK).contains(&of.rank))?;
    let Err(unknown @ ModelError::Target(..)) = adapters(plan, model) else { return None };
    Some(Problem::of("lora.targets", unknown.to_string(), "\"all-linear\" fits every model"))
}

/// An environment for gpt-oss, whose published chat template raises an error for turns as the model writes
/// them.
fn turns_with_channels(plan: &Plan, model: &ModelConfig) -> Option<Problem> {
    let refused = model.family == Family::GptOss && plan.environment.is_some() && plan.chat.template.is_none();
    let message = "[environment] needs a model whose chat template renders its own turns: that of \"gpt_oss\" rejects \
                   turns with channels, so every rollout would be lost at its second turn, and no parser reads its tool calls";
    let help = "leave [environment] out, train another model, or name a chat template that renders such turns: chat.template";
    refused.then(|| Problem::of("environment", message, help))
}

/// Samples longer than the model reads, and answers that leave no room for a prompt.
fn texts_beyond_its_positions(plan: &Plan, model: &ModelConfig) -> Vec<Problem> {
    let positions = model.max_positions;
    let sample = plan.sft.as_ref().and_then(|sft| sft.max_length).map(|most| ("sft.max_length", most, positions));
    let answers = plan.pipeline.reinforces().then_some(("generate.max_new_tokens", plan.generate.max_new_tokens, positions - 1));
    let asked = plan.eval.as_ref().and_then(|eval| eval.max_new_tokens).map(|most| ("eval.max_new_tokens", most, positions - 1));
    let beyond = |(key, most, room): (&str, usize, usize)| {
        let message = format!("`{key}` is {most}, but the model reads {positions} tokens, prompt and answer together");
        let help = format!("lower it: {} leaves a prompt as much room as its answer", positions / 2);
        let help = if room == positions { format!("lower it to {positions}, or remove it") } else { help };
        let longer = model.contexts().filter(|(_, longest)| *longest > positions);
        let help = match longer {
            Some((_, longest)) => format!("{help}; or set model.context, up to {longest}"),
            None => help,
        };
        (most > room).then(|| Problem::of(key, message, help))
    };
    [sample, answers, asked].into_iter().flatten().filter_map(beyond).collect()
}

/// Reports a run that cannot fit, with changes that help. Ranks of unknown number may divide what does not.
pub(crate) fn problems(plan: &Plan) -> Vec<Problem> {
    problems_on(plan, ranks::here())
}

/// Reports a run that cannot fit because no launcher started the ranks that its `[ranks]` divides it among.
/// Empty where one did, and where [`load`](crate::recipe::load) reports it already.
#[must_use]
pub fn beyond_one_process(plan: &Plan) -> Vec<Problem> {
    if !Division::of(plan, ranks::here()).is_open() {
        return Vec::new();
    }
    let launched = |problem: Problem| Problem {
        help: format!("start its ranks: rollflow launch --ranks 2 …; or {}", problem.help),
        ..problem
    };
    problems_on(plan, Some(1)).into_iter().map(launched).collect()
}

fn problems_on(plan: &Plan, ranks: Option<usize>) -> Vec<Problem> {
    if !plan.model.check_memory {
        return Vec::new();
    }
    let all = match MemoryPlan::of_ranks(plan, ranks) {
        Ok(all) => all,
        Err(error @ ModelError::Uncountable(key, _)) => {
            return vec![Problem::of(key, error.to_string(), "no machine has so much memory")];
        }
        // Errors of the model's folder are reported by its own check.
        Err(_) => return Vec::new(),
    };
    if Division::of(plan, ranks).is_open() {
        return Vec::new();
    }
    all.iter().filter(|memory| memory.exceeds()).map(|memory| problem(plan, ranks, memory)).collect()
}

fn problem(plan: &Plan, ranks: Option<usize>, memory: &MemoryPlan) -> Problem {
    let message = format!(
        "the run takes about {} on {}, which has {}: most of it is {}",
        size(memory.peak()),
        memory.device,
        size(memory.has.unwrap_or(0)),
        memory.largest()
    );
    let help = format!("{}; model.check_memory = false runs it all the same", knobs(plan, ranks, memory).join("; "));
    Problem::of("model", message, help)
}

/// Single changes that help, with the memory of the run after each.
fn knobs(plan: &Plan, ranks: Option<usize>, memory: &MemoryPlan) -> Vec<String> {
    let mut tried: Vec<(String, Plan)> = Vec::new();
    let mut try_out = |text: String, change: &dyn Fn(&mut Plan)| {
        let mut changed = plan.clone();
        change(&mut changed);
        tried.push((text, changed));
    };
    let warms_up = memory.parts.iter().any(|part| part.what == "warm-up" && part.taken == Taken::Before);
    let of_section = if warms_up { plan.optimizations().find(|(section, _)| *section == "sft") } else { optimization(plan) };
    if let Some((section, of)) = of_section {
        let fewer = (of.micro_batch_tokens / 4).max(256);
        try_out(format!("{section}.micro_batch_tokens = {fewer}"), &move |plan| {
            optimizations(plan).for_each(|of| of.micro_batch_tokens = fewer);
        });
        try_out(format!("{section}.gradient_checkpointing = true"), &|plan| {
            optimizations(plan).for_each(|of| of.gradient_checkpointing = true);
        });
        try_out(format!("{section}.moments = \"8-bit\""), &|plan| {
            optimizations(plan).for_each(|of| of.moments = MomentFormat::EightBit);
        });
        if plan.model.precision() == Dtype::Bf16 && plan.lora.is_none() {
            try_out(format!("{section}.masters = \"bf16\""), &|plan| {
                optimizations(plan).for_each(|of| of.masters = MasterFormat::Bf16);
            });
        }
        if plan.model.device != DeviceName::Cpu && of.gradient_checkpointing {
            try_out(format!("{section}.activations_on_host = true"), &|plan| {
                optimizations(plan).for_each(|of| of.activations_on_host = true);
            });
        }
    }
    try_out("model.dtype = \"bf16\"".to_owned(), &|plan| plan.model.dtype = Some(Dtype::Bf16));
    match plan.lora {
        None => try_out("[lora]".to_owned(), &|plan| plan.lora = Some(Default::default())),
        Some(_) => try_out("lora.base = \"nf4\"".to_owned(), &|plan| {
            let lora = plan.lora.iter_mut();
            lora.for_each(|lora| (lora.base, lora.sync) = (BaseFormat::Nf4, None));
        }),
    }
    if plan.pipeline.reinforces() {
        let fewer = (plan.most_slots() / 4).max(1);
        try_out(format!("generate.max_num_seqs = {fewer}"), &move |plan| plan.generate.max_num_seqs = fewer);
        let half = plan.most_slots() * (plan.generate.max_new_tokens + 256) / 2;
        try_out(format!("generate.cache_tokens = {half}"), &move |plan| plan.generate.cache_tokens = Some(half));
        try_out("generate.prefix_cache = 0".to_owned(), &|plan| plan.generate.prefix_cache = Some(0));
    } else if let Some(eval) = &plan.eval {
        let fewer = (eval.max_num_seqs / 4).max(1);
        try_out(format!("eval.max_num_seqs = {fewer}"), &move |plan| {
            plan.eval.iter_mut().for_each(|eval| eval.max_num_seqs = fewer);
        });
    }
    if ranks.is_some() && plan.lora.is_none() {
        try_out("ranks.shard = \"parameters\"".to_owned(), &|plan| plan.ranks.shard = Shard::Parameters);
    }
    if let Some(share) = plan.engine.gpu_memory {
        if plan.flow.max_staleness == 0 {
            try_out("engine.sleep = true".to_owned(), &|plan| plan.engine.sync.sleep = true);
        }
        let less = (share * 50.0).round() / 100.0;
        try_out(format!("engine.gpu_memory = {less}"), &move |plan| plan.engine.gpu_memory = Some(less));
    }
    let worth = |(text, changed): (String, Plan)| {
        let all = MemoryPlan::of_ranks(&changed, ranks).ok()?;
        let peak = all.iter().find(|of| of.device == memory.device).map_or(0, MemoryPlan::peak);
        (peak + peak / 50 < memory.peak()).then(|| format!("with {text} it takes {}", size(peak)))
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
    let last = match plan.pipeline {
        Pipeline::Sft => "sft",
        Pipeline::RewardModel => "reward_model",
        Pipeline::Grpo | Pipeline::SftThenGrpo | Pipeline::Distill | Pipeline::GrpoOffline | Pipeline::Dpo => "train",
    };
    plan.optimizations().find(|(section, _)| *section == last)
}

/// Largest countable part: 256 PiB, more than any machine has. The sum of dozens of parts fits in
/// 64 bits.
const COUNTABLE: f64 = (1_u64 << 58) as f64;
/// Upper bounds of a prompt's tokens and of a number's bytes, with their overhead.
const PROMPT: f64 = 1024.0;
const BYTES: f64 = 32.0;

/// Rejects a plan whose memory can't be counted in 64 bits, and names its largest setting.
fn check_bounds(plan: &Plan, model: &ModelConfig) -> Result<(), ModelError> {
    let (sft, pairs) = (plan.sft.as_ref(), plan.reward_model.as_ref());
    let most = |of: fn(&Optimization) -> usize| plan.optimizations().map(|(_, section)| of(section)).max().unwrap_or(1);
    let settings = [
        ("batch.groups", plan.batch.groups),
        ("generate.group_size", plan.generate.group_size),
        ("generate.max_new_tokens", plan.generate.max_new_tokens),
        ("environment.max_turns", plan.environment.as_ref().map_or(1, |environment| environment.limits.max_turns)),
        ("generate.max_num_seqs", plan.most_slots()),
        ("generate.prefix_cache", plan.remembered()),
        ("generate.workers", plan.generate.workers),
        ("eval.max_num_seqs", plan.eval.as_ref().map_or(1, |eval| eval.max_num_seqs)),
        ("sft.batch", sft.map_or(1, |sft| sft.batch)),
        ("reward_model.batch", pairs.map_or(1, |of| of.batch)),
        ("train.micro_batch_tokens", most(|of| of.micro_batch_tokens)),
        ("train.threads", most(|of| of.threads.unwrap_or_else(cores))),
    ];
    let [groups, group_size, new_tokens, turns, slots, remembered, workers, exam, sft, pairs, micro, threads] =
        settings.map(|(_, value)| value as f64);
    let longest = PROMPT + (new_tokens * turns).min(new_tokens.max(model.max_positions as f64));
    let tokens = (groups * group_size + sft + 2.0 * pairs) * longest + threads * (micro + longest);
    let (q, kv) = ((model.heads * model.head_dim) as f64, (model.kv_heads * model.head_dim) as f64);
    let layer = 8.0 * (model.hidden_size as f64 + model.active_width() as f64 + q + kv);
    let (layers, vocabulary) = (model.layers() as f64 + 4.0, model.vocab_size as f64);
    let rows = slots + remembered + workers + exam + 2.0;
    let copies = threads + workers + plan.devices().len() as f64 + 8.0;
    let products = [
        tokens * layers * layer * BYTES,
        tokens * group_size * longest,
        rows * longest * layers * kv * BYTES,
        (rows + threads) * vocabulary * BYTES + threads * (1_u64 << 25) as f64 * BYTES,
        copies * Layout::new(model).total() as f64 * BYTES,
    ];
    if products.into_iter().all(|product| product < COUNTABLE) {
        return Ok(());
    }
    let (key, value) = settings.into_iter().max_by_key(|(_, value)| *value).unwrap_or_default();
    Err(ModelError::Uncountable(key, value))
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
