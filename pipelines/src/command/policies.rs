//! Argument that names a model: a Hugging Face folder, an id in the hub's local cache, or a run,
//! whose newest checkpoint is taken.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context, Result, bail};
use clap::Args;
use rollflow::model::{Compute, Dtype};
use rollflow::prelude::Policy;
use rollflow::recipe::{self, Chat, DeviceName, PLAIN, Plan};
use rollflow::train::checkpoint::{self, CHECKPOINTS};
use rollflow::util::reading;

use super::{choice, out};
use crate::assemble::{models, policy};
use crate::run::RECIPE;

/// Device and format of a command's model.
#[derive(Args)]
pub struct Computing {
    /// Device of the model: cpu, cuda or cuda:1.
    #[arg(long, value_name = "DEVICE", default_value = "cpu", value_parser = DeviceName::from_str)]
    device: DeviceName,
    /// Compute format: by default f32 on a processor and bf16 on a GPU. A folder in that format
    /// takes no more memory than on disk.
    #[arg(long, value_parser = choice(Dtype::ALL, Dtype::word))]
    dtype: Option<Dtype>,
    /// Longest sequence, in tokens, of a model with LongRoPE, as model.context: by default the context of
    /// pre-training.
    #[arg(long, value_name = "TOKENS")]
    context: Option<usize>,
}

impl Computing {
    /// Returns the compute settings, if the device exists.
    fn compute(&self) -> Result<Compute> {
        let dtype = self.dtype.unwrap_or_else(|| self.device.precision());
        policy::compute_on(self.device, dtype).context("--device")
    }

    /// Loads the model in `path`.
    pub fn policy_of(&self, path: &Path) -> Result<Policy> {
        let (folder, compute) = (model_folder(path)?, self.compute()?);
        let policy = Policy::load_for(&folder, compute).with_context(|| format!("loading {}", folder.display()))?;
        policy.within(self.context).context("--context")
    }

    /// Loads the model in `path`; the newest checkpoint of a run as its recipe reads it.
    pub fn policy_by_recipe(&self, path: &Path) -> Result<Policy> {
        if path.join("config.json").exists() || !path.join(RECIPE).exists() {
            return self.policy_of(path);
        }
        let (file, compute) = (path.join(RECIPE), self.compute()?);
        let text = reading::read_text(&file).with_context(|| format!("reading {}", file.display()))?;
        let mut plan = match recipe::parse(&file.display().to_string(), &text, &[]) {
            Ok(plan) => plan,
            Err(errors) => {
                out::complain(&format!("the model is read without the run's recipe, which this version does not take: {errors}"));
                return self.policy_of(path);
            }
        };
        (plan.model.device, plan.model.dtype) = (self.device, Some(compute.dtype));
        plan.model.context = self.context.or(plan.model.context);
        policy_by(&Plan { chat: saved(plan.chat), ..plan }, path)
    }
}

/// The model in `path` as `plan` reads its own: with its chat template, format and context, and in 4 bits
/// if its adapters are over those.
pub fn policy_by(plan: &Plan, path: &Path) -> Result<Policy> {
    let folder = model_folder(path)?;
    let loading = || format!("loading {}", folder.display());
    policy::base(&plan.model.of_folder(folder.clone()), &plan.chat, plan.lora.as_ref(), plan.seed).with_context(loading)
}

/// `[chat]` of a run for its checkpoints. They contain the run's template, whose file may be gone.
pub fn saved(chat: Chat) -> Chat {
    let template = chat.template.filter(|file| file == PLAIN || Path::new(file).exists());
    Chat { template, ..chat }
}

/// The folder that holds the model which `path` names.
pub fn model_folder(path: &Path) -> Result<PathBuf> {
    if path.join("config.json").exists() {
        return Ok(path.to_owned());
    }
    if path.join(RECIPE).exists() {
        let mut problem = None;
        for found in checkpoint::intact(&path.join(CHECKPOINTS))? {
            match found {
                Ok((_, newest)) => return Ok(newest),
                Err(error) => problem = problem.or(Some(error)),
            }
        }
        match problem {
            Some(error) => bail!("no checkpoint of the run in {} is intact: {error}", path.display()),
            None => bail!("the run in {} has no checkpoint yet; wait for one, or set checkpoint.every", path.display()),
        }
    }
    models::model_folder(path).with_context(|| {
        format!(
            "{} is neither a model (a folder with config.json, model.safetensors and tokenizer.json, or a hub id) nor a run (a folder with recipe.toml)",
            path.display()
        )
    })
}
