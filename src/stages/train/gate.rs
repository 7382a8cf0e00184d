//! Order of a checkpoint and the log rows of its steps (laws C1, C2).
//!
//! A checkpoint is published by one rename after the rows of its step and of all earlier steps are
//! durable. The newest published checkpoint is therefore a consistent cut: a resume removes later
//! rows, and no earlier row is missing.
//!
//! The trainer saves a checkpoint into a hidden folder, and the log sink writes the rows. The
//! second of them publishes; neither waits for the other.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::train::CheckpointError;
use crate::train::checkpoint;
use crate::util::atomic_file;

/// Delays checkpoints until the rows of their steps are logged.
///
/// Pass one to [`Trainer::gate`](super::Trainer::gate) and to
/// [`RunLog::gate`](crate::stages::sink::RunLog::gate). Clones share the state.
#[derive(Clone, Debug)]
pub struct CheckpointGate(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    logs: Vec<PathBuf>,
    /// The newest step whose rows are written.
    logged: u64,
    /// Checkpoints whose rows are not written yet, by step.
    held: BTreeMap<u64, Held>,
}

/// A checkpoint that is whole but not published.
#[derive(Debug)]
pub(super) struct Held {
    /// Folder that the backend wrote.
    pub written: PathBuf,
    /// The hidden folder around it, deleted when it is published.
    pub staging: PathBuf,
    /// Final folder.
    pub target: PathBuf,
    /// Number of checkpoints to keep.
    pub keep: usize,
}

impl CheckpointGate {
    /// Creates the gate of a new run. The rows in `logs` must be durable before a checkpoint is
    /// published.
    pub fn new(logs: impl IntoIterator<Item = PathBuf>) -> Self {
        let logs = logs.into_iter().collect();
        CheckpointGate(Arc::new(Mutex::new(State { logs, logged: 0, held: BTreeMap::new() })))
    }

    /// Publishes checkpoints whose rows are missing. For the end of a stopped run, which dropped
    /// the last rows with what was in flight.
    ///
    /// # Errors
    /// File-system errors.
    pub fn open(&self) -> Result<(), CheckpointError> {
        self.change(|state| state.logged = u64::MAX)
    }

    /// A checkpoint of `step` is whole.
    pub(super) fn saved(&self, step: u64, held: Held) -> Result<(), CheckpointError> {
        self.change(|state| drop(state.held.insert(step, held)))
    }

    /// The rows of `step` are written.
    pub(crate) fn logged(&self, step: u64) -> Result<(), CheckpointError> {
        self.change(|state| state.logged = state.logged.max(step))
    }

    fn change(&self, change: impl FnOnce(&mut State)) -> Result<(), CheckpointError> {
        let mut state = self.0.lock();
        change(&mut state);
        let State { logs, logged, held } = &mut *state;
        while let Some(entry) = held.first_entry().filter(|entry| entry.key() <= logged) {
            for log in logs.iter().filter(|log| log.exists()) {
                atomic_file::sync(log).map_err(CheckpointError::io(log))?;
            }
            entry.get().publish(*entry.key())?;
            entry.remove();
        }
        Ok(())
    }
}

impl Held {
    /// Moves the checkpoint to its final folder, and removes excess older ones. Logs the path as a
    /// `tracing` event.
    pub fn publish(&self, step: u64) -> Result<(), CheckpointError> {
        let Held { written, staging, target, keep } = self;
        // A backend of another kind may save elsewhere.
        if written.exists() && written.file_name() == target.file_name() {
            checkpoint::publish(written, target)?;
        }
        atomic_file::remove(staging).map_err(CheckpointError::io(staging))?;
        tracing::info!("Saved checkpoint to {}", target.display());
        target.parent().map_or(Ok(()), |checkpoints| checkpoint::prune(checkpoints, step, *keep).map(drop))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::train::CheckpointMetadata;

    #[test]
    fn a_checkpoint_appears_when_its_rows_are_written_whichever_comes_first() {
        let run = tempfile::tempdir().unwrap();
        let checkpoints = run.path().join("checkpoints");
        let gate = CheckpointGate::new([run.path().join("metrics.jsonl")]);
        let save = |step: u64| {
            let fill = |folder: &std::path::Path| fs::write(folder.join("weights"), "").map_err(CheckpointError::io(folder));
            let metadata = CheckpointMetadata { step, ..CheckpointMetadata::default() };
            let staging = checkpoints.join(format!(".{step}.writing"));
            let written = checkpoint::write(&staging, step, metadata, fill).unwrap();
            let target = checkpoints.join(checkpoint::step_folder(step));
            gate.saved(step, Held { written, staging, target, keep: 2 }).unwrap();
        };
        let published = || checkpoint::list(&checkpoints).unwrap().into_iter().map(|(step, _)| step).collect::<Vec<_>>();
        save(1);
        assert!(published().is_empty(), "its row is not written");
        gate.logged(1).unwrap();
        assert_eq!(published(), [1]);
        gate.logged(2).unwrap();
        save(2);
        assert_eq!(published(), [1, 2], "its row came first");
        save(3);
        save(4);
        gate.logged(3).unwrap();
        assert_eq!(published(), [2, 3], "two are kept, and the fourth waits");
        gate.open().unwrap();
        assert_eq!(published(), [3, 4]);
        assert_eq!(fs::read_to_string(checkpoints.join("latest")).unwrap(), "step_000004\n");
    }
}
