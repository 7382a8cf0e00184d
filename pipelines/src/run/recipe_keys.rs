//! Recipes as dotted keys and values, to be compared; and which keys of a run may change when it is resumed.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rollflow::recipe::{DeviceName, Pipeline, Plan, parse, with_current_names};
use rollflow::train::checkpoint::{self, CHECKPOINTS};

use crate::assemble::conversations;
use crate::assemble::models::Lineage;
use crate::run::RECIPE;
use crate::run::record::Record;

/// Keys that may change when a run resumes, in addition to [`OF_SERVED`] and [`OF_TRAINING`]. A name that
/// ends in a dot or `_` stands for all keys that begin so. Other keys are part of the checkpoint (draws,
/// groups in flight, optimizer, data position), so a new value would have no effect or a wrong one.
/// docs/how_to/resume.md lists them.
const MAY_CHANGE: &[&str] = &[
    // What is seen and saved of the run.
    "name",
    "train.target_reward",
    "observe.",
    "checkpoint.",
    "store.",
    "eval.",
    // Limits and changes of the optimizer.
    "train.max_grad_norm",
    "train.gap_warn",
    "train.gap_halt",
    "change",
    "ramp",
    // Where files lie. What is in data is checked by its fingerprint.
    "model.path",
    "model.preset",
    "model.revision",
    "critic.path",
    "reference.path",
    "teacher.path",
    "task.path",
    "task.data",
    "task.sources",
    "sft.data",
    "sft.sources",
    // What computes.
    "model.device",
    "model.check_memory",
    "reference.threads",
    "teacher.threads",
    "generate.max_num_seqs",
    "generate.cache_tokens",
    "generate.prefix_cache",
    "generate.threads",
    "generate.workers",
    "generate.devices",
    "flow.edge_",
    "ranks.",
    // Services elsewhere.
    "engine.",
    "environment.",
    "reward.",
    "net.",
];

/// Sections of servers that compute for the run, and their keys that may change: addresses and timeouts.
const SERVED: [&str; 3] = ["trainer", "reference", "teacher"];
const OF_SERVED: [&str; 8] = ["url", "key_env", "token_env", "timeout", "lost_timeout", "retries", "busy_timeout", "concurrency"];

/// Sections that train a model, and their keys that may change: length, learning rate, what computes
/// and how much at a time.
const TRAINING: [&str; 4] = ["train", "sft", "reward_model", "critic"];
const OF_TRAINING: [&str; 10] = [
    "steps",
    "lr",
    "schedule",
    "threads",
    "replica_devices",
    "micro_batch_tokens",
    "gradient_checkpointing",
    "activations_on_host",
    "masters",
    "moments",
];

/// Returns every key of a recipe, dotted and by its current name, with its value as TOML.
pub fn flat(text: &str) -> Result<BTreeMap<String, String>> {
    let table: toml::Table = text.parse()?;
    let mut keys = BTreeMap::new();
    flatten("", &toml::Value::Table(table), &mut keys);
    Ok(with_current_names(keys))
}

/// Every key of the resolved recipe of the run in `folder`, as [`flat`] has them.
pub fn of_run(folder: &Path) -> Result<BTreeMap<String, String>> {
    let path = folder.join(RECIPE);
    let reading = || format!("reading {}", path.display());
    flat(&std::fs::read_to_string(&path).with_context(reading)?).with_context(reading)
}

/// Keys of the runs' resolved recipes whose values differ, with the value of each run.
pub fn differences(runs: &[PathBuf]) -> Result<BTreeMap<String, Vec<Option<String>>>> {
    let recipes = runs.iter().map(|run| of_run(run)).collect::<Result<Vec<_>>>()?;
    let keys: BTreeSet<&String> = recipes.iter().flat_map(BTreeMap::keys).collect();
    let values = |key: &String| recipes.iter().map(|recipe| recipe.get(key).cloned()).collect::<Vec<_>>();
    let rows = keys.into_iter().map(|key| (key.clone(), values(key)));
    Ok(rows.filter(|(_, values)| values.iter().any(|value| *value != values[0])).collect())
}

fn flatten(path: &str, value: &toml::Value, keys: &mut BTreeMap<String, String>) {
    let within = |key: &str| if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") };
    match value {
        toml::Value::Table(table) => table.iter().for_each(|(key, value)| flatten(&within(key), value, keys)),
        toml::Value::Array(items) if items.iter().any(toml::Value::is_table) => {
            items.iter().enumerate().for_each(|(at, item)| flatten(&format!("{path}[{at}]"), item, keys));
        }
        value => {
            keys.insert(path.to_owned(), value.to_string());
        }
    }
}

/// Lists the keys whose values differ from the run's start and may not change on resume. Edits of the
/// run's `recipe.toml` count.
pub fn changed_for_resume(run: &Path, plan: &Plan) -> Result<Vec<String>> {
    let recorded = Record::read(run)?.recipe;
    let path = run.join(RECIPE);
    let before = match recorded.is_empty() {
        // A run of an earlier version.
        true => std::fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?,
        false => recorded,
    };
    let filled = filled(&before);
    let before = with_dtype(flat(&before).with_context(|| format!("the recipe that {} was begun with", run.display()))?);
    let now = with_dtype(flat(&plan.to_toml()).context("the recipe as TOML")?);
    let keys = before.keys().chain(now.keys().filter(|key| !before.contains_key(*key)));
    let line = |key: &String| match (before.get(key).or_else(|| filled.get(key)), now.get(key)) {
        (before, now) if before == now => None,
        (before, now) => {
            let shown = |value: Option<&String>| value.map_or("absent", String::as_str).to_owned();
            Some(format!("`{key}` is {} in the run, and {} now", shown(before), shown(now)))
        }
    };
    let over = supervised_part_is_over(run, plan)?;
    // [mix] still reads its data, whose files may have moved.
    let data = |key: &str| plan.mix.is_some() && ["sft.data", "sft.sources"].iter().any(|data| key.starts_with(data));
    let of_sft = |key: &str| section(key) == "sft" && !data(key);
    let told = |key: &String| match over && of_sft(key) {
        true => line(key).map(|line| line + ", and the supervised part has ended"),
        false => line(key).filter(|_| !may_change(key)),
    };
    Ok(keys.filter_map(told).collect())
}

/// The keys of a recorded recipe with the defaults of those that the version which recorded it did not
/// know. Empty if this version does not read it.
fn filled(recorded: &str) -> BTreeMap<String, String> {
    let Ok(mut plan) = parse(RECIPE, recorded, &[]) else { return BTreeMap::new() };
    conversations::decide(&mut plan.chat, &plan.model.source);
    flat(&plan.to_toml()).unwrap_or_default()
}

/// Names the format that models compute in, also where it follows from `model.device`.
fn with_dtype(mut keys: BTreeMap<String, String>) -> BTreeMap<String, String> {
    let device = keys.get("model.device").and_then(|device| device.trim_matches('"').parse().ok());
    let dtype = device.unwrap_or(DeviceName::Cpu).precision();
    keys.entry("model.dtype".to_owned()).or_insert_with(|| format!("{:?}", dtype.word()));
    keys
}

/// Returns true if reinforcement has started, so that `[sft]` only provides data to `[mix]`.
fn supervised_part_is_over(run: &Path, plan: &Plan) -> Result<bool> {
    Ok(match plan.pipeline {
        Pipeline::Sft => false,
        // It is written when the supervised part has ended.
        Pipeline::SftThenGrpo => Lineage::read(run)?.is_some(),
        _ => !checkpoint::list(&run.join(CHECKPOINTS))?.is_empty(),
    })
}

/// Returns true if a key may change when a run resumes.
fn may_change(key: &str) -> bool {
    let of_training = || {
        let mut words = key.split('.').skip(1);
        TRAINING.contains(&section(key)) && words.next().is_some_and(|word| OF_TRAINING.contains(&word))
    };
    let listed = |may: &&str| match may.ends_with(['.', '_']) {
        true => key.starts_with(may) && !FIXED.contains(&key),
        false => key == *may || key.strip_prefix(may).is_some_and(|rest| rest.starts_with(['[', '.'])),
    };
    let of_served = || SERVED.contains(&section(key)) && key.rsplit('.').next().is_some_and(|word| OF_SERVED.contains(&word));
    MAY_CHANGE.iter().any(listed) || of_training() || of_served()
}

/// Keys below those of [`MAY_CHANGE`] that may not.
const FIXED: [&str; 6] = [
    "engine.kind",
    "environment.kind",
    "environment.max_turns",
    "environment.max_tokens",
    "environment.max_tool_calls",
    "reward.kind",
];

fn section(key: &str) -> &str {
    key.split(['.', '[']).next().unwrap_or(key)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_may_move_and_be_given_more_time_and_what_it_computes_may_not_change() {
        let moved = [
            "net.ca_file",
            "trainer.url",
            "trainer.lost_timeout",
            "teacher.timeout",
            "teacher.sources[1].url",
            "store.url",
            "model.revision",
        ];
        assert!(moved.iter().all(|key| may_change(key)));
        let fixed = ["trainer.base_model", "teacher.kind", "teacher.sources[1].model", "engine.kind", "seed"];
        assert!(!fixed.iter().any(|key| may_change(key)));
    }
}
