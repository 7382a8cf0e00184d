//! Argument that names a model: a Hugging Face folder, an id in the hub's local cache, or a run,
//! whose newest checkpoint is taken.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use rollflow::model::{Compute, Dtype};
use rollflow::prelude::Policy;
use rollflow::recipe::DeviceName;
use rollflow::train::checkpoint::{self, CHECKPOINTS};

use crate::assemble::{models, policy};
use crate::run::files::RECIPE;

/// Device and format of a command's model.
#[derive(Args)]
pub struct Computing {
    /// Device of the model: cpu, cuda or cuda:1.
    #[arg(long, value_name = "DEVICE", default_value = "cpu", value_parser = DeviceName::from_str)]
    device: DeviceName,
    /// Compute format: by default f32 on a processor and bf16 on a GPU. A folder in that format
    /// takes no more memory than on disk.
    #[arg(long, value_enum)]
    dtype: Option<Format>,
}

/// A format of numbers.
#[derive(Clone, Copy, ValueEnum)]
pub enum Format {
    /// 32 bits, as it was trained.
    F32,
    /// Half the size, over the same range.
    Bf16,
    /// Half the size, more exact, up to 65504.
    F16,
}

impl From<Format> for Dtype {
    fn from(format: Format) -> Dtype {
        match format {
            Format::F32 => Dtype::F32,
            Format::Bf16 => Dtype::Bf16,
            Format::F16 => Dtype::F16,
        }
    }
}

impl Computing {
    /// Returns the compute settings, if the device exists.
    pub fn compute(&self) -> Result<Compute> {
        let dtype = self.dtype.map_or_else(|| self.device.precision(), Dtype::from);
        policy::compute_on(self.device, dtype).context("--device")
    }
}

/// The model in `path`, computed so.
pub fn policy_of(path: &Path, compute: Compute) -> Result<Policy> {
    let folder = model_folder(path)?;
    Policy::load_for(&folder, compute).with_context(|| format!("loading {}", folder.display()))
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
    models::model_folder(path).with_context(|| {
        format!(
            "{} is neither a model (a folder with config.json, model.safetensors and tokenizer.json, or a hub id) nor a run (a folder with recipe.toml)",
            path.display()
        )
    })
}
