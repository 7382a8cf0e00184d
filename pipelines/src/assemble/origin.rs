//! Where a run's first weights come from: the recipe's model, a checkpoint of another run, adapters over either.

use std::borrow::Cow;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use rollflow::model::{Dtype, Lora, ModelConfig, Weights, save_hf};
use rollflow::prelude::*;
use rollflow::recipe::model::ModelSource;
use rollflow::recipe::{self, Pipeline, Plan};
use rollflow::train::CheckpointMetadata;
use rollflow::train::checkpoint::{self, CHECKPOINTS, FileMark};
use rollflow::util::atomic_file;
use serde::{Deserialize, Serialize};

use crate::assemble::parts;

/// The folder in a run's own that keeps what its adapters adapt, where no other folder has it.
const BASE: &str = "base";
/// The file that names the checkpoint that a run began from.
pub const LINEAGE: &str = "lineage.json";

/// The model of a run in the folder `run`, under adapters if the recipe says so.
pub fn policy(plan: &Plan, run: &Path) -> Result<Policy> {
    let base = parts::base(begun(plan, run)?.as_ref())?;
    let Some(lora) = &plan.lora else { return Ok(base.merged()) };
    let base = if base.folder().is_some() { base } else { kept(base, run).context("keeping what the adapters adapt")? };
    Ok(base.adapted(adapters(lora)?, plan.seed)?)
}

/// The reward model of a run in the folder `run`, under adapters if the recipe says so.
pub fn score_model(plan: &Plan, run: &Path) -> Result<ScoreModel> {
    let base = parts::score_base(begun(plan, run)?.as_ref())?;
    let Some(lora) = &plan.lora else { return Ok(base.merged()) };
    let base = match base.folder() {
        Some(_) => base,
        None => {
            let folder = run.join(BASE);
            if !folder.exists() {
                let model = (base.config(), &base.weights(), base.tokenizer().as_ref());
                write(model, run, BASE).context("keeping what the adapters adapt")?;
            }
            base.found_in(folder)
        }
    };
    Ok(base.adapted(adapters(lora)?, plan.seed)?)
}

/// The plan of a run that began from a checkpoint, which names that very one from now on, however many follow it there.
fn begun<'a>(plan: &'a Plan, run: &Path) -> Result<Cow<'a, Plan>> {
    let ModelSource::Folder(folder) = &plan.model.source else { return Ok(Cow::Borrowed(plan)) };
    // Its reinforced part begins from its supervised one.
    if plan.pipeline == Pipeline::SftThenGrpo {
        return Ok(Cow::Borrowed(plan));
    }
    let path = match Lineage::read(run)? {
        Some(lineage) => lineage.found(run)?,
        None => {
            let path = model_folder(&folder.name())?;
            if let Some(lineage) = Lineage::of(run, &path) {
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

/// `[lora]` as the library's.
pub fn adapters(of: &recipe::lora::Lora) -> Result<Lora> {
    let targets: Vec<&str> = of.targets.iter().map(|target| target.word()).collect();
    Ok(Lora::new(of.rank, of.alpha, &targets)?)
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
    write((policy.config(), &policy.weights(), policy.tokenizer()), run, name)
}

fn write((config, weights, tokenizer): (&ModelConfig, &Weights, &Tokenizer), run: &Path, name: &str) -> Result<()> {
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

/// The model folder that `path` stands for, as `check` finds it.
pub fn model_folder(path: &Path) -> Result<PathBuf> {
    Ok(recipe::model_folder(path)?)
}

/// The folder of the run that saved `checkpoint`, if it still lies there.
pub fn run_of(checkpoint: &Path) -> Option<&Path> {
    checkpoint.parent().filter(|folder| folder.ends_with(CHECKPOINTS))?.parent()
}

/// Which checkpoint a run began from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Lineage {
    /// The checkpoint's folder; relative to the run's where it lies inside.
    pub checkpoint: PathBuf,
    /// The step it was saved after.
    pub step: u64,
    /// The file of its weights, so that one knows them again.
    pub weights: FileMark,
}

impl Lineage {
    /// Of the run in `run`, which begins from `checkpoint`. `None` if that is a model folder that no run has left.
    pub fn of(run: &Path, checkpoint: &Path) -> Option<Self> {
        let CheckpointMetadata { step, files, .. } = checkpoint::read_metadata(checkpoint).ok()?;
        let weights = *["model.safetensors", "adapter_model.safetensors"].iter().find_map(|name| files.get(*name))?;
        let inside = checkpoint.strip_prefix(run).map(Path::to_owned);
        let checkpoint = inside.or_else(|_| std::path::absolute(checkpoint)).ok()?;
        Some(Lineage { checkpoint, step, weights })
    }

    /// The checkpoint's folder, with what the run in `run` began from in it.
    pub fn found(&self, run: &Path) -> Result<PathBuf> {
        let folder = run.join(&self.checkpoint);
        ensure!(
            Lineage::of(run, &folder).as_ref() == Some(self),
            "{} does not hold the checkpoint any more that the run began from; bring back what was there",
            folder.display()
        );
        Ok(folder)
    }

    /// What the run in `run` wrote down. `None` if it never began from a checkpoint, or has not begun yet.
    pub fn read(run: &Path) -> Result<Option<Self>> {
        let path = run.join(LINEAGE);
        if !path.exists() {
            return Ok(None);
        }
        let text = std::fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
        serde_json::from_str(&text).map(Some).with_context(|| format!("reading {}", path.display()))
    }

    /// Writes it down, atomically.
    pub fn write(&self, run: &Path) -> Result<()> {
        let path = run.join(LINEAGE);
        let text = serde_json::to_string_pretty(self)? + "\n";
        atomic_file::write(&path, text).with_context(|| format!("writing {}", path.display()))
    }
}
