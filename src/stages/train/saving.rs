//! Checkpoints of the training stage (law C1, its model part).
//!
//! The backend writes weights and optimizer. The stage adds one file with its own state, and the
//! critic's folder. A checkpoint is written to a hidden folder first, and `gate.rs` publishes it.

use std::collections::{BTreeMap, VecDeque};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::critic::{self, Critic};
use super::gate::{CheckpointGate, Held};
use super::trained::Trained;
use super::trainer::mean;
use crate::data::number;
use crate::flow::StageError;
use crate::observe::logs::{DEAD_LETTERS, count_lines};
use crate::rollout::{Admission, Progress};
use crate::train::checkpoint::{self, CHECKPOINTS, step_folder};
use crate::train::{CheckpointError, SaveCheckpoint, TrainingBackend};

/// State of the training stage in a checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Resumed {
    /// Optimizer steps that the run has taken.
    pub step: u64,
    /// Mean rewards of the newest steps, for the target.
    #[serde(with = "number::many")]
    pub recent: VecDeque<f64>,
    /// Adaptive coefficient of the next step's KL penalty, if there is one.
    #[serde(default, with = "number::optional", skip_serializing_if = "Option::is_none")]
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
    pub fn read(checkpoint: &Path) -> Result<Self, CheckpointError> {
        let path = checkpoint.join(PROGRESS);
        let text = std::fs::read(&path).map_err(CheckpointError::io(&path))?;
        serde_json::from_slice(&text).map_err(|error| CheckpointError::malformed(&path, error))
    }
}

/// A step that no checkpoint holds yet.
pub(super) struct Unsaved {
    step: u64,
    metrics: BTreeMap<String, f64>,
    recent: VecDeque<f64>,
    kl_coef: Option<f64>,
}

impl Unsaved {
    pub(super) fn after<W>(trained: &Trained<W>, recent: &VecDeque<f64>) -> Self {
        let mut metrics = BTreeMap::from([("loss".to_owned(), trained.forward.loss)]);
        metrics.extend(mean(trained.batch.rewards()).map(|mean| ("reward_mean".to_owned(), mean)));
        let kl_coef = trained.kl_cost.map(|cost| cost.next);
        Unsaved { step: trained.step, metrics, recent: recent.clone(), kl_coef }
    }
}

/// Additional files of a checkpoint, by name.
pub(super) type ExtraFiles = Box<dyn Fn() -> Result<BTreeMap<String, Vec<u8>>, Box<dyn std::error::Error + Send + Sync>> + Send>;

/// Settings of checkpoints.
pub(super) struct Saving {
    run_folder: PathBuf,
    every: Option<u64>,
    keep: usize,
    gate: Option<CheckpointGate>,
}

impl Saving {
    pub(super) fn below(run_folder: PathBuf, every: Option<u64>) -> Self {
        Saving { run_folder, every, keep: usize::MAX, gate: None }
    }

    pub(super) fn limited(self, keep: Option<usize>, gate: Option<CheckpointGate>) -> Self {
        Saving { keep: keep.unwrap_or(self.keep), gate: gate.or(self.gate), ..self }
    }

    /// Removes excess checkpoints before `step`: the process may have been killed between
    /// publishing that one and pruning.
    pub(super) fn prune(&self, step: u64) -> Result<(), CheckpointError> {
        checkpoint::prune(&self.run_folder.join(CHECKPOINTS), step, self.kept()).map(drop)
    }

    /// Two at least: should the newest be damaged, a resume falls back on the one before.
    fn kept(&self) -> usize {
        self.keep.max(2)
    }

    pub(super) fn is_due(&self, step: u64) -> bool {
        self.every.is_some_and(|every| step.is_multiple_of(every))
    }

    pub(super) fn write<B: TrainingBackend>(
        &self,
        backend: &B,
        critic: Option<&Critic<B>>,
        admission: Option<&Admission>,
        extra_files: Option<&ExtraFiles>,
        last: Unsaved,
    ) -> Result<(), StageError> {
        let Unsaved { step, metrics, recent, kl_coef } = last;
        let progress = admission.map(Admission::progress).unwrap_or_default();
        // After the progress: a group that is settled there has its letter by then.
        let dead_letters = Some(count_lines(&self.run_folder.join(DEAD_LETTERS))?);
        let mut files = extra_files.map_or(Ok(BTreeMap::new()), |files| files()).map_err(StageError::new)?;
        files.insert(PROGRESS.to_owned(), serde_json::to_vec(&Resumed { step, recent, kl_coef, progress, dead_letters })?);
        let folders = critic.map(|critic| critic.save(&self.run_folder, step)).transpose()?.into_iter().collect();
        let checkpoints = self.run_folder.join(CHECKPOINTS);
        // Hidden; a resume deletes one that was never published.
        let staging = checkpoints.join(format!(".{}.unpublished.writing", step_folder(step)));
        let request = SaveCheckpoint { run_folder: staging.clone(), step, metrics, files, folders };
        let written = backend.save_checkpoint(request).wait()?;
        critic.map_or(Ok(()), |_| critic::clear(&self.run_folder))?;
        let target = checkpoints.join(step_folder(step));
        let held = Held { written, staging, target, keep: self.kept() };
        match &self.gate {
            Some(gate) => gate.saved(step, held)?,
            None => held.publish(step)?,
        }
        Ok(())
    }
}
