//! A backend that trains nothing, for runs on a simulated machine and for tests: it counts as a real one does, and answers at once. How long
//! a step takes is for [`Simulation::takes`](crate::flow::Simulation::takes) to say.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{
    BackendState, CheckpointMetadata, ForwardBackward, OptimStep, SaveCheckpoint, Snapshot, TrainBatch, TrainError, TrainFuture,
    TrainingBackend,
};

/// Weights without a number in them. Saves nothing, and finds every token as likely as its generator did.
#[derive(Debug, Default)]
pub struct SimulatedBackend(Mutex<BackendState>);

impl SimulatedBackend {
    fn count(&self) -> MutexGuard<'_, BackendState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn ready<T>(answer: T) -> TrainFuture<T> {
    TrainFuture::ready(Ok::<T, TrainError>(answer))
}

impl TrainingBackend for SimulatedBackend {
    type Weights = ();

    fn forward_backward(&self, batch: Arc<TrainBatch>) -> TrainFuture<ForwardBackward> {
        ready(ForwardBackward { tokens: batch.batch_tokens, ..ForwardBackward::default() })
    }

    fn score(&self, batch: Arc<TrainBatch>) -> TrainFuture<Vec<Vec<f64>>> {
        ready(batch.sequences.iter().map(|sequence| vec![-1.0; sequence.rows.len()]).collect())
    }

    fn optim_step(&self) -> TrainFuture<OptimStep> {
        let mut state = self.count();
        state.step += 1;
        ready(OptimStep { step: state.step, ..OptimStep::default() })
    }

    fn snapshot(&self) -> TrainFuture<Snapshot<()>> {
        self.count().weight_version += 1;
        self.current()
    }

    fn current(&self) -> TrainFuture<Snapshot<()>> {
        let state = self.state();
        ready(Snapshot { version: state.weight_version, step: state.step, weights: Arc::new(()) })
    }

    fn load_weights(&self, _: Arc<()>) -> TrainFuture<()> {
        ready(())
    }

    fn save_checkpoint(&self, request: SaveCheckpoint) -> TrainFuture<PathBuf> {
        ready(request.run_folder)
    }

    fn load_checkpoint(&self, _: &Path) -> TrainFuture<CheckpointMetadata> {
        ready(CheckpointMetadata::default())
    }

    fn state(&self) -> BackendState {
        self.count().clone()
    }
}
