//! Checks between data sets, and between data, pipeline and evaluation.

use super::Note;
use crate::recipe::data::Source;
use crate::recipe::plan::{Pipeline, Plan};
use crate::recipe::task::TaskData;
use crate::rollout::SourceShare;
use crate::util::secrets::masked;
use crate::weights::{StoreRule, check_writable};

pub(super) fn sources(plan: &Plan, note: Note) {
    let offline = plan.pipeline == Pipeline::GrpoOffline;
    let recorded = matches!(plan.task.data, TaskData::Rollouts { .. });
    if offline && !recorded {
        let message = "pipeline = \"grpo_offline\" learns from what was recorded, and `task.kind` is another".to_owned();
        note("task.kind", &["pipeline"], message, "set task.kind = \"rollouts\" and task.path");
    } else if recorded && !offline {
        let message = "`task.kind` is \"rollouts\", which are answered already".to_owned();
        note("task.kind", &["pipeline"], message, "set pipeline = \"grpo_offline\", or choose another kind of task");
    }
    let weighted = plan.task.data.sources().iter().any(|source| source.weight.is_some());
    if weighted && plan.pipeline == Pipeline::RewardModel {
        let message = "a source of [task] has a weight, but a reward model meets every pair of its data".to_owned();
        note("task.sources", &["pipeline"], message, "give repeats instead of weights");
    }
    let eval_task = plan.eval.as_ref().and_then(|eval| eval.task.as_ref());
    for (key, task) in [("task.kind", Some(&plan.task)), ("eval.task.kind", eval_task)] {
        let brings = plan.environment.as_ref().is_some_and(|of| of.kind.may_have_tasks());
        if task.is_some_and(|task| matches!(task.data, TaskData::Environment { .. })) && !(brings && plan.pipeline.reinforces()) {
            let message = format!("`{key}` is \"environment\", and no environment brings prompts here");
            let help =
                "set environment.kind to \"verifiers\" or \"python\" in a pipeline that samples, or choose another kind of task";
            note(key, &["environment.kind", "pipeline"], message, help);
        }
    }
    data("task", "task.kind", &plan.task.data, note);
    if let Some(task) = plan.eval.as_ref().and_then(|eval| eval.task.as_ref()) {
        data("eval.task", "eval.task.kind", &task.data, note);
    }
    if let Some(sft) = &plan.sft {
        if matches!(plan.task.data, TaskData::Environment { .. }) && sft.sources().is_empty() {
            let message = "[sft] has no data: the prompts of an environment come without completions to imitate".to_owned();
            note("sft.data", &["task.kind"], message, "name a data set as sft.data, or remove [sft]");
        }
        one_or_several("sft", sft.data.is_some(), &sft.sources, note);
        if sft.fraction < 1.0 && (!sft.sources().is_empty() || matches!(plan.task.data, TaskData::Data(_))) {
            let message = format!("`sft.fraction` is {}, but it is a share of sums that are made on the spot", sft.fraction);
            let help = "leave it out; of a data set in [[sft.sources]], take a slice: split = \"train[:10%]\"";
            note("sft.fraction", &["sft.data", "sft.sources", "task.kind"], message, help);
        }
    }
}

fn data(section: &str, kind: &'static str, task: &TaskData, note: Note) {
    let TaskData::Data(of) = task else { return };
    let one = !of.only.data.as_os_str().is_empty();
    one_or_several(section, one, &of.sources, note);
    if of.sources.is_empty() && !one {
        let key = format!("{section}.data");
        let help = format!("name a file, a folder or an id, or add [[{section}.sources]]");
        note(&key, &[kind], format!("`{key}` is missing or empty"), &help);
    }
}

fn one_or_several(section: &str, one: bool, several: &[Source], note: Note) {
    let key = format!("{section}.sources");
    if one && !several.is_empty() {
        note(&key, &[], format!("there are both `{section}.data` and [[{key}]]"), "move all data sets to the latter");
    }
    let weighted = several.iter().filter(|source| source.weight.is_some()).count();
    if weighted > 0 && weighted < several.len() {
        let message = format!("{weighted} of the {} sources in [[{key}]] have a weight", several.len());
        note(&key, &[], message, "give all of them one, or none");
    }
    for (at, source) in several.iter().enumerate() {
        let of = |name: &str| format!("{key}[{at}].{name}");
        if source.data.as_os_str().is_empty() {
            note(&of("data"), &[], format!("`{}` is missing or empty", of("data")), "name a file, a folder or an id");
        }
        if source.weight.is_some() && source.repeat != 1 {
            let message =
                format!("`{}` is {}, but a source with a weight comes as often as its weight says", of("repeat"), source.repeat);
            note(&of("repeat"), &[], message, "leave out one of both");
        }
        let name = source.spec().name();
        if several[..at].iter().any(|other| other.spec().name() == name) {
            note(&of("name"), &[], format!("two sources in [[{key}]] are called \"{name}\""), "give one of them another name");
        }
    }
}

/// Checks the prompts of an evaluation, the evaluated weights, and that completions can be judged.
/// Shares of data sets that the task does not have, and shares that are all 0.
pub(super) fn curriculum(plan: &Plan, note: Note) {
    let Some(rule) = &plan.curriculum else { return };
    let names: Vec<String> = plan.task.data.sources().iter().map(|source| source.spec().name()).collect();
    for (at, share) in rule.source.iter().enumerate().filter(|(_, share)| !names.contains(&share.name)) {
        let key = format!("curriculum.source[{at}].name");
        let known =
            if names.is_empty() { "the task has no data sets".to_owned() } else { format!("they are: {}", names.join(", ")) };
        note(&key, &["task"], format!("`{key}` is {:?}, which is no data set of the task", share.name), &known);
    }
    let named = |name: &String| rule.source.iter().rfind(|share| share.name == *name);
    let ends: [fn(&SourceShare) -> f64; 2] = [|share| share.from, |share| share.to];
    let nothing = |end: &fn(&SourceShare) -> f64| names.iter().all(|name| named(name).is_some_and(|share| end(share) == 0.0));
    if !names.is_empty() && ends.iter().any(nothing) {
        let message = "`curriculum.source`: every data set has the share 0 in some step".to_owned();
        note("curriculum.source", &["task"], message, "give one of them a share above 0");
    }
}

pub(super) fn evaluation(plan: &Plan, note: Note) {
    let Some(eval) = &plan.eval else { return };
    if eval.samples == 0 && !eval.greedy {
        let message = "`eval.samples` is 0 and `eval.greedy` is false: nothing would be asked".to_owned();
        note("eval.samples", &["eval.greedy"], message, "make one of them otherwise, or remove [eval]");
    }
    if plan.pipeline.reinforces() && !eval.every.is_multiple_of(plan.sync.every.max(1)) {
        let message = format!(
            "`eval.every` is {}, but weights are published every {} steps: others can't be evaluated",
            eval.every, plan.sync.every
        );
        note("eval.every", &["sync.every"], message, "make it a multiple of sync.every");
    }
    let held_out = plan.reward_model.as_ref().filter(|_| plan.pipeline == Pipeline::RewardModel).map(|of| of.held_out);
    if eval.every > 0 && eval.task.is_none() && held_out == Some(0.0) {
        let message = "[eval] has no pairs: `reward_model.held_out` is 0, and `eval.task` is missing".to_owned();
        note("eval.task", &["reward_model.held_out"], message, "set eval.task, or raise reward_model.held_out");
    }
    let task = eval.task.as_ref().unwrap_or(&plan.task);
    if let TaskData::Rollouts { .. } = task.data {
        let message = "rollouts that were recorded are answered already: an evaluation has nothing to ask".to_owned();
        let help = "name a task of its own, for example eval.task = { kind = \"data\", data = \"held_out.jsonl\" }";
        note("eval.task", &["task.kind"], message, help);
    }
}

/// The address of the store, and keys that have no effect without one.
pub(super) fn store(plan: &Plan, note: Note) {
    match &plan.store.url {
        Some(url) => {
            if let Err(why) = check_writable(url) {
                let message = format!("`store.url` is {:?}: {why}", masked(url));
                note(
                    "store.url",
                    &[],
                    message,
                    "write it as s3://bucket/folder, gs://bucket/folder, az://container/folder or file:///folder",
                );
            }
        }
        None if plan.store != StoreRule::default() => {
            let message = "`[store]` has keys without effect: no store is named".to_owned();
            note("store.url", &[], message, "set store.url, or leave the section out");
        }
        None => {}
    }
}
