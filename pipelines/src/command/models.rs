//! `rollflow models`: which models a recipe can name, and which of them are on this machine.

use std::path::Path;

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
    pub fn run(self) -> Result<()> {
        let cache = Cache::of_user();
        let cached = cache.models();
        let others: Vec<&CachedModel> =
            cached.iter().filter(|model| PRESETS.iter().all(|preset| preset.id != model.id)).collect();
        if self.json {
            let presets: Vec<Value> = PRESETS.iter().map(|preset| of_preset(preset, &cached)).collect();
            let others: Vec<Value> = others.into_iter().map(of_cached).collect();
            return out::line(&format!("{:#}", json!({"presets": presets, "others": others, "cache": cache.root()})));
        }
        let head = ["preset", "hub id", "size", "template", "answers end with", "lr: rl", "sft", "lora", "here"];
        let mut rows = vec![head.map(str::to_owned).to_vec()];
        for preset in &PRESETS {
            let here = cached
                .iter()
                .find(|model| model.id == preset.id)
                .map_or("no".to_owned(), |model| model.missing.as_ref().map_or("yes".to_owned(), |what| format!("lacks {what}")));
            rows.push(vec![
                preset.name.to_owned(),
                preset.id.to_owned(),
                format!("{:.2}B", preset.parameters() as f64 / 1e9),
                preset.template.name.to_owned(),
                preset.template.stop.to_owned(),
                format!("{:e}", preset.rl_lr(false)),
                format!("{:e}", preset.sft_lr(false)),
                format!("{:e}", preset.sft_lr(true)),
                here,
            ]);
        }
        let mut text = out::aligned(&rows) + &format!("\nIn {}, besides:\n", cache.root().display());
        for model in &others {
            let usable = usable(model).map_or_else(|why| format!("not usable: {why}"), str::to_owned);
            text += &format!("  {:<40} {usable}\n", model.id);
        }
        if others.is_empty() {
            text += "  nothing\n";
        }
        text += "\nIn a recipe: [model] kind = \"folder\", with preset = \"qwen2.5-0.5b\", or with path = a folder or a hub id. To fetch one: hf download ID\n";
        out::text(&text)
    }
}

/// The family of a cached model, or why it can't be used.
fn usable(model: &CachedModel) -> Result<&'static str, String> {
    if let Some(what) = &model.missing {
        return Err(format!("{what} is missing"));
    }
    let config = ModelConfig::from_dir(Path::new(&model.folder)).map_err(|error| error.to_string());
    // The folder's name says little, and is long.
    let why = |text: String| text.rsplit_once("config.json: ").map_or(text.clone(), |(_, why)| why.to_owned());
    config.map(|config| config.family.model_type()).map_err(why)
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
