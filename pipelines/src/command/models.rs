//! `rollflow models`: which models a recipe can name, and which of them are on this machine.

use std::path::Path;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use rollflow::hub::{Cache, CachedModel};
use rollflow::model::ModelConfig;
use rollflow::recipe::{PRESETS, Preset};
use serde_json::{Value, json};

use super::out;

/// List the popular models that recipes may name by `model.preset`, and what is in the hub's local cache.
#[derive(Args)]
pub struct Models {
    /// Print JSON, for scripts.
    #[arg(long)]
    json: bool,
}

impl Models {
    pub fn run(self) -> Result<ExitCode> {
        out::text(&list_of(&Cache::of_user(), self.json))?;
        Ok(ExitCode::SUCCESS)
    }
}

fn list_of(cache: &Cache, json: bool) -> String {
    let cached = cache.models();
    let known = |id: &str| PRESETS.iter().any(|preset| preset.id == id);
    let others: Vec<&CachedModel> = cached.iter().filter(|model| !known(&model.id)).collect();
    if json {
        let presets: Vec<Value> = PRESETS.iter().map(|preset| of_preset(preset, &cached)).collect();
        let others: Vec<Value> = others.into_iter().map(of_cached).collect();
        return format!("{:#}\n", json!({"presets": presets, "others": others, "cache": cache.root()}));
    }
    let mut text = format!(
        "{:<22} {:<42} {:>7}  {:<9} {:<23} {:>7} {:>7} {:>7}  here\n",
        "preset", "hub id", "size", "template", "answers end with", "lr: rl", "sft", "lora"
    );
    for preset in &PRESETS {
        let here = match cached.iter().find(|model| model.id == preset.id) {
            None => "no".to_owned(),
            Some(model) => model.missing.as_ref().map_or("yes".to_owned(), |what| format!("lacks {what}")),
        };
        text += &format!(
            "{:<22} {:<42} {:>7}  {:<9} {:<23} {:>7e} {:>7e} {:>7e}  {here}\n",
            preset.name,
            preset.id,
            size(preset.parameters()),
            preset.template.name,
            preset.template.stop,
            preset.rl_lr(false),
            preset.sft_lr(false),
            preset.sft_lr(true)
        );
    }
    text += &format!("\nIn {}, besides:\n", cache.root().display());
    for model in &others {
        text += &match usable(model) {
            Ok(family) => format!("  {:<40} {family}\n", model.id),
            Err(why) => format!("  {:<40} not usable: {why}\n", model.id),
        };
    }
    if others.is_empty() {
        text += "  nothing\n";
    }
    text + "\nIn a recipe: [model] kind = \"folder\", with preset = \"qwen2.5-0.5b\", or with path = a folder or a hub id. To fetch one: hf download ID\n"
}

/// The family of a cached model, or why it can't be used.
fn usable(model: &CachedModel) -> Result<&'static str, String> {
    if let Some(what) = &model.missing {
        return Err(format!("{what} is missing"));
    }
    let name = |error: &dyn std::fmt::Display| {
        let text = error.to_string();
        // The folder's name says little, and is long.
        text.rsplit_once("config.json: ").map_or(text.clone(), |(_, why)| why.to_owned())
    };
    ModelConfig::from_dir(Path::new(&model.folder)).map(|config| config.family.model_type()).map_err(|error| name(&error))
}

fn of_preset(preset: &Preset, cached: &[CachedModel]) -> Value {
    let here = cached.iter().find(|model| model.id == preset.id);
    json!({
        "preset": preset.name,
        "id": preset.id,
        "family": preset.family,
        "parameters": preset.parameters(),
        "template": preset.template.name,
        "stop": preset.template.stop,
        "lr": {
            "rl": preset.rl_lr(false), "sft": preset.sft_lr(false),
            "rl_lora": preset.rl_lr(true), "sft_lora": preset.sft_lr(true),
        },
        "folder": here.filter(|model| model.missing.is_none()).map(|model| &model.folder),
        "missing": here.and_then(|model| model.missing.as_ref()),
    })
}

fn of_cached(model: &CachedModel) -> Value {
    let usable = usable(model);
    json!({"id": model.id, "folder": model.folder, "family": usable.as_ref().ok(), "problem": usable.as_ref().err()})
}

/// `0.49B`.
fn size(parameters: u64) -> String {
    format!("{:.2}B", parameters as f64 / 1e9)
}
