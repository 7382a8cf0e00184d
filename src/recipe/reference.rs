//! Reference of all recipe keys, `docs/reference/recipe/`: one page per section. It and the JSON schema
//! for editors are generated from the declarations, as is the page of one key that `rollflow explain` prints.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::eval::Eval;
use super::library_names::library_name;
use super::plan::{Pipeline, Plan};
use crate::settings::keys::{KeyDoc, sentence};
use crate::settings::renames::Renames;
use crate::settings::section::{Section, is_near};

const OPENING: &str = "\
# Recipe reference

A recipe is a TOML file that configures a run. Paths are relative to where the command runs. `pipeline`, `[model]` and `[task]` are
required, and `[reward]` if completions for a data set are judged. Every other key has a default. An unknown key is an error.

| order | values come from |
| --- | --- |
| 1 | `include = \"base.toml\"` at the top, or a list of files, relative to the recipe. Sections are merged key by key; a section of another `kind` and lists are replaced |
| 2 | the recipe |
| 3 | the environment: `ROLLFLOW__TRAIN__LR=1e-4` sets `train.lr` |
| 4 | `--set train.lr=1e-4` |

`rollflow check RECIPE` reports every error, with line and column, and the derived values. Editors read
`docs/recipe.schema.json`, which `rollflow schema` prints.

Each page names the keys that most recipes set, then lists all keys. The pages are generated from the declarations of the sections:
`ROLLFLOW_WRITE_DOCS=1 cargo test --test recipes`.

| page | section |
| --- | --- |
";

/// Keys that most recipes set, by section.
const COMMON: [(&str, &[&str]); 23] = [
    ("", &["pipeline", "name", "seed"]),
    ("model", &["path", "device", "dtype"]),
    ("lora", &["rank", "alpha", "targets"]),
    ("chat", &["ask", "system", "template"]),
    ("task", &["data", "subset", "split", "columns.prompt", "columns.answer"]),
    ("sft", &["data", "steps", "epochs", "batch", "lr", "max_length"]),
    ("reward_model", &["epochs", "batch", "lr", "held_out"]),
    ("generate", &["group_size", "max_new_tokens", "temperature"]),
    ("engine", &["kind", "urls", "launch", "replicas", "folder"]),
    ("environment", &["kind", "parser", "max_turns", "max_tokens"]),
    ("reward", &["kind", "require_end_of_text", "retries", "on_failure"]),
    ("filter[]", &["kind", "threshold"]),
    ("reference", &["kind", "path"]),
    ("teacher", &["kind", "path", "top_k", "beta"]),
    ("batch", &["groups"]),
    ("train", &["steps", "epochs", "lr", "loss.kind", "advantage.kind", "micro_batch_tokens"]),
    ("critic", &["lr", "gamma", "lambda", "warmup_steps"]),
    ("flow", &["max_staleness", "on_lost_sample"]),
    ("eval", &["every", "limit", "samples", "task.data", "task.split"]),
    ("checkpoint", &["every", "keep"]),
    ("store", &["url", "anchor_every"]),
    ("observe", &["metrics", "page", "log_every", "rollouts_every", "tensorboard"]),
    ("ranks", &["shard", "replicas", "lost_timeout"]),
];

/// Pages of the reference by file name: `index.md`, then a page per section with type, range,
/// default and meaning of its keys.
pub fn pages() -> BTreeMap<String, String> {
    let mut sections: Vec<(String, Vec<(String, KeyDoc)>)> = Vec::new();
    for key in keys() {
        let (section, name) = key.path.split_once('.').unwrap_or(("", &key.path));
        let (section, name) = (section.to_owned(), name.to_owned());
        if sections.last().is_none_or(|(last, _)| *last != section) {
            sections.push((section, Vec::new()));
        }
        if let Some((_, keys)) = sections.last_mut() {
            keys.push((name, key));
        }
    }
    let mut index = OPENING.to_owned();
    let mut pages = BTreeMap::new();
    for (section, keys) in &sections {
        index += &format!("| [{}]({}) | {} |\n", title(section), file(section), section_doc(section));
        pages.insert(file(section), page(section, keys));
    }
    pages.insert("index.md".to_owned(), index);
    pages
}

/// Returns all keys, in the order of the sections.
pub(super) fn keys() -> Vec<KeyDoc> {
    let mut keys = Vec::new();
    Plan::keys().rows("", &mut keys);
    keys
}

fn page(section: &str, keys: &[(String, KeyDoc)]) -> String {
    let mut text = format!("# {}\n\n{}\n", title(section), section_doc(section));
    if let Some((_, first)) = COMMON.iter().find(|(of, _)| *of == section) {
        let names: Vec<String> = first.iter().map(|name| format!("`{name}`")).collect();
        text += &format!("\nMost recipes set {}.\n", names.join(", "));
    }
    // Nested keys, such as those of `train.loss`, follow in separate tables.
    let mut tables: Vec<(&str, String)> = vec![("", String::new())];
    for (name, key) in keys {
        let group = name.split_once('.').map_or("", |(group, _)| group);
        match tables.iter_mut().find(|(of, _)| *of == group) {
            Some((_, rows)) => *rows += &row(name, key),
            None => tables.push((group, row(name, key))),
        }
    }
    for (group, rows) in tables.iter().filter(|(_, rows)| !rows.is_empty()) {
        if !group.is_empty() {
            text += &format!("\n## `{section}.{group}`\n");
        }
        text += &format!("\n| key | takes | default | meaning |\n| --- | --- | --- | --- |\n{rows}");
    }
    text
}

fn file(section: &str) -> String {
    let name = section.trim_end_matches("[]");
    format!("{}.md", if name.is_empty() { "top" } else { name })
}

/// Sections that have a key of this name, for errors about a key in another section.
pub(crate) fn sections_with(name: &str) -> Vec<String> {
    let within =
        |key: &KeyDoc| key.path.rsplit_once('.').filter(|(_, last)| *last == name).map(|(section, _)| format!("[{section}]"));
    let mut sections: Vec<String> = keys().iter().filter_map(within).collect();
    sections.dedup();
    sections
}

fn title(section: &str) -> String {
    match section.strip_suffix("[]") {
        _ if section.is_empty() => "Top level".to_owned(),
        Some(list) => format!("`[[{list}]]`"),
        None => format!("`[{section}]`"),
    }
}

/// Returns the help of a section, or that of recipes.
fn section_doc(section: &str) -> String {
    sentence(Plan::keys().doc_of(section.trim_end_matches("[]")))
}

fn row(name: &str, KeyDoc { expects, default, formerly, doc, .. }: &KeyDoc) -> String {
    let default = match default.as_str() {
        "required" | "none" => default.clone(),
        value => format!("`{value}`"),
    };
    let formerly = formerly.map(|old| format!(" (formerly `{old}`)")).unwrap_or_default();
    format!("| `{name}`{formerly} | {expects} | {default} | {doc} |\n").replace('\n', " ").trim_end().to_owned() + "\n"
}

/// docs/recipe.schema.json: what a recipe may say, as JSON schema.
pub fn schema() -> Value {
    let mut schema = Plan::keys().schema();
    let file = json!({"type": "string"});
    schema["properties"]["include"] = json!({
        "description": "Recipes that this one is laid over, from the folder that it lies in.",
        "oneOf": [file, {"type": "array", "items": file}],
    });
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema".into();
    schema["title"] = "A recipe of rollflow".into();
    schema
}

/// Returns the page of a key or a section: type, range, default, pipelines, meaning, old name and
/// related keys. The error of an unknown key names the key of that meaning, or near keys.
pub fn explain(key: &str) -> Result<String, String> {
    let path = Renames::of::<Plan>().path(&key.trim().replace("reward.part.", "reward.part[]."));
    let keys = keys();
    let rows: Vec<&KeyDoc> = keys.iter().filter(|key| plain(&key.path) == plain(&path)).collect();
    let inside: Vec<&KeyDoc> = keys.iter().filter(|key| plain(&key.path).starts_with(&format!("{}.", plain(&path)))).collect();
    if rows.is_empty() && inside.is_empty() {
        return Err(unknown(&path, &keys));
    }
    let (section, _) = path.split_once('.').unwrap_or((&path, ""));
    let mut text = format!("{path}\n");
    for KeyDoc { expects, default, formerly, doc, .. } in &rows {
        text += &format!("\n  {doc}\n\n  takes      {expects}\n  default    {default}\n");
        text += &formerly.map(|old| format!("  formerly   {old}\n")).unwrap_or_default();
    }
    if rows.is_empty() && section == path {
        text += &format!("\n  {}\n\n", section_doc(section));
    }
    text += &format!("  pipelines  {}\n", readers(&path).join(", "));
    if inside.is_empty() {
        text += &related(&path, &keys);
    } else {
        text += &format!("  keys       {}\n", names(&inside).join(", "));
    }
    Ok(text)
}

/// A path without the marks of lists.
fn plain(path: &str) -> String {
    path.replace("[]", "")
}

/// Pipelines that read a key, an evaluation included.
fn readers(path: &str) -> Vec<&'static str> {
    let (section, name) = path.split_once('.').unwrap_or((path, ""));
    let reads = |pipeline: &Pipeline| {
        let plan = Plan { pipeline: *pipeline, eval: Some(Eval::default()), ..Plan::default() };
        !plan.unused_sections().contains(&plain(section).as_str()) && !plan.unused_keys().any(|key| key == (section, name))
    };
    Pipeline::ALL.iter().filter(|pipeline| reads(pipeline)).map(|pipeline| pipeline.word()).collect()
}

/// Keys of the same name elsewhere, and the other keys of the section.
fn related(path: &str, keys: &[KeyDoc]) -> String {
    let (within, name) = path.rsplit_once('.').unwrap_or(("", path));
    let split = |key: &KeyDoc| key.path.rsplit_once('.').map_or((String::new(), key.path.clone()), |(a, b)| (plain(a), b.into()));
    let same_name: Vec<&KeyDoc> = keys.iter().filter(|key| plain(&key.path) != plain(path) && split(key).1 == name).collect();
    let siblings: Vec<&KeyDoc> = keys.iter().filter(|key| split(key).0 == plain(within) && split(key).1 != name).collect();
    let line = |what: &str, found: &[&KeyDoc]| match names(found) {
        found if found.is_empty() => String::new(),
        found => format!("  {what:<10} {}\n", found.join(", ")),
    };
    line("same name", &same_name) + &line("related", &siblings)
}

fn names(keys: &[&KeyDoc]) -> Vec<String> {
    let mut names: Vec<String> = keys.iter().map(|key| key.path.clone()).collect();
    names.dedup();
    names
}

/// Most names that an error about an unknown key lists.
const NEAREST: usize = 3;

fn unknown(path: &str, keys: &[KeyDoc]) -> String {
    fn last(path: &str) -> &str {
        path.rsplit('.').next().unwrap_or_default()
    }
    let mut near: Vec<&KeyDoc> = keys.iter().filter(|key| is_near(last(path), last(&key.path))).collect();
    let distance = strsim::damerau_levenshtein;
    near.sort_by_key(|key| (distance(last(path), last(&key.path)), distance(path, &key.path)));
    let mut near = names(&near);
    near.truncate(NEAREST);
    let help = match library_name(path) {
        Some(meaning) => meaning,
        None if near.is_empty() => "`rollflow explain train` lists the keys of [train]".to_owned(),
        None => format!("the nearest are {}", near.join(", ")),
    };
    format!("`{path}` is not a key of recipes; {help}")
}
