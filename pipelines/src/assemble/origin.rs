//! First weights of a run: the recipe's model or another run's checkpoint, with adapters if the recipe
//! has them.

use std::borrow::Cow;
use std::path::Path;

use anyhow::{Context, Result};
use rollflow::model::{Dtype, ModelConfig, Weights, save_hf};
use rollflow::prelude::*;
use rollflow::recipe::model::ModelSource;
use rollflow::recipe::{Pipeline, Plan};
use rollflow::train::ScoreModel;
use rollflow::util::atomic_file;

use crate::assemble::{models, policy};

/// Folder in a run's own for the model under its adapters, where no other folder holds it.
const BASE: &str = "base";

/// The model of a run in the folder `run`, under adapters if the recipe says so.
pub fn policy(plan: &Plan, run: &Path) -> Result<Policy> {
    let base = policy::base(begun(plan, run)?.as_ref())?;
    let Some(lora) = &plan.lora else { return Ok(base.merged()) };
    let base = if base.folder().is_some() { base } else { kept(base, run).context("keeping what the adapters adapt")? };
    Ok(base.adapted(policy::adapters(lora)?, plan.seed)?)
}

/// The reward model of a run in the folder `run`, under adapters if the recipe says so.
pub fn score_model(plan: &Plan, run: &Path) -> Result<ScoreModel> {
    let base = policy::score_base(begun(plan, run)?.as_ref())?;
    let Some(lora) = &plan.lora else { return Ok(base.merged()) };
    let base = match base.folder() {
        Some(_) => base,
        None => {
            let folder = run.join(BASE);
            if !folder.exists() {
                write(base.config(), &base.weights(), base.tokenizer(), run, BASE).context("keeping what the adapters adapt")?;
            }
            base.found_in(folder)
        }
    };
    Ok(base.adapted(policy::adapters(lora)?, plan.seed)?)
}

/// Returns the plan with its model pinned to the checkpoint that the run started from, however many
/// checkpoints follow it there.
fn begun<'a>(plan: &'a Plan, run: &Path) -> Result<Cow<'a, Plan>> {
    let ModelSource::Folder(folder) = &plan.model.source else { return Ok(Cow::Borrowed(plan)) };
    // Its reinforced part begins from its supervised one.
    if plan.pipeline == Pipeline::SftThenGrpo {
        return Ok(Cow::Borrowed(plan));
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
    let mut plan = plan.clone();
    if let ModelSource::Folder(folder) = &mut plan.model.source {
        (folder.path, folder.preset, folder.revision) = (path, None, None);
    }
    Ok(Cow::Owned(plan))
}

fn kept(base: Policy, run: &Path) -> Result<Policy> {
    let folder = run.join(BASE);
    if !folder.exists() {
        keep(&base, run, BASE)?;
    }
    Ok(base.found_in(folder))
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
    for (file, content) in tokenizer.files() {
        let path = writing.join(file);
        std::fs::write(&path, content).with_context(|| format!("writing {}", path.display()))?;
    }
    atomic_file::publish(&writing, &folder).with_context(|| format!("writing {}", folder.display()))
}
