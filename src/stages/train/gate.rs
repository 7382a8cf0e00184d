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

use crate::train::TrainError;
use crate::util::atomic_file;

/// Delays checkpoints until the rows of their steps are logged.
///
/// Pass one to [`Trainer::gate`](super::Trainer::gate) and to
/// [`RunLog::gate`](crate::stages::sink::RunLog::gate). Clones share the state.
#[derive(Clone)]
pub struct CheckpointGate(Arc<Mutex<State>>);

struct State {
    logs: Vec<PathBuf>,
    /// The newest step whose rows are written.
    logged: u64,
    /// Publication of each checkpoint whose rows are not written yet, by step.
    held: BTreeMap<u64, Publish>,
}

type Publish = Box<dyn Fn() -> Result<(), TrainError> + Send>;

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
    pub fn open(&self) -> Result<(), TrainError> {
        self.change(|state| state.logged = u64::MAX)
    }

    /// A checkpoint of `step` is whole, and `publish` makes it visible.
    pub(super) fn saved(&self, step: u64, publish: Publish) -> Result<(), TrainError> {
        self.change(|state| drop(state.held.insert(step, publish)))
    }

    /// The rows of `step` are written.
    pub(crate) fn logged(&self, step: u64) -> Result<(), TrainError> {
        self.change(|state| state.logged = state.logged.max(step))
    }

    fn change(&self, change: impl FnOnce(&mut State)) -> Result<(), TrainError> {
        let mut state = self.0.lock();
        change(&mut state);
        let State { logs, logged, held } = &mut *state;
        while let Some(entry) = held.first_entry().filter(|entry| entry.key() <= logged) {
            for log in logs.iter().filter(|log| log.exists()) {
                atomic_file::sync(log).map_err(TrainError::io(log))?;
            }
            entry.get()()?;
            drop(entry.remove());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_checkpoint_appears_when_its_rows_are_written_whichever_comes_first() {
        let run = tempfile::tempdir().unwrap();
        let log = run.path().join("metrics.jsonl");
        fs::write(&log, "").unwrap();
        let gate = CheckpointGate::new([log]);
        let published: Arc<Mutex<Vec<u64>>> = Arc::default();
        let save = |step: u64| {
            let published = published.clone();
            let publish = move || {
                published.lock().push(step);
                Ok(())
            };
            gate.saved(step, Box::new(publish)).unwrap();
        };
        save(1);
        assert!(published.lock().is_empty(), "its row is not written");
        gate.logged(1).unwrap();
        assert_eq!(*published.lock(), [1]);
        gate.logged(2).unwrap();
        save(2);
        assert_eq!(*published.lock(), [1, 2], "its row came first");
        save(3);
        save(4);
        gate.logged(3).unwrap();
        assert_eq!(*published.lock(), [1, 2, 3], "the fourth waits");
        gate.open().unwrap();
        assert_eq!(*published.lock(), [1, 2, 3, 4]);
    }
}
