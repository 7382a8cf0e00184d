//! What must hold between keys. Each key's own range stands with its declaration.

mod engines;
mod evaluating;
mod held;
mod sources;
mod training;

use super::environment::EnvironmentKind;
use super::error::{Place, RecipeError, RecipeErrors};
use super::generate::{Filter, OnNewWeights};
use super::model::{ModelSource, TinyModel};
use super::plan::{OnStale, Pipeline, Plan};
use super::reward::{Combine, Composition, PartRule, RewardRule};
use super::section::Findings;
use super::setting::{Problem, Setting};
use super::task::{Arithmetic, Packing, RewardModel, Sft, TaskData, TooLong};
use super::timeline;
use super::train::{Schedule, Train};
use crate::data::chat::ChatTemplate;

/// All pairs of longer numbers would not fit a machine's memory.
const MOST_DIGITS_LISTED: u32 = 3;

/// A section that was built in Rust, if every value in it is in range.
pub(crate) fn validated<T: Setting>(section: T) -> Result<T, RecipeErrors> {
    let mut problems = Vec::new();
    section.check("", &mut problems);
    RecipeErrors::unless_empty(placed(problems, &Findings::default())).map(|()| section)
}

impl Plan {
    /// Checks every range and everything that must hold between keys. A loaded plan has passed; one that code changed may not.
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

/// Everything that is wrong with `[train]` by itself.
pub(crate) fn problems_of_training(train: &Train) -> Vec<Problem> {
    let mut problems = Vec::new();
    train.check("train", &mut problems);
    training::training(train, &mut |key, from, message, help| {
        problems.push(Problem { key: key.to_owned(), from: from.to_vec(), message, help: help.to_owned() });
    });
    problems
}

/// Puts problems where their keys were written, and leaves out those that only echo an unreadable key.
pub(crate) fn placed(problems: Vec<Problem>, findings: &Findings) -> Vec<RecipeError> {
    let broken = |key: &str| findings.errors.iter().any(|error| error.key == key || error.key.starts_with(&format!("{key}.")));
    let echo = |problem: &Problem| broken(&problem.key) || problem.from.iter().any(|key| broken(key));
    problems
        .into_iter()
        .filter(|problem| !echo(problem))
        .map(|Problem { key, from, message, help }| {
            let place = findings.place([key.as_str()].into_iter().chain(from)).cloned().unwrap_or(Place::Code);
            RecipeError { place, key, message, help }
        })
        .collect()
}

/// Notes a problem: the key to change, the keys it follows from, what is wrong, what to do.
type Note<'a> = &'a mut dyn FnMut(&str, &[&'static str], String, &str);

fn between(plan: &Plan, note: Note) {
    if let ModelSource::Tiny(tiny) = &plan.model.source {
        tiny_model(tiny, note);
    }
    if let ModelSource::Folder(folder) = &plan.model.source {
        match (folder.preset, folder.path.as_os_str().is_empty()) {
            (None, true) => {
                let help = "give it a folder, the id of a model in the hub's cache, or set model.preset";
                note("model.path", &["model.preset"], "`model.path` is missing or empty".to_owned(), help);
            }
            (Some(preset), false) => {
                let message = format!("`model.path` is given beside `model.preset`, which is {}", preset.id);
                note("model.path", &["model.preset"], message, "leave one of them out");
            }
            _ => {}
        }
    }
    task(plan, note);
    sources::sources(plan, note);
    if let Some(sft) = &plan.sft {
        schedule("sft", sft.steps, &sft.optimization.schedule, note);
        supervised(sft, note);
    }
    if let Some(date) = &plan.chat.date
        && let Err(error) = ChatTemplate::plain().dated(date)
    {
        note("chat.date", &[], format!("`chat.date` is {date:?}"), &error.to_string());
    }
    evaluating::evaluation(plan, note);
    match plan.pipeline {
        Pipeline::Sft => needs_sft(plan, note),
        Pipeline::SftThenGrpo => {
            needs_sft(plan, note);
            grpo(plan, note);
        }
        Pipeline::RewardModel => match &plan.reward_model {
            Some(RewardModel { steps, optimization, .. }) => schedule("reward_model", *steps, &optimization.schedule, note),
            None => {
                let help = "add [reward_model] with its steps, batch and lr";
                note("reward_model", &["pipeline"], "pipeline = \"reward_model\" has no section [reward_model]".to_owned(), help);
            }
        },
        Pipeline::Grpo => grpo(plan, note),
        Pipeline::GrpoOffline => {
            training::training(&plan.train, note);
            training::minibatches(plan, note);
            held::held(plan, note);
        }
    }
}

fn needs_sft(plan: &Plan, note: Note) {
    if plan.sft.is_none() {
        let message = format!("pipeline = \"{}\" has no section [sft]", plan.pipeline.word());
        note("sft", &["pipeline"], message, "add [sft] with its steps, batch and lr");
    }
}

/// What is cut or packed needs a length.
fn supervised(sft: &Sft, note: Note) {
    if sft.max_length.is_none() {
        let help = "set sft.max_length, for example to 2048";
        if sft.packing != Packing::None {
            note(
                "sft.max_length",
                &["sft.packing"],
                "`sft.packing` fills rows of `sft.max_length` tokens, which is missing".to_owned(),
                help,
            );
        } else if sft.too_long != TooLong::default() {
            note("sft.max_length", &["sft.too_long"], "`sft.too_long` means nothing without `sft.max_length`".to_owned(), help);
        }
    }
    if sft.packing == Packing::Wrapped && sft.too_long != TooLong::default() {
        let message = format!("`sft.too_long` is \"{}\", but wrapped rows are cut wherever they are full", sft.too_long.word());
        note("sft.too_long", &["sft.packing"], message, "remove it, or pack with \"best_fit\"");
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

fn task(plan: &Plan, note: Note) {
    match &plan.task.data {
        TaskData::Arithmetic(Arithmetic { digits, count: None }) if *digits > MOST_DIGITS_LISTED => {
            let message = format!("`task.digits` is {digits}: all sums would be {} of them", 100_u64.saturating_pow(*digits));
            note("task.digits", &["task.count"], message, "set task.count, for example to 100000");
        }
        TaskData::Jsonl(jsonl) if jsonl.answer_key.is_empty() => {
            let help = "name the field that holds the ground truth";
            if plan.pipeline.reinforces() && plan.reward.rule.compares() {
                let message = "`task.answer_key` is empty, but the reward compares with the ground truth".to_owned();
                note("task.answer_key", &["reward.kind"], message, help);
            }
            if plan.sft.as_ref().is_some_and(|sft| sft.sources().is_empty()) {
                let message = "`task.answer_key` is empty, but [sft] imitates the task's answers".to_owned();
                note("task.answer_key", &["sft"], message, "name the field that holds the answers, or give sft.data");
            }
        }
        _ => {}
    }
}

fn schedule(section: &str, steps: u64, schedule: &Schedule, note: Note) {
    if schedule.warmup > steps {
        let message = format!("`{section}.schedule.warmup` is {}, but there are only {steps} steps", schedule.warmup);
        let from: &[_] = match section {
            "sft" => &["sft.steps"],
            "reward_model" => &["reward_model.steps"],
            _ => &["train.steps"],
        };
        note(&format!("{section}.schedule.warmup"), from, message, "make it shorter than the run");
    }
}

fn grpo(plan: &Plan, note: Note) {
    if plan.mix.is_some() && plan.sft.is_none() {
        let message = "[mix] goes on with the pairs of [sft], and there is no such section".to_owned();
        note("mix", &["sft"], message, "add [sft], whose data it says, with its steps before reinforcement");
    }
    training::training(&plan.train, note);
    training::minibatches(plan, note);
    training::critic(plan, note);
    environment(plan, note);
    group(plan, note);
    filters(plan, note);
    if let RewardRule::Parts(of) = &plan.reward.rule {
        parts(plan, of, note);
    }
    held::held(plan, note);
    engines::engines(plan, note);
    window(plan, note);
    over_sampling(plan, note);
    if plan.generate.slots == 0 && plan.flow.max_staleness == 0 {
        let message =
            "`generate.slots` is 0, which follows measured speeds, but a synchronous run depends on no timing".to_owned();
        note("generate.slots", &["flow.max_staleness"], message, "say how many, or raise flow.max_staleness");
    }
}

fn environment(plan: &Plan, note: Note) {
    let Some(of) = &plan.environment else {
        if plan.reward.rule.asks_environment() {
            let message = "the reward is what an environment says, and there is no section [environment]".to_owned();
            note("environment", &["reward.kind"], message, "add [environment] with its kind, or choose another reward.kind");
        }
        return;
    };
    if plan.generate.on_new_weights == OnNewWeights::Finish {
        let message = "`generate.on_new_weights` is \"finish\", but the turns of a rollout are sampled one after the other, by whatever weights are there".to_owned();
        note(
            "generate.on_new_weights",
            &["environment"],
            message,
            "choose another, and generate.mask_older = true if no trained sample may mix versions",
        );
    }
    if let EnvironmentKind::Agent(agent) = &of.kind
        && agent.command.is_empty() == agent.url.is_none()
    {
        let message = "an agent is a command or listens at a url: it has one of them".to_owned();
        note("environment.command", &["environment.url"], message, "give one of them, and not both");
    }
    if of.max_tokens.is_some_and(|most| most <= plan.generate.max_new_tokens) {
        let message = format!(
            "`environment.max_tokens` is not above the {} tokens that a single turn may take: none would begin",
            plan.generate.max_new_tokens
        );
        note("environment.max_tokens", &["generate.max_new_tokens"], message, "raise it, or lower generate.max_new_tokens");
    }
    if plan.eval.is_some() {
        let message = "[eval] asks for answers of one turn, which say little of a model that works in an environment".to_owned();
        note("eval", &["environment"], message, "remove it");
    }
}

fn group(plan: &Plan, note: Note) {
    let dropped = plan.filter.iter().any(|filter| matches!(filter, Filter::NonzeroStd(_)));
    if plan.generate.group_size == 1 && (plan.critic.is_some() || !plan.train.advantage.needs_siblings()) {
        if dropped {
            let message = "`generate.group_size` is 1: the filter nonzero_std would drop every group".to_owned();
            note("generate.group_size", &["filter"], message, "leave the filter out, or make it 2 or more");
        }
    } else if plan.generate.group_size == 1 {
        let so = if dropped { "and the filter nonzero_std would drop every group" } else { "so nothing would be learnt" };
        let message = format!("`generate.group_size` is 1: a single answer is its own mean, its advantage is always 0, {so}");
        let help =
            "make it 2 or more; 8 is common; or set train.advantage = { kind = \"constant\", baseline = 0.5 }, or add [critic]";
        note("generate.group_size", &["pipeline", "filter"], message, help);
    } else if plan.generate.temperature == 0.0 {
        let message = "`generate.temperature` is 0: all answers of a group would be the same".to_owned();
        note("generate.temperature", &["pipeline"], message, "make it above 0; 1 samples from the model itself");
    }
}

fn filters(plan: &Plan, note: Note) {
    for (at, filter) in plan.filter.iter().enumerate() {
        let Filter::Length(length) = filter else { continue };
        let (min, max, longest) = (length.min, length.max, plan.generate.max_new_tokens);
        if min > max {
            let message = format!("`filter[{at}].min` is {min}, above its max of {max}: every group would be dropped");
            note(&format!("filter[{at}].min"), &[], message, "exchange them");
        } else if min > longest {
            let message =
                format!("`filter[{at}].min` is {min}, but answers end at {longest} tokens: every group would be dropped");
            note(
                &format!("filter[{at}].min"),
                &["generate.max_new_tokens"],
                message,
                "lower it, or raise generate.max_new_tokens",
            );
        }
    }
}

fn parts(plan: &Plan, of: &Composition, note: Note) {
    let longest = plan.generate.max_new_tokens;
    if of.part.is_empty() {
        let message = "`reward.part` is empty: nothing would be earned".to_owned();
        note("reward.part", &["reward.kind"], message, "add [[reward.part]] with its name and kind");
    }
    let combinations = f64::from(of.levels).powi(i32::try_from(of.part.len()).unwrap_or(i32::MAX));
    if of.combine == Combine::Lexicographic && combinations > (1_u64 << 53) as f64 {
        let message =
            format!("`reward.levels` is {}: so many of {} parts are more than a number can tell apart", of.levels, of.part.len());
        note("reward.levels", &["reward.combine"], message, "have fewer levels, or fewer parts");
    }
    if (of.combine == Combine::Custom) != of.aggregator.is_some() {
        let (is, so) = if of.aggregator.is_some() { ("given", "not \"custom\"") } else { ("missing", "\"custom\"") };
        let message = format!("`reward.aggregator` is {is}, but `reward.combine` is {so}");
        note(
            "reward.aggregator",
            &["reward.combine"],
            message,
            "name a registered aggregator, together with combine = \"custom\"",
        );
    }
    for (at, part) in of.part.iter().enumerate() {
        let key = |name: &str| format!("reward.part[{at}].{name}");
        if let Some(first) = of.part[..at].iter().position(|other| other.name == part.name && !part.name.is_empty()) {
            let message = format!("`{}` is {:?}, as that of part {first} is", key("name"), part.name);
            note(&key("name"), &[], message, "give every part a name of its own");
        }
        if of.combine != Combine::Sum && part.weight != 1.0 {
            let message = format!("`{}` is {:?}, but only a sum has weights", key("weight"), part.weight);
            note(&key("weight"), &["reward.combine"], message, "leave it out, or set reward.combine = \"sum\"");
        }
        match &part.rule {
            PartRule::Length(length) if length.min > length.max => {
                let message =
                    format!("`{}` is {}, above its max of {}: no answer would earn it", key("min"), length.min, length.max);
                note(&key("min"), &[], message, "exchange them");
            }
            PartRule::Overlong(overlong) if overlong.buffer > longest => {
                let message = format!("`{}` is {}, but answers end at {longest} tokens", key("buffer"), overlong.buffer);
                note(&key("buffer"), &["generate.max_new_tokens"], message, "lower it, or raise generate.max_new_tokens");
            }
            _ => {}
        }
    }
}

fn window(plan: &Plan, note: Note) {
    let Some(window) = plan.flow.window else { return };
    let from = ["flow.max_staleness", "sync.every", "batch.groups"];
    let (least, most) = (plan.groups_per_publish(), plan.staleness_window());
    if window < least {
        let message = format!(
            "`flow.window` is {window}, but {least} groups are trained from one publish to the next: it would wait for ever"
        );
        note("flow.window", &from, message, "make it at least sync.every × batch.groups, or leave it out");
    } else if window > most && plan.flow.on_stale == OnStale::Wait {
        let message = format!(
            "`flow.window` is {window}: groups would lag by floor(({window} - 1) / {least} groups per version) = {} versions, and \
             flow.max_staleness is {}",
            plan.worst_lag_in_turn(),
            plan.flow.max_staleness
        );
        let help = format!("lower it to {most}, leave it out, raise flow.max_staleness, or choose flow.on_stale");
        note("flow.window", &from, message, &help);
    }
}

fn over_sampling(plan: &Plan, note: Note) {
    if !plan.over_samples() || plan.batch.groups == 0 {
        return;
    }
    let (factor, chosen_from) = (plan.batch.over_sample, plan.groups_chosen_from());
    let (needed, most) = (plan.choice_window(), plan.staleness_window());
    let from = ["flow.max_staleness", "sync.every", "batch.groups", "flow.window"];
    if plan.flow.max_staleness == 0 {
        let message = format!(
            "`batch.over_sample` is {factor}, but with flow.max_staleness = 0 every group is trained by the version that it entered \
             under: none can stay for the next step"
        );
        note("batch.over_sample", &from, message, "make it 1, or raise flow.max_staleness");
    } else if needed > most && plan.flow.on_stale == OnStale::Wait {
        let message = format!(
            "`batch.over_sample` is {factor}: with {chosen_from} groups for a step, {needed} would be under way, and above {most} they \
             would become staler than flow.max_staleness allows"
        );
        note("batch.over_sample", &from, message, "lower it, raise flow.max_staleness, or choose flow.on_stale");
    } else if plan.flow.window.is_some_and(|window| window < needed) {
        let message = format!(
            "`batch.over_sample` is {factor}: a step chooses from {chosen_from} groups, for which {needed} must be under way, and \
             flow.window lets in fewer"
        );
        note("batch.over_sample", &from, message, "widen flow.window, or leave it out");
    }
}
