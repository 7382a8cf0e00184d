//! The folder of a model that a recipe names: a model folder, a checkpoint, a run, or an id on the hub.

use std::path::{Path, PathBuf};

use crate::hub::{Hub, HubError};
use crate::train::TrainError;
use crate::train::checkpoint::{self, CHECKPOINTS};

/// The folder that ends a supervised run in the layout of other trainers, next to `step_N`.
pub const FINAL: &str = "sft_final";
/// The file of a model folder, and that of a folder of adapters.
const CONFIGS: [&str; 2] = ["config.json", "adapter_config.json"];

/// A name that stands for no model.
#[derive(Debug, thiserror::Error)]
pub enum NoModel {
    /// Neither a folder nor a model that the hub gives.
    #[error(transparent)]
    Hub(#[from] HubError),
    /// A folder without a model.
    #[error(
        "{}, which is no model: it has no config.json, no adapter_config.json and no complete checkpoint; give a model folder, a checkpoint, or a run",
        path.display()
    )]
    Empty {
        /// The folder.
        path: PathBuf,
    },
    /// The checkpoints cannot be listed.
    #[error(transparent)]
    Checkpoints(#[from] TrainError),
}

/// Returns the model folder of `path`: itself, or, if it is the folder of a run, the run's newest
/// complete checkpoint. `sft_final` is newer than any number. A model named by an id is downloaded
/// from the user's hub if it is not in the cache.
pub fn model_folder(path: &Path) -> Result<PathBuf, NoModel> {
    model_folder_from(&Hub::of_user(), path)
}

/// [`model_folder`] with the hub that models named by an id come from.
pub(crate) fn model_folder_from(hub: &Hub, path: &Path) -> Result<PathBuf, NoModel> {
    let path = hub.open(path)?;
    let is_model = |path: &Path| CONFIGS.iter().any(|file| path.join(file).is_file());
    if is_model(&path) {
        return Ok(path);
    }
    let folders = [path.join(CHECKPOINTS), path.clone()];
    for folder in folders.iter().filter(|folder| folder.is_dir()) {
        let last = folder.join(FINAL);
        if is_model(&last) {
            return Ok(last);
        }
        if let Some(newest) = checkpoint::latest(folder)? {
            return Ok(newest);
        }
    }
    Err(NoModel::Empty { path })
}
