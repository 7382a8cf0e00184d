//! Model folders that a recipe names, and the checkpoint that a run started from.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
pub use rollflow::recipe::model_folder;
use rollflow::train::CheckpointMetadata;
use rollflow::train::checkpoint::{self, CHECKPOINTS, FileMark};
use rollflow::util::atomic_file;
use serde::{Deserialize, Serialize};

use crate::run::LINEAGE;

/// Rejects another model of the run, called `what`, whose vocabulary is not the policy's.
pub(crate) fn same_vocabulary(what: &str, path: &Path, theirs: usize, ours: usize) -> Result<()> {
    ensure!(
        theirs == ours,
        "{what} in {} has a vocabulary of {theirs} tokens, the policy has {ours}: they speak of different tokens",
        path.display()
    );
    Ok(())
}

/// The folder of the run that saved `checkpoint`, if it still lies there.
pub fn run_of(checkpoint: &Path) -> Option<&Path> {
    checkpoint.parent().filter(|folder| folder.ends_with(CHECKPOINTS))?.parent()
}

/// The checkpoint that a run started from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Lineage {
    /// The checkpoint's folder; relative to the run's where it lies inside.
    pub checkpoint: PathBuf,
    /// The step it was saved after.
    pub step: u64,
    /// The file of its weights, or the first of several, so that one knows them again.
    pub weights: FileMark,
}

impl Lineage {
    /// Identifies `checkpoint` for the run in `run`. `None` if it is a model folder that no run saved.
    pub fn of(run: &Path, checkpoint: &Path) -> Option<Self> {
        let CheckpointMetadata { step, files, .. } = checkpoint::read_metadata(checkpoint).ok()?;
        // Of a model in several files, the first.
        let holds_weights =
            |name: &str| ["model.safetensors", "adapter_model.safetensors"].contains(&name) || name.starts_with("model-");
        let weights =
            files.iter().find(|(name, _)| holds_weights(name) && name.ends_with(".safetensors")).map(|(_, mark)| *mark)?;
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

    /// Reads the lineage of the run in `run`. `None` if it did not start from a checkpoint.
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
