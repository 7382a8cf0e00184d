//! The argument that names a model: a Hugging Face folder, an id in the hub's local cache, or a run, whose newest checkpoint is one.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use rollflow::prelude::Policy;
use rollflow::train::checkpoint::{self, CHECKPOINTS};

use crate::origin;
use crate::run_folder::RECIPE;

/// The model in `path`.
pub fn policy_of(path: &Path) -> Result<Policy> {
    let folder = model_folder(path)?;
    Policy::load(&folder).with_context(|| format!("loading {}", folder.display()))
}

/// The folder that holds the model which `path` names.
pub fn model_folder(path: &Path) -> Result<PathBuf> {
    if path.join("config.json").exists() {
        return Ok(path.to_owned());
    }
    if path.join(RECIPE).exists() {
        return match checkpoint::intact(&path.join(CHECKPOINTS))?.find_map(Result::ok) {
            Some((_, newest)) => Ok(newest),
            None => bail!("the run in {} has no checkpoint yet; wait for one, or set checkpoint.every", path.display()),
        };
    }
    origin::model_folder(path).with_context(|| {
        format!(
            "{} is neither a model (a folder with config.json, model.safetensors and tokenizer.json, or a hub id) nor a run (a folder with recipe.toml)",
            path.display()
        )
    })
}
