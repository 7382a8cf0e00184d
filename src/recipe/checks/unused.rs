//! Keys without effect in the given recipe: a value other than the default is an error.

use super::Note;
use crate::engine::settings::Launch;
use crate::ranks::Shard;
use crate::recipe::environment::EnvironmentKind;
use crate::recipe::lora::BaseFormat;
use crate::recipe::model::{DeviceName, ModelSource};
use crate::recipe::plan::{Pipeline, Plan};
use crate::recipe::reward::RewardRule;
use crate::recipe::task::{OverlongPolicy, Sft, Task, TaskData};
use crate::recipe::trainer::TrainerBackend;
use crate::settings::section::{Section, join};
use crate::stages::reward::{MAX_POISONED, OnFailure, RETRIES};
use crate::train::MomentFormat;

/// Keys of local engines.
const OF_ENGINES: &str =
    "max_num_seqs on_new_weights mask_older_versions workers threads prefix_cache cache_tokens draft_tokens devices";
/// Those of engines in this process.
const OF_THIS_PROCESS: &str = "on_new_weights threads prefix_cache cache_tokens draft_tokens";
/// Sampling keys that `[eval]` replaces.
const OF_SAMPLING: &str = "group_size temperature top_p top_k min_p repetition_penalty ignore_eos";
/// Sampling keys without effect on recorded rollouts. The trainer divides logits by their
/// temperature.
const OF_SAMPLING_ANEW: &str = "top_p top_k min_p repetition_penalty ignore_eos";
/// Keys of `[sft]` that `[mix]` reads.
const OF_MIXED: &str = "data sources max_length on_overlong packing turns fraction";
const OF_LAUNCHED: &str = "replicas port program flags env start_timeout restarts";

pub(super) fn unused(plan: &Plan, note: Note) {
    if plan.ranks.replicas > 1 && plan.ranks.shard == Shard::Nothing {
        let message = format!("`ranks.replicas` is {}, and `ranks.shard` divides nothing", plan.ranks.replicas);
        note("ranks.replicas", &["ranks.shard"], message, "leave it out, or divide the optimizer or the parameters");
    }
    let (generate, engine, batch) = (&plan.generate, &plan.engine, &plan.batch);
    let among = |keys: &'static str| move |key: &str| keys.split(' ').any(|word| word == key);
    let but = |keys: &'static str| move |key: &str| !among(keys)(key);
    let mut unused = |section: &str, changed: Vec<String>, keys: &dyn Fn(&str) -> bool, from: &'static str, why: &str| {
        for key in changed.iter().filter(|key| keys(key)) {
            let key = join(section, key);
            note(&key, &[from], format!("`{key}` has no effect: {why}"), "leave it out");
        }
    };
    if plan.pipeline.reinforces() && engine.is_remote() {
        let why =
            "servers generate, with their own threads and caches, and engine.pause says what becomes of completions in flight";
        unused("generate", changed(generate), &among(OF_THIS_PROCESS), "engine.kind", why);
        if engine.launch == Launch::None {
            unused("engine", changed(engine), &among(OF_LAUNCHED), "engine.launch", "no server is launched");
        }
    } else if plan.pipeline.reinforces() {
        unused("engine", changed(engine), &but("kind launch urls"), "engine.kind", "the engine is local");
        if plan.trainer.backend == TrainerBackend::Tinker {
            let why = "the server of [trainer] generates, and completions end under the weights that they began with";
            let keys = |key: &str| key == "devices" || among(OF_THIS_PROCESS)(key);
            unused("generate", changed(generate), &keys, "trainer.backend", why);
        }
    } else {
        let why = "this pipeline generates for evaluations only";
        unused("generate", changed(generate), &among(OF_ENGINES), "pipeline", why);
        // What policies publish is evaluated; a supervised run's adapters as they are.
        let published = plan.pipeline.trains_by_train() && plan.eval.is_some();
        if let Some(lora) = plan.lora.as_ref().filter(|_| !published) {
            let why = "no generator is given adapters during this training";
            unused("lora", changed(lora), &among("sync"), "pipeline", why);
        }
    }
    let by_eval = "evaluations are sampled as [eval] says";
    match plan.pipeline {
        Pipeline::Sft => unused("generate", changed(generate), &among(OF_SAMPLING), "pipeline", by_eval),
        Pipeline::GrpoOffline => {
            unused("generate", changed(generate), &among(OF_SAMPLING_ANEW), "pipeline", by_eval);
            if let Some(sft) = &plan.sft {
                let why = "[sft] is the data of [mix] alone, since there is no supervised phase";
                unused("sft", changed(sft), &but(OF_MIXED), "pipeline", why);
            }
        }
        _ => {}
    }
    if matches!(plan.pipeline, Pipeline::GrpoOffline | Pipeline::Dpo) {
        let why = "the groups are there from the start";
        unused("batch", changed(batch), &among("oversampling_factor"), "pipeline", why);
        let why = "no generator samples what the trainer learns from";
        let dpo = plan.pipeline == Pipeline::Dpo;
        let keys = if dpo { "probe router_replay gap_warn gap_halt" } else { "probe router_replay" };
        unused("train", changed(&plan.train), &among(keys), "pipeline", why);
    }
    for (section, of) in plan.optimizations() {
        let on_host = plan.model.device == DeviceName::Cpu;
        // Adapters over a folder, which may be in 4 bits, are for the memory plan to check: it reads the folder.
        let is_folder = matches!(plan.model.source, ModelSource::Folder(_));
        let in_4_bits = plan.lora.as_ref().is_some_and(|lora| lora.base == BaseFormat::Nf4 || is_folder);
        let sharded = plan.ranks.shard == Shard::Parameters;
        let again = of.gradient_checkpointing || sharded || in_4_bits && section != "critic";
        let (moments, inputs) = (of.moments == MomentFormat::Host, of.activations_on_host);
        let computed = "the trainer computes in the host's memory";
        let kept = "without gradient_checkpointing all that layers compute is kept where it is computed";
        for (key, set, from, why) in [
            ("moments", moments && on_host, &["model.device"][..], computed),
            ("activations_on_host", inputs && on_host, &["model.device"], computed),
            ("activations_on_host", inputs && !on_host && !again, &[], kept),
        ] {
            let key = join(section, key);
            if set {
                note(&key, from, format!("`{key}` has no effect: {why}"), "leave it out");
            }
        }
    }
    for (key, _, from, why) in singles(plan).into_iter().filter(|(_, set, ..)| *set) {
        note(key, &[from], format!("`{key}` has no effect: {why}"), "leave it out");
    }
}

/// Single keys: whether they are set and have no effect, the key that this follows from, and why.
fn singles(plan: &Plan) -> Vec<(&'static str, bool, &'static str, &'static str)> {
    let (pipeline, reward) = (plan.pipeline, &plan.reward);
    let remote = pipeline.reinforces() && (plan.engine.is_remote() || plan.trainer.backend == TrainerBackend::Tinker);
    let adapters = plan.checkpoint.dtype.is_some() && plan.lora.is_some() && plan.critic.is_none();
    let data = matches!(plan.task.data, TaskData::Data(_));
    let drawn = match pipeline {
        Pipeline::Grpo | Pipeline::SftThenGrpo | Pipeline::Distill => false,
        Pipeline::Dpo => !data,
        Pipeline::Sft | Pipeline::RewardModel | Pipeline::GrpoOffline => true,
    };
    let sft = |is: fn(&Sft) -> bool| plan.sft.as_ref().is_some_and(is);
    let eval = plan.eval.as_ref();
    let asked = eval.and_then(|eval| eval.task.as_ref());
    let weighted = |task: &Task| task.data.sources().iter().any(|source| source.weight.is_some());
    let laid_out = sft(|sft| sft.packs() || sft.on_overlong == OverlongPolicy::Split);
    let own = sft(|sft| !sft.sources().is_empty());
    let several = plan.generate.workers > 1 && plan.flow.max_staleness == 0 && pipeline.reinforces() && !remote;
    let answered = "servers answer, which have their own threads";
    let no_reward = reward.rule == RewardRule::None;
    let no_letter = reward.on_failure != OnFailure::default() && !pipeline.reinforces() && !plan.rescores();
    let by_agent = plan.environment.as_ref().is_some_and(|of| {
        of.limits.max_tool_calls.is_some() && matches!(of.kind, EnvironmentKind::Agent { .. } | EnvironmentKind::Verifiers(_))
    });
    let agent_calls = "the agent calls its tools itself; environment.max_turns limits its requests";
    let uncounted = "an answer of an evaluation that has no reward is counted";
    let poisoned = reward.max_poisoned != MAX_POISONED && !pipeline.reinforces();
    let by_tokens = sft(|sft| sft.batch_tokens.is_some() && sft.batch != Sft::default().batch);
    let in_rows = "rows are laid out from every record; give repeats in the place of weights";
    let rows_of_sft = laid_out && sft(|sft| sft.sources.iter().any(|source| source.weight.is_some()));
    let rows_of_task = laid_out && pipeline == Pipeline::Sft && !own && weighted(&plan.task);
    vec![
        ("task.shuffle", !plan.task.shuffle && drawn, "pipeline", "the order is drawn by the seed"),
        ("eval.task.shuffle", asked.is_some_and(|task| !task.shuffle), "eval.task", "prompts are asked in their order"),
        ("eval.task.sources", asked.is_some_and(weighted), "eval.task", "every record is asked; weights draw from none"),
        ("eval.threads", remote && eval.is_some_and(|eval| eval.threads != 1), "engine.kind", answered),
        ("environment.max_tool_calls", by_agent, "environment.kind", agent_calls),
        ("reward.retries", no_reward && reward.retries != RETRIES, "reward.kind", "there is no reward"),
        ("reward.require_end_of_text", no_reward && !reward.require_end_of_text, "reward.kind", "there is no reward"),
        ("reward.on_failure", no_letter, "pipeline", uncounted),
        ("reward.max_poisoned", poisoned, "pipeline", "no group is dropped for its reward here"),
        ("sft.batch", by_tokens, "sft.batch_tokens", "a step takes as many as sft.batch_tokens says"),
        ("sft.turns", sft(Sft::turns_apart) && !own && !data, "task.kind", "sums are no conversations"),
        ("sft.sources", rows_of_sft, "sft.packing", in_rows),
        ("task.sources", rows_of_task, "sft.packing", in_rows),
        ("checkpoint.dtype", adapters, "lora", "adapters are saved in f32"),
        ("generate.workers", several, "flow.max_staleness", "a synchronous run keeps to one engine"),
    ]
}

/// The keys of a section whose values differ from their defaults.
pub(super) fn changed<S: Section>(section: &S) -> Vec<String> {
    let (mut now, mut default) = (Vec::new(), Vec::new());
    section.rows(&mut now);
    S::default().rows(&mut default);
    let differs = |((key, now), (_, default)): ((String, _), (String, _))| (now != default).then_some(key);
    now.into_iter().zip(default).filter_map(differs).collect()
}
