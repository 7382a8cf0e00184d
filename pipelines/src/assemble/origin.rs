//! First weights of a run: the recipe's model or another run's checkpoint, with adapters if the recipe
//! has them.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rollflow::model::{Dtype, ModelConfig, Weights, save_hf};
use rollflow::prelude::*;
use rollflow::recipe::{Model, ModelSource, Pipeline, Plan};
use rollflow::train::{LoadedModel, ScoreModel};
use rollflow::util::atomic_file;

use crate::assemble::{models, policy};

/// Folder in a run's own for the model under its adapters, where no other folder holds it.
const BASE: &str = "base";

/// The model of a run in the folder `run`, under adapters if the recipe says so.
pub fn policy(plan: &Plan, run: &Path) -> Result<Policy> {
    under_adapters(policy::base(&begun(plan, run)?, &plan.chat, plan.lora.as_ref(), plan.seed)?, plan, run)
}

/// The reward model of a run in the folder `run`, under adapters if the recipe says so.
pub fn score_model(plan: &Plan, run: &Path) -> Result<ScoreModel> {
    under_adapters(policy::score_base(&begun(plan, run)?, &plan.chat, plan.seed)?, plan, run)
}

fn under_adapters<const SCORES: bool>(base: LoadedModel<SCORES>, plan: &Plan, run: &Path) -> Result<LoadedModel<SCORES>> {
    let base = match (&plan.lora, base.folder()) {
        (Some(_), None) => base.found_in(kept(base.config(), &base.weights(), base.tokenizer(), run)?),
        _ => base,
    };
    policy::adapted(base, plan.lora.as_ref(), plan.seed)
}

/// Returns the model, pinned to the checkpoint that the run started from, however many checkpoints
/// follow it there.
fn begun(plan: &Plan, run: &Path) -> Result<Model> {
    let mut model = plan.model.clone();
    let ModelSource::Folder(folder) = &mut model.source else { return Ok(model) };
    // The reinforced part of `sft_then_grpo` begins from its supervised one, in the same run.
    if plan.pipeline == Pipeline::SftThenGrpo {
        return Ok(model);
    }
    let path = match models::Lineage::read(run)? {
        Some(lineage) => lineage.found(run)?,
        None => {
            let path = models::model_folder(&folder.name())?;
            if let Some(lineage) = models::Lineage::of(run, &path) {
                lineage.write(run)?;
            }
            path
        }
    };
    (folder.path, folder.preset, folder.revision) = (path, None, None);
    Ok(model)
}

/// Writes the model that adapters adapt into the run's folder, unless it is there, and returns where.
fn kept(config: &ModelConfig, weights: &Weights, tokenizer: &Tokenizer, run: &Path) -> Result<PathBuf> {
    let folder = run.join(BASE);
    if !folder.exists() {
        write(config, weights, tokenizer, run, BASE).context("keeping what the adapters adapt")?;
    }
    Ok(folder)
}

/// Writes a policy into the folder `name` of a run's, replacing what is there.
pub fn keep(policy: &Policy, run: &Path, name: &str) -> Result<()> {
    write(policy.config(), &policy.weights(), policy.tokenizer(), run, name)
}

fn write(config: &ModelConfig, weights: &Weights, tokenizer: &Tokenizer, run: &Path, name: &str) -> Result<()> {
    let (folder, writing) = (run.join(name), run.join(format!(".{name}.writing")));
    // What training made is not rounded to what the folder was.
    let config = ModelConfig { dtype: Dtype::F32, ..config.clone() };
    save_hf(&writing, &config, weights)?;
    tokenizer.save(&writing)?;
    atomic_file::publish(&writing, &folder).with_context(|| format!("writing {}", folder.display()))
}
