//! Checkpoints of the training stage (law C1, its model part).
//!
//! The backend copies weights and optimizer, and writes them while the next steps train. The stage
//! adds one file with its own state, and the critic's folder. A checkpoint is written to a hidden
//! folder first, and `gate.rs` publishes it.
//!
//! The thread `checkpoint` waits for the backend and hands the checkpoint to the gate. The next save
//! waits for it, and so does the end of the run. Its error ends the run, at the next step at the
//! latest, and no later checkpoint is saved.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::critic::{self, Critic};
use super::gate::CheckpointGate;
use crate::data::number;
use crate::flow::StageError;
use crate::observe::logs::{DEAD_LETTERS, count_lines};
use crate::observe::{Metric, Metrics};
use crate::rollout::{Admission, Progress};
use crate::train::background::Background;
use crate::train::checkpoint::{self, CHECKPOINTS, step_folder};
use crate::train::{SaveCheckpoint, TrainError, TrainingBackend};
use crate::util::atomic_file;

/// State of the training stage in a checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Resumed {
    /// Optimizer steps that the run has taken.
    pub step: u64,
    /// Mean rewards of the newest steps, for the target.
    #[serde(with = "number")]
    pub recent: Vec<f64>,
    /// Adaptive coefficient of the next step's KL penalty, if there is one.
    #[serde(default, with = "number", skip_serializing_if = "Option::is_none")]
    pub kl_coef: Option<f64>,
    /// Prompts and tokens.
    pub progress: Progress,
    /// Number of lines in the run's `dead_letters.jsonl`, which are not tied to steps. `None` in
    /// checkpoints of earlier versions.
    #[serde(default)]
    pub dead_letters: Option<u64>,
}

/// The file in a checkpoint that holds [`Resumed`].
const PROGRESS: &str = "progress.json";

impl Resumed {
    /// Reads the state from a checkpoint of a [`Trainer`](super::Trainer).
    pub fn read(checkpoint: &Path) -> Result<Self, TrainError> {
        let path = checkpoint.join(PROGRESS);
        let text = std::fs::read(&path).map_err(TrainError::io(&path))?;
        serde_json::from_slice(&text).map_err(|error| TrainError::malformed(&path, error))
    }
}

/// Additional files of a checkpoint, by name.
type ExtraFiles = Box<dyn Fn() -> Result<BTreeMap<String, Vec<u8>>, Box<dyn std::error::Error + Send + Sync>> + Send>;

/// Settings of checkpoints.
#[derive(Default)]
pub(super) struct Saving {
    /// None: nothing is saved.
    pub run_folder: Option<PathBuf>,
    pub every: Option<u64>,
    /// None: all are kept.
    pub keep: Option<usize>,
    pub gate: Option<CheckpointGate>,
    pub extra_files: Vec<ExtraFiles>,
    pub metrics: Option<Metrics>,
    /// Waits for the checkpoint that is being written, and publishes it.
    publisher: Mutex<Background>,
}

impl Saving {
    /// Removes excess checkpoints before `step`: the process may have been killed between
    /// publishing that one and pruning.
    pub fn prune(&self, step: u64) -> Result<(), TrainError> {
        let Some(run_folder) = &self.run_folder else { return Ok(()) };
        checkpoint::prune(&run_folder.join(CHECKPOINTS), step, self.kept()).map(drop)
    }

    /// Two at least: should the newest be damaged, a resume falls back on the one before.
    fn kept(&self) -> usize {
        self.keep.unwrap_or(usize::MAX).max(2)
    }

    /// Waits until the checkpoint before is handed to the gate, and returns its error.
    pub fn wait(&self) -> Result<(), TrainError> {
        self.publisher.lock().wait()
    }

    /// Returns the error of a checkpoint that was not saved. Does not wait.
    pub fn check(&self) -> Result<(), TrainError> {
        self.publisher.lock().check()
    }

    /// Copies the state after `state.step`, with `metrics` of that step, and starts to write it. Waits
    /// for the checkpoint before.
    pub fn write<B: TrainingBackend>(
        &self,
        backend: &B,
        critic: Option<&Critic<B>>,
        admission: Option<&Admission>,
        state: &Resumed,
        metrics: BTreeMap<String, f64>,
    ) -> Result<(), StageError> {
        let Some(run_folder) = &self.run_folder else { return Ok(()) };
        self.wait()?;
        let (step, began) = (state.step, Instant::now());
        let not_saved = move |error| TrainError::NotSaved(step, Arc::new(error));
        let progress = admission.map(Admission::progress).unwrap_or_default();
        // After the progress: a group that is settled there has its letter by then.
        let dead_letters = Some(count_lines(&run_folder.join(DEAD_LETTERS))?);
        let mut files = BTreeMap::new();
        for more in &self.extra_files {
            files.append(&mut more().map_err(StageError::new)?);
        }
        files.insert(PROGRESS.to_owned(), serde_json::to_vec(&Resumed { progress, dead_letters, ..state.clone() })?);
        let folders = critic.map(|critic| critic.save(run_folder, step)).transpose().map_err(not_saved)?.into_iter().collect();
        let checkpoints = run_folder.join(CHECKPOINTS);
        // Hidden; a resume deletes one that was never published.
        let staging = checkpoints.join(format!(".{}.unpublished.writing", step_folder(step)));
        let request = SaveCheckpoint { run_folder: staging.clone(), step, metrics, files, folders };
        let saved = backend.save_checkpoint(request);
        saved.copied.wait().map_err(not_saved)?;
        let (gate, keep, cleared) = (self.gate.clone(), self.kept(), critic.map(|_| run_folder.clone()));
        let metrics = self.metrics.clone();
        self.publisher.lock().start(move || {
            let written = saved.written.wait().map_err(not_saved)?;
            cleared.map_or(Ok(()), |run_folder| critic::clear(&run_folder))?;
            let publish = move || {
                publish(&checkpoints, &written, &staging, step, keep).map_err(not_saved)?;
                metrics.iter().for_each(|metrics| record(metrics, step, began.elapsed()));
                Ok(())
            };
            gate.map_or_else(&publish, |gate| gate.saved(step, Box::new(publish.clone())))
        });
        Ok(())
    }
}

fn record(metrics: &Metrics, step: u64, took: Duration) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    metrics.observe(Metric::CheckpointTime, &[], took.as_secs_f64());
    metrics.set(Metric::CheckpointStep, &[], step as f64);
    metrics.set(Metric::CheckpointSaved, &[], now.as_secs_f64());
}

/// Moves a checkpoint from its hidden folder `staging` to its final one, and removes excess older
/// ones. Logs the path as a `tracing` event.
fn publish(checkpoints: &Path, written: &Path, staging: &Path, step: u64, keep: usize) -> Result<(), TrainError> {
    let target = checkpoints.join(step_folder(step));
    // A backend of another kind may save elsewhere.
    if written.exists() && written.file_name() == target.file_name() {
        checkpoint::publish(written, &target)?;
    }
    atomic_file::remove(staging).map_err(TrainError::io(staging))?;
    tracing::info!("Saved checkpoint to {}", target.display());
    checkpoint::prune(checkpoints, step, keep).map(drop)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::train::CheckpointMetadata;

    #[test]
    fn a_published_checkpoint_is_the_latest_and_so_many_are_kept() {
        let run = tempfile::tempdir().unwrap();
        let checkpoints = run.path().join("checkpoints");
        for step in 1..4 {
            let fill = |folder: &Path| fs::write(folder.join("weights"), "").map_err(TrainError::io(folder));
            let metadata = CheckpointMetadata { step, ..CheckpointMetadata::default() };
            let staging = checkpoints.join(format!(".{step}.writing"));
            let written = checkpoint::write(&staging, step, metadata, fill).unwrap();
            publish(&checkpoints, &written, &staging, step, 2).unwrap();
        }
        let steps: Vec<u64> = checkpoint::list(&checkpoints).unwrap().into_iter().map(|(step, _)| step).collect();
        assert_eq!(steps, [2, 3]);
        assert_eq!(fs::read_to_string(checkpoints.join("latest")).unwrap(), "step_000003\n");
    }
}
