//! Backend without a model, for simulated runs and tests: counts like a real one and takes a
//! configured time.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::{
    BackendState, CheckpointMetadata, ForwardBackward, OptimStep, SaveCheckpoint, SavedCheckpoint, Snapshot, TrainBatch,
    TrainFuture, TrainingBackend,
};
use crate::algo::Schedule;
use crate::flow::Simulation;

/// Backend with empty weights. Saves nothing, and scores each token with the generator's
/// log-probability.
#[derive(Debug, Default)]
pub struct SimulatedBackend {
    state: Mutex<BackendState>,
    machine: Option<Simulation>,
    update: Duration,
    token: Duration,
}

impl SimulatedBackend {
    /// On this machine an update takes so long, and a pass so long for each token of its samples.
    pub fn on(machine: &Simulation, update: Duration, token: Duration) -> Self {
        SimulatedBackend { machine: Some(machine.clone()), update, token, ..SimulatedBackend::default() }
    }

    fn pass(&self, time: Duration) {
        if let Some(machine) = &self.machine {
            machine.pass(time);
        }
    }
}

fn ready<T: Clone + Send + 'static>(answer: T) -> TrainFuture<T> {
    TrainFuture::ready(Ok(answer))
}

impl TrainingBackend for SimulatedBackend {
    type Weights = ();

    fn forward_backward(&self, batch: Arc<TrainBatch>) -> TrainFuture<ForwardBackward> {
        let tokens = batch.input_tokens(&batch.all()) + batch.sequences.len();
        self.pass(self.token.mul_f64(tokens as f64));
        ready(ForwardBackward { tokens: batch.batch_tokens, ..ForwardBackward::default() })
    }

    fn score(&self, batch: Arc<TrainBatch>) -> TrainFuture<Vec<Vec<f64>>> {
        ready(batch.sequences.iter().map(|sequence| vec![-1.0; sequence.rows.len()]).collect())
    }

    fn update(&self, _: f64, _: Option<Schedule>) -> TrainFuture<OptimStep> {
        self.pass(self.update);
        let mut state = self.state.lock();
        state.step += 1;
        ready(OptimStep { step: state.step, ..OptimStep::default() })
    }

    fn takes_parts(&self) -> bool {
        true
    }

    fn snapshot(&self) -> TrainFuture<Snapshot<()>> {
        self.state.lock().weight_version += 1;
        self.current()
    }

    fn current(&self) -> TrainFuture<Snapshot<()>> {
        let state = self.state();
        ready(Snapshot { version: state.weight_version, step: state.step, weights: Arc::new(()) })
    }

    fn load_weights(&self, _: Arc<()>) -> TrainFuture<()> {
        ready(())
    }

    fn save_checkpoint(&self, request: SaveCheckpoint) -> SavedCheckpoint {
        SavedCheckpoint::ready(Ok(request.run_folder))
    }

    fn load_checkpoint(&self, _: &Path) -> TrainFuture<CheckpointMetadata> {
        ready(CheckpointMetadata::default())
    }

    fn state(&self) -> BackendState {
        self.state.lock().clone()
    }
}
