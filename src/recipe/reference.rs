//! The reference of all keys, docs/recipes.md, from the declarations themselves.

use super::plan::Plan;
use crate::settings::section::Section;
use crate::settings::setting::KeyDoc;

const OPENING: &str = "\
# Recipes

A recipe is a TOML file that configures a run. `rollflow check RECIPE` reports every error at once, with line and column, and the derived
values. `rollflow run RECIPE --set section.key=value` overrides single keys. Paths are relative to where the command runs. `pipeline`,
`[model]` and `[task]` are required, and `[reward]` if completions for a data set are judged; every other key has a default. An
unknown key is an error.

`include = \"base.toml\"` at the top, or a list of files, merges the recipe over others: sections are merged key by key, unless they have
another `kind`; lists are replaced. Included files are searched in the folder of the recipe. The environment variable
`ROLLFLOW__TRAIN__LR=1e-4` overrides `train.lr`, and `--set` overrides both. Editors read `recipe.schema.json`; `rollflow schema` prints it.

This page is generated from the declarations of the sections, and a test compares them. To generate it again:
`ROLLFLOW_WRITE_DOCS=1 cargo test --test recipes`.
";

/// The text of docs/recipes.md: every section and key, with type, range, default and meaning.
pub fn reference() -> String {
    let mut keys = Vec::new();
    Plan::describe_rows("", &mut keys);
    let mut text = OPENING.to_owned();
    let mut section = None;
    for key in &keys {
        let (of, name) = key.path.split_once('.').unwrap_or(("", &key.path));
        if section != Some(of) {
            section = Some(of);
            text += &heading(of);
        }
        text += &row(name, key);
    }
    text
}

/// Sections that have a key of this name, for those who put it elsewhere.
pub(crate) fn sections_with(name: &str) -> Vec<String> {
    let mut keys = Vec::new();
    Plan::describe_rows("", &mut keys);
    let within =
        |key: &KeyDoc| key.path.rsplit_once('.').filter(|(_, last)| *last == name).map(|(section, _)| format!("[{section}]"));
    let mut sections: Vec<String> = keys.iter().filter_map(within).collect();
    sections.dedup();
    sections
}

fn heading(section: &str) -> String {
    let title = match section.strip_suffix("[]") {
        _ if section.is_empty() => "At the top".to_owned(),
        Some(list) => format!("`[[{list}]]`"),
        None => format!("`[{section}]`"),
    };
    let doc = section_doc(section);
    format!("\n## {title}\n\n{doc}\n\n| key | takes | default | meaning |\n| --- | --- | --- | --- |\n")
}

fn section_doc(section: &str) -> String {
    use super::{
        chat, critic, engine, environment, eval, generate, lora, model, net, pairs, plan, reference_policy, reward, task,
        timeline, train,
    };
    match section.trim_end_matches("[]") {
        "model" => model::Model::doc(),
        "lora" => lora::Lora::doc(),
        "chat" => chat::Chat::doc(),
        "task" => task::Task::doc(),
        "sft" => task::Sft::doc(),
        "mix" => task::Mix::doc(),
        "reward_model" => task::RewardModel::doc(),
        "generate" => generate::Generate::doc(),
        "engine" => engine::Engine::doc(),
        "environment" => environment::Environment::doc(),
        "reward" => reward::Reward::doc(),
        "filter" => generate::Filter::doc(),
        "pairs" => pairs::Pairs::doc(),
        "reference" => reference_policy::Reference::doc(),
        "batch" => plan::Batching::doc(),
        "train" => train::Train::doc(),
        "critic" => critic::Critic::doc(),
        "change" => timeline::Change::doc(),
        "ramp" => timeline::Ramp::doc(),
        "sync" => plan::Syncing::doc(),
        "flow" => plan::FlowLimits::doc(),
        "eval" => eval::Eval::doc(),
        "checkpoint" => plan::Checkpointing::doc(),
        "observe" => plan::Observe::doc(),
        "net" => net::Net::doc(),
        _ => Plan::doc(),
    }
}

fn row(name: &str, KeyDoc { expects, default, doc, .. }: &KeyDoc) -> String {
    let default = match default.as_str() {
        "required" | "none" => default.clone(),
        value => format!("`{value}`"),
    };
    format!("| `{name}` | {expects} | {default} | {doc} |\n").replace('\n', " ").trim_end().to_owned() + "\n"
}
