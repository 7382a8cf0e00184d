//! Memory plan of a run, one formula per part, compared with measured peaks by
//! `tests/models/memory.rs`.
//!
//! Counts memory that is in use at the same time at the peak of a step. Unknown sizes, such as
//! prompts of an unread file, are assumed and reported as assumptions. Limits of the model's own shape
//! are checked here too.

mod parts;
mod per_token;
mod servers;
mod shape;

use std::fmt;
use std::path::Path;

use super::lora::BaseFormat;
use super::model::DeviceName;
use super::plan::{Pipeline, Plan};
use super::train::Optimization;
use super::trainer::TrainerBackend;
use crate::model::{Dtype, Layout, Lora, ModelConfig, ModelError, gpu_memory};
use crate::settings::error::Problem;
use crate::train::{MasterFormat, MomentFormat};
use crate::util::cores::cores;
use shape::{adapters, shape};

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
}

impl MemoryPlan {
    /// Computes the memory plan of each device, the policy's first. Reads the model's
    /// `config.json`, and no weights. Empty if a server trains and samples.
    pub fn of(plan: &Plan) -> Result<Vec<Self>, ModelError> {
        let mut all: Vec<MemoryPlan> = Vec::new();
        if plan.trainer.backend == TrainerBackend::Tinker {
            return Ok(all);
        }
        check_bounds(plan, &shape(plan)?)?;
        for (device, part) in parts::parts(plan)? {
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
        servers::add(&plan.engine, &mut all, &|gpu| gpu_memory(gpu).map(|memory| memory.total));
        Ok(all)
    }

    fn taken(&self, when: Taken) -> u64 {
        self.parts.iter().filter(|part| part.taken == when).map(|part| part.bytes).sum()
    }

    /// The most that is taken together.
    pub fn total(&self) -> u64 {
        self.taken(Taken::Always) + self.taken(Taken::InSteps).max(self.taken(Taken::BetweenSteps))
    }

    /// What is taken between the steps of the trainers.
    pub fn between_steps(&self) -> u64 {
        self.taken(Taken::Always) + self.taken(Taken::BetweenSteps)
    }

    /// Returns true if the run needs more memory than there is.
    pub fn exceeds(&self) -> bool {
        self.has.is_some_and(|has| self.total() > has)
    }
}

impl fmt::Display for MemoryPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let has = self.has.map_or_else(|| "of an unknown amount".to_owned(), |has| format!("of {}", size(has)));
        writeln!(f, "  memory on {:<8} about {} {has}", self.device, size(self.total()))?;
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
    adapters_without_a_place(plan, &model).into_iter().chain(texts_beyond_its_positions(plan, &model)).collect()
}

fn adapters_without_a_place(plan: &Plan, model: &ModelConfig) -> Option<Problem> {
    // A rank out of its range is reported by its own key.
    plan.lora.as_ref().filter(|of| (1..=Lora::MOST_RANK).contains(&of.rank))?;
    let Err(unknown @ ModelError::Target(..)) = adapters(plan, model) else { return None };
    Some(Problem::of("lora.targets", unknown.to_string(), "\"all-linear\" fits every model"))
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

/// Reports a run that cannot fit, with changes that help.
pub(crate) fn problems(plan: &Plan) -> Vec<Problem> {
    if !plan.model.check_memory {
        return Vec::new();
    }
    let all = match MemoryPlan::of(plan) {
        Ok(all) => all,
        Err(error @ ModelError::Uncountable(key, _)) => {
            return vec![Problem::of(key, error.to_string(), "no machine has so much memory")];
        }
        // Errors of the model's folder are reported by its own check.
        Err(_) => return Vec::new(),
    };
    all.iter().filter(|memory| memory.exceeds()).map(|memory| problem(plan, memory)).collect()
}

fn problem(plan: &Plan, memory: &MemoryPlan) -> Problem {
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
    let help = format!("{}; model.check_memory = false runs it all the same", knobs(plan, memory).join("; "));
    Problem::of("model", message, help)
}

/// Single changes that help, with the memory of the run after each.
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
    }
    if let Some(share) = plan.engine.gpu_memory {
        if plan.flow.max_staleness == 0 {
            try_out("engine.sleep = true".to_owned(), &|plan| plan.engine.sync.sleep = true);
        }
        let less = (share * 50.0).round() / 100.0;
        try_out(format!("engine.gpu_memory = {less}"), &move |plan| plan.engine.gpu_memory = Some(less));
    }
    let worth = |(text, changed): (String, Plan)| {
        let all = MemoryPlan::of(&changed).ok()?;
        let total = all.iter().find(|of| of.device == memory.device).map_or(0, MemoryPlan::total);
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
    let longest = PROMPT + new_tokens * turns;
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

/// Memory of this process: the machine's, or the limit of its control groups.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::parse;

    #[test]
    fn a_gpu_s_plan_counts_what_only_a_gpu_holds_and_compares_with_what_is_free() {
        let text = "pipeline = 'grpo'\n[model]\nkind = 'tiny'\n[task]\nkind = 'arithmetic'\n[reward]\nkind = 'exact'\n";
        let mut plan = parse("memory.toml", text, &[]).unwrap_or_else(|errors| panic!("{errors}"));
        let parts =
            |plan: &Plan| -> Vec<&'static str> { MemoryPlan::of(plan).unwrap()[0].parts.iter().map(|part| part.what).collect() };
        let host = parts(&plan);
        assert!(host.contains(&"program") && !host.contains(&"context") && !host.contains(&"prefill"), "{host:?}");
        plan.model.device = DeviceName::Cuda(0);
        let gpu = parts(&plan);
        assert!(gpu.contains(&"context") && gpu.contains(&"prefill") && gpu.contains(&"sampling"), "{gpu:?}");
        let has = gpu_memory(0).map(|memory| memory.free);
        let all = MemoryPlan::of(&plan).unwrap();
        assert_eq!(all[0].has.is_some(), has.is_some());
    }

    /// In f32, which is published, they are no copies. The mapped memory has room for a piece.
    #[test]
    fn tensors_that_servers_take_are_counted_once_more_in_another_format_only() {
        let text = "pipeline = 'grpo'\n[model]\nkind = 'tiny'\n[task]\nkind = 'arithmetic'\n[reward]\nkind = 'exact'\n\
                    [engine]\nlaunch = 'vllm'\ncarry = 'ipc'\n";
        let parts = |format| {
            let sets = ["model.device=cuda", "model.dtype=f32", format].map(str::to_owned);
            let plan = parse("memory.toml", text, &sets).unwrap_or_else(|errors| panic!("{errors}"));
            let all = MemoryPlan::of(&plan).unwrap();
            ["for servers", "mapped"].map(|what| all[0].parts.iter().find(|part| part.what == what).map(|part| part.bytes))
        };
        let ([same, whole], [rounded, half]) = (parts("engine.dtype=f32"), parts("engine.dtype=bf16"));
        assert_eq!((same, rounded, whole), (None, whole, half.map(|half| 2 * half)));
    }

    /// Of a GPU's state, too, at the end of the run at the latest.
    #[test]
    fn the_copy_for_a_checkpoint_is_counted_in_host_memory() {
        let text = "pipeline = 'grpo'\n[model]\nkind = 'tiny'\n[task]\nkind = 'arithmetic'\n[reward]\nkind = 'exact'\n";
        let mut plan = parse("memory.toml", text, &[]).unwrap_or_else(|errors| panic!("{errors}"));
        let mut copy = |device, every| {
            (plan.model.device, plan.checkpoint.every) = (device, every);
            let all = MemoryPlan::of(&plan).unwrap();
            let of = |memory: &MemoryPlan| memory.parts.iter().find(|part| part.what == "checkpoint").map(|part| part.bytes);
            all.iter().filter_map(|memory| Some((memory.device.clone(), of(memory)?))).collect::<Vec<_>>()
        };
        let (host, gpu) = (copy(DeviceName::Cpu, 5), copy(DeviceName::Cuda(0), 5));
        assert!(host.len() == 1 && host[0].0 == "cpu" && host == gpu, "{host:?} {gpu:?}");
        assert_eq!((copy(DeviceName::Cpu, 0), copy(DeviceName::Cuda(0), 0)), (Vec::new(), gpu));
    }

    /// Sizes of Qwen2.5: hidden, feed-forward, layers, heads, key heads, and whether the head is tied.
    const SIZES: [(&str, [usize; 5], bool); 6] = [
        ("0.5B", [896, 4864, 24, 14, 2], true),
        ("1.5B", [1536, 8960, 28, 12, 2], true),
        ("3B", [2048, 11008, 36, 16, 2], true),
        ("7B", [3584, 18944, 28, 28, 4], false),
        ("14B", [5120, 13824, 48, 40, 8], false),
        ("32B", [5120, 27648, 64, 40, 8], false),
    ];

    /// GPU memory of a GRPO run in bf16 with 32 sequences of 256 + 1024 tokens, in bytes.
    fn needed(
        [hidden, inner, layers, heads, kv_heads]: [usize; 5],
        tied: bool,
        lora: &str,
        change: fn(&mut Optimization),
    ) -> u64 {
        let folder = tempfile::tempdir().unwrap();
        let config = serde_json::json!({
            "model_type": "qwen2", "vocab_size": 151_936, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads, "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6,
            "rope_theta": 1e6, "tie_word_embeddings": tied, "hidden_act": "silu", "eos_token_id": 151_645, "torch_dtype": "bfloat16",
        });
        std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
        let text = format!(
            "pipeline = 'grpo'\n[model]\nkind = 'folder'\npath = '{}'\n[task]\nkind = 'data'\ndata = 'train.jsonl'\n[reward]\nkind = 'exact'\n\
             [generate]\nmax_new_tokens = 1024\nmax_num_seqs = 32\n[train]\ngradient_checkpointing = true\nmicro_batch_tokens = 8192\n{lora}",
            folder.path().display()
        );
        let mut plan = parse("memory.toml", &text, &[]).unwrap_or_else(|errors| panic!("{errors}"));
        plan.model.device = DeviceName::Cuda(0);
        change(&mut plan.train.optimization);
        let all = MemoryPlan::of(&plan).unwrap();
        all.iter().find(|memory| memory.device == "cuda:0").unwrap().total()
    }

    const ADAPTERS: &str = "[lora]\nrank = 16\nsync = 'adapter'\n";
    const OVER_4_BITS: &str = "[lora]\nrank = 16\nsync = 'adapter'\nbase = 'nf4'\n";

    #[test]
    fn adapters_of_a_7b_model_over_4_bits_fit_a_card_of_24_gb() {
        let [whole, stored] = [ADAPTERS, OVER_4_BITS].map(|lora| needed(SIZES[3].1, SIZES[3].2, lora, |_| ()));
        // What such a card has is 23.6 GiB.
        let card = (236 << 30) / 10;
        assert!(stored < 22 << 30 && whole > card, "{} and {}", size(stored), size(whole));
    }

    #[test]
    fn the_page_of_cards_is_what_the_plan_says() {
        let mut text = "# Memory of GPUs\n\nWhat `rollflow check` counts for trainer and generator of a GRPO run on one GPU: bf16, 32 sequences of 256 + 1024 tokens in flight, \
                        micro-batches of 8192 tokens, gradient checkpointing; shapes of Qwen2.5, in folders in bf16. Adapters are of rank 16, with `lora.sync = \"adapter\"`. In \
                        brackets the smallest card of 16, 24, 48, 80, 141 and 180 GB that has room. The page is generated: `ROLLFLOW_WRITE_DOCS=1 cargo test --workspace --lib memory`.\n\n\
                        | model | all weights | with moments in 8 bits | and parameters in bf16 alone | with moments and layers' inputs on the host | adapters | adapters over 4 bits |\n|---|---|---|---|---|---|---|\n"
            .to_owned();
        for (name, shape, tied) in SIZES {
            let cell = |lora: &str, change: fn(&mut Optimization)| {
                let bytes = needed(shape, tied, lora, change);
                // A twentieth is another program's, or lost between blocks.
                let card = [16, 24, 48, 80, 141, 180].into_iter().find(|gb| bytes as f64 * 1.05 < f64::from(*gb) * 1e9);
                format!("{} ({})", size(bytes), card.map_or_else(|| "none".to_owned(), |gb| format!("{gb} GB")))
            };
            let on_host = |of: &mut Optimization| (of.moments, of.activations_on_host) = (MomentFormat::Host, true);
            let in_8_bits = |of: &mut Optimization| of.moments = MomentFormat::EightBit;
            let small = |of: &mut Optimization| (of.moments, of.masters) = (MomentFormat::EightBit, MasterFormat::Bf16);
            let plain = |_: &mut Optimization| ();
            let whole = [cell("", plain), cell("", in_8_bits), cell("", small), cell("", on_host)];
            let cells = whole.into_iter().chain([cell(ADAPTERS, plain), cell(OVER_4_BITS, plain)]).collect::<Vec<_>>();
            let cells = cells.join(" | ");
            text += &format!("| {name} | {cells} |\n");
        }
        let page = "docs/reference/memory.md";
        if std::env::var_os("ROLLFLOW_WRITE_DOCS").is_some() {
            std::fs::write(page, &text).unwrap();
        }
        assert_eq!(std::fs::read_to_string(page).unwrap_or_default(), text, "run it with ROLLFLOW_WRITE_DOCS=1");
    }

    /// Also alongside a device that is not there.
    #[test]
    fn texts_longer_than_the_model_reads_are_refused_by_their_keys() {
        let beyond = |pipeline: &str, sets: &[&str]| -> Vec<String> {
            let file = tempfile::NamedTempFile::new().unwrap();
            let sections = "task.kind = 'arithmetic'\nsft = {}\neval = {}\nmodel = { kind = 'tiny', device = 'cuda:63' }\n";
            std::fs::write(file.path(), format!("pipeline = '{pipeline}'\n{sections}")).unwrap();
            let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
            let errors = crate::recipe::load(file.path(), &sets).unwrap_err();
            errors.iter().map(|error| error.key.clone()).collect()
        };
        let most = ["generate.max_new_tokens=2047", "sft.max_length=2048", "eval.max_new_tokens=2047"];
        let one_more = ["generate.max_new_tokens=2048", "sft.max_length=2049", "eval.max_new_tokens=2048"];
        for (pipeline, sets, keys) in [
            ("grpo", &[][..], &["model.device"][..]),
            ("grpo", &most, &["model.device"]),
            ("grpo", &one_more, &["eval.max_new_tokens", "generate.max_new_tokens", "model.device", "sft.max_length"]),
            ("sft", &["sft.max_length=2049"], &["model.device", "sft.max_length"]),
        ] {
            let mut found = beyond(pipeline, sets);
            found.sort();
            assert_eq!(found, keys, "{pipeline} {sets:?}");
        }
    }
}
