//! Checks that relate several keys. A key's own range is in its declaration.

mod engines;
mod groups;
mod held;
mod scorers;
mod sources;
mod trainer;
mod training;
mod unused;

use super::environment::EnvironmentKind;
use super::generate::OnNewWeights;
use super::lora::BaseFormat;
use super::model::{ModelSource, TinyModel};
use super::plan::{Pipeline, Plan};
use super::task::{OverlongPolicy, Packing, RewardModel, Sft, TaskData};
use super::timeline;
use super::train::Schedule;
use crate::data::chat::ChatTemplate;
use crate::settings::error::{Place, Problem, RecipeError, RecipeErrors};
use crate::settings::section::Findings;
use crate::settings::setting::Setting;

/// All pairs of longer numbers would not fit a machine's memory.
const MOST_DIGITS_LISTED: u32 = 3;

/// A section that was built in Rust, if every value in it is in range.
pub(crate) fn validated<T: Setting>(section: T) -> Result<T, RecipeErrors> {
    let mut problems = Vec::new();
    section.check("", &mut problems);
    RecipeErrors::unless_empty(placed(problems, &Findings::default())).map(|()| section)
}

impl Plan {
    /// Checks every range and every relation between keys. A loaded plan is valid; one that code
    /// changed may not be.
    pub fn validate(&self) -> Result<(), RecipeErrors> {
        RecipeErrors::unless_empty(placed(problems(self), &Findings::default()))
    }
}

/// Everything that is wrong with a plan.
pub(crate) fn problems(plan: &Plan) -> Vec<Problem> {
    let mut problems = Vec::new();
    plan.check("", &mut problems);
    between(plan, &mut |key, from, message, help| {
        problems.push(Problem { key: key.to_owned(), from: from.to_vec(), message, help: help.to_owned() });
    });
    // What later steps do is judged on a plan that is sound in itself.
    if problems.is_empty() { timeline::problems(plan) } else { problems }
}

/// Puts problems where their keys were written, and leaves out those that only echo an unreadable key.
pub(crate) fn placed(problems: Vec<Problem>, findings: &Findings) -> Vec<RecipeError> {
    let broken = |key: &str| findings.errors.iter().any(|error| error.key == key || error.key.starts_with(&format!("{key}.")));
    let echo = |problem: &Problem| broken(&problem.key) || problem.from.iter().any(|key| broken(key));
    problems
        .into_iter()
        .filter(|problem| !echo(problem))
        .map(|problem| {
            let keys = [problem.key.as_str()].into_iter().chain(problem.from.iter().copied());
            let place = findings.place(keys).cloned().unwrap_or(Place::Code);
            problem.at(place)
        })
        .collect()
}

/// Notes a problem: the key to change, the keys it follows from, what is wrong, what to do.
type Note<'a> = &'a mut dyn FnMut(&str, &[&'static str], String, &str);

fn between(plan: &Plan, note: Note) {
    match &plan.model.source {
        ModelSource::Tiny(tiny) => tiny_model(tiny, note),
        ModelSource::Folder(folder) => match (folder.preset, folder.path.as_os_str().is_empty()) {
            (None, true) => {
                let help = "give it a folder, the id of a model in the hub's cache, or set model.preset";
                note("model.path", &["model.preset"], "`model.path` is missing or empty".to_owned(), help);
            }
            (Some(preset), false) => {
                let message = format!("`model.path` is given together with `model.preset`, which is {}", preset.id);
                note("model.path", &["model.preset"], message, "leave one of them out");
            }
            _ => {}
        },
    }
    if let TaskData::Arithmetic { digits, count: None } = &plan.task.data
        && *digits > MOST_DIGITS_LISTED
    {
        let message = format!("`task.digits` is {digits}: all sums would be {} of them", 100_u64.saturating_pow(*digits));
        note("task.digits", &["task.count"], message, "set task.count, for example to 100000");
    }
    sources::sources(plan, note);
    if let Some(sft) = &plan.sft {
        schedule("sft", known(sft.steps, sft.epochs), &sft.optimization.schedule, note);
        supervised(sft, note);
    }
    if let Some(date) = &plan.chat.date
        && let Err(error) = ChatTemplate::plain().dated(date)
    {
        note("chat.date", &[], format!("`chat.date` is {date:?}"), &error.to_string());
    }
    sources::curriculum(plan, note);
    sources::evaluation(plan, note);
    engines::devices(plan, note);
    trainer::trainer(plan, note);
    sources::store(plan, note);
    live_page(plan, note);
    unused::unused(plan, note);
    groups::rewards(plan, note);
    training::lr_scale(plan, note);
    training::masters(plan, note);
    match plan.pipeline {
        Pipeline::Sft => needs_sft(plan, note),
        Pipeline::SftThenGrpo => {
            needs_sft(plan, note);
            grpo(plan, note);
        }
        Pipeline::RewardModel => match &plan.reward_model {
            Some(RewardModel { steps, epochs, optimization, .. }) => {
                schedule("reward_model", known(*steps, *epochs), &optimization.schedule, note);
            }
            None => {
                let help = "add [reward_model] with its steps, batch and lr";
                note("reward_model", &["pipeline"], "pipeline = \"reward_model\" has no section [reward_model]".to_owned(), help);
            }
        },
        Pipeline::Grpo | Pipeline::Distill => grpo(plan, note),
        Pipeline::GrpoOffline | Pipeline::Dpo => {
            mixture(plan, note);
            training::training(plan, note);
            held::held(plan, note);
        }
    }
}

/// Prompts and completions are not for everyone who can reach the machine.
fn live_page(plan: &Plan, note: Note) {
    let observe = &plan.observe;
    if let (Some(address), None) = (observe.page, &observe.page_token_env)
        && !address.ip().is_loopback()
    {
        let message = format!("other hosts can reach `observe.page`, {address}, and `observe.page_token_env` is not set");
        let help = "name an environment variable that holds a token in observe.page_token_env, or serve the page at 127.0.0.1";
        note("observe.page", &["observe.page_token_env"], message, help);
    }
}

fn needs_sft(plan: &Plan, note: Note) {
    if plan.sft.is_none() {
        let message = format!("pipeline = \"{}\" has no section [sft]", plan.pipeline.word());
        note("sft", &["pipeline"], message, "add [sft] with its steps, batch and lr");
    }
}

/// Packed samples need a length; truncated ones have the model's.
fn supervised(sft: &Sft, note: Note) {
    if sft.max_length.is_none() && sft.packing != Packing::Apart {
        let message = "`sft.packing` fills rows of `sft.max_length` tokens, which is missing".to_owned();
        note("sft.max_length", &["sft.packing"], message, "set sft.max_length, for example to 2048");
    }
    if sft.packing == Packing::Wrapped && sft.on_overlong != OverlongPolicy::default() {
        let message =
            format!("`sft.on_overlong` is \"{}\", but wrapped rows are cut wherever they are full", sft.on_overlong.word());
        note("sft.on_overlong", &["sft.packing"], message, "remove it, or pack with \"best_fit\"");
    }
}

fn tiny_model(tiny: &TinyModel, note: Note) {
    let TinyModel { hidden, heads, kv_heads, .. } = *tiny;
    if hidden == 0 || heads == 0 || kv_heads == 0 {
        return;
    }
    if hidden % heads != 0 || (hidden / heads) % 2 != 0 {
        let message = format!("`model.hidden` is {hidden}, which {heads} heads do not share in even parts");
        note("model.hidden", &["model.heads"], message, "make it a multiple of 2 × heads");
    }
    if heads % kv_heads != 0 {
        let message = format!("`model.kv_heads` is {kv_heads}, which does not divide the {heads} heads");
        note("model.kv_heads", &["model.heads"], message, "every key and value head serves the same number of query heads");
    }
}

/// Steps as far as they are known: epochs become steps when the data is read, and are checked again then.
fn known(steps: u64, epochs: Option<f64>) -> u64 {
    if epochs.is_some() { u64::MAX } else { steps }
}

fn schedule(section: &str, steps: u64, schedule: &Schedule, note: Note) {
    let (warmup, kind) = (schedule.warmup, schedule.kind);
    // A decay needs a step after the warm-up. A run of 0 steps has another error.
    let no_decay = kind != crate::algo::Decay::Constant && warmup == steps && steps > 0;
    if warmup > steps || no_decay {
        let why = if no_decay { format!("a \"{}\" schedule falls after its warm-up, and ", kind.word()) } else { String::new() };
        let message = format!("`{section}.schedule.warmup` is {warmup}, but {why}there are only {steps} steps");
        let from: &[_] = match section {
            "sft" => &["sft.steps"],
            "reward_model" => &["reward_model.steps"],
            "train" => &["train.steps", "critic.warmup_steps"],
            _ => &["train.steps"],
        };
        note(&format!("{section}.schedule.warmup"), from, message, "make it shorter than the run");
    }
}

/// `[mix]` takes its samples from `[sft]`, which has no separate phase without a generator.
fn mixture(plan: &Plan, note: Note) {
    if plan.mix.is_some() && plan.sft.is_none() {
        let message = "[mix] goes on with the pairs of [sft], and there is no such section".to_owned();
        note("mix", &["sft"], message, "add [sft], whose data it says, with its steps before reinforcement");
    }
    if plan.pipeline != Pipeline::GrpoOffline {
        return;
    }
    if plan.sft.is_some() && plan.mix.is_none() {
        let message = "[sft] is the data of [mix] for pipeline = \"grpo_offline\", and there is no section [mix]".to_owned();
        note("sft", &["mix"], message, "add [mix], or run pipeline = \"sft\" first and name its run as model.path");
    }
    if plan.sft.as_ref().is_some_and(|sft| sft.sources().is_empty()) {
        let message = "`sft.data` is missing: recorded rollouts are no pairs to imitate".to_owned();
        note("sft.data", &["sft"], message, "name the data set that [mix] takes its samples from");
    }
}

fn grpo(plan: &Plan, note: Note) {
    mixture(plan, note);
    training::training(plan, note);
    adapters(plan, note);
    environment(plan, note);
    groups::groups(plan, note);
    cache(plan, note);
    held::held(plan, note);
    engines::engines(plan, note);
}

fn adapters(plan: &Plan, note: Note) {
    let Some(lora) = plan.lora.as_ref().filter(|lora| lora.base == BaseFormat::Nf4 && plan.pipeline.reinforces()) else { return };
    if plan.engine.is_remote() && lora.sync.is_none() {
        let message = "`lora.sync` is missing: the trainer's base is in 4 bits, and the servers' may be another".to_owned();
        let help = "set it to \"merged\", or to \"adapter\" if the servers load the same folder of bitsandbytes' 4 bits";
        note("lora.sync", &["lora.base", "engine.kind"], message, help);
    } else if !plan.engine.is_remote() && lora.merges() {
        let message = "`lora.base` is \"nf4\", and merged adapters are whole weights again, at every publish".to_owned();
        note("lora.sync", &["lora.base"], message, "set lora.sync = \"adapter\"");
    }
}

fn cache(plan: &Plan, note: Note) {
    let Some(tokens) = plan.generate.cache_tokens.filter(|_| !plan.engine.is_remote()) else { return };
    // Law V5: the weights of a sample that waited may be gone.
    if plan.generate.on_new_weights == OnNewWeights::Finish {
        let message = "`generate.on_new_weights` is \"finish\", but samples that wait while a cache is full continue under the newest weights";
        let help = "leave generate.cache_tokens out, or choose another policy";
        note("generate.cache_tokens", &["generate.on_new_weights"], message.to_owned(), help);
    }
    let (engines, answer) = (plan.generators().max(1), plan.generate.max_new_tokens);
    let each = tokens / engines;
    if each <= answer {
        let message = format!(
            "`generate.cache_tokens` is {tokens}, {each} for each of {engines} engines, but a prompt and its answer may have more than {answer}"
        );
        let help = "raise it, lower generate.max_new_tokens, or leave it out";
        note("generate.cache_tokens", &["generate.max_new_tokens", "generate.workers"], message, help);
    }
}

fn environment(plan: &Plan, note: Note) {
    let Some(of) = &plan.environment else { return };
    if plan.generate.on_new_weights == OnNewWeights::Finish {
        let message = "`generate.on_new_weights` is \"finish\", but the turns of a rollout are sampled one after the other, by whatever weights are there".to_owned();
        let help = "choose another, and generate.mask_older_versions = true if no trained sample may mix versions";
        note("generate.on_new_weights", &["environment"], message, help);
    }
    if let EnvironmentKind::Agent { command, url, .. } = &of.kind
        && command.is_empty() == url.is_none()
    {
        let message = "an agent is a command or listens at a url: it has one of them".to_owned();
        note("environment.command", &["environment.url"], message, "give one of them, and not both");
    }
    if let EnvironmentKind::Python(python) = &of.kind
        && !python.names_something()
    {
        let message =
            "`environment.environment` and `environment.tools` are missing: nothing of the file would be called".to_owned();
        let help = "name the file's class as environment, or functions as tools, or both";
        note("environment.environment", &["environment.tools"], message, help);
    }
    let in_training = Some(("generate.max_new_tokens", plan.generate.max_new_tokens));
    let in_evaluation = plan.eval.as_ref().and_then(|eval| Some(("eval.max_new_tokens", eval.max_new_tokens?)));
    for (key, turn) in [in_training, in_evaluation].into_iter().flatten() {
        if of.limits.max_tokens.is_some_and(|most| most <= turn) {
            let message = format!(
                "`environment.max_tokens` is not above the {turn} tokens that a single turn may take by `{key}`: none would begin"
            );
            note("environment.max_tokens", &[key], message, &format!("raise it, or lower {key}"));
        }
    }
}
