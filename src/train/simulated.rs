//! Backend without a model, for simulated runs and tests: counts like a real one and takes a
//! configured time.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::{
    Algorithm, BackendState, CheckpointMetadata, ForwardBackward, OptimStep, SaveCheckpoint, SavedCheckpoint, Snapshot,
    TrainBatch, TrainFuture, TrainingBackend,
};

use crate::algo::Schedule;
use crate::flow::Simulation;

/// Backend with empty weights. Saves nothing, and scores each token with the generator's
/// log-probability.
#[derive(Default)]
pub struct SimulatedBackend {
    state: Mutex<BackendState>,
    times: Option<Times>,
}

/// Machine that time passes on, and the times of an update and of a pass over this many tokens.
struct Times {
    machine: Simulation,
    update: Box<dyn Fn() -> Duration + Send + Sync>,
    pass: Box<dyn Fn(usize) -> Duration + Send + Sync>,
}

impl SimulatedBackend {
    /// Returns a backend whose updates and passes take time on this machine; that of a pass depends
    /// on its tokens.
    pub fn on(
        machine: &Simulation,
        update: impl Fn() -> Duration + Send + Sync + 'static,
        pass: impl Fn(usize) -> Duration + Send + Sync + 'static,
    ) -> Self {
        let times = Times { machine: machine.clone(), update: Box::new(update), pass: Box::new(pass) };
        SimulatedBackend { times: Some(times), ..SimulatedBackend::default() }
    }
}

fn ready<T: Clone + Send + 'static>(answer: T) -> TrainFuture<T> {
    TrainFuture::ready(Ok(answer))
}

impl TrainingBackend for SimulatedBackend {
    type Weights = ();

    fn forward_backward(&self, batch: Arc<TrainBatch>) -> TrainFuture<ForwardBackward> {
        let tokens = batch.input_tokens(&batch.all()) + batch.sequences.len();
        if let Some(times) = &self.times {
            times.machine.pass((times.pass)(tokens));
        }
        ready(ForwardBackward { tokens: batch.batch_tokens, ..ForwardBackward::default() })
    }

    fn score(&self, batch: Arc<TrainBatch>) -> TrainFuture<Vec<Vec<f64>>> {
        ready(batch.sequences.iter().map(|sequence| vec![-1.0; sequence.rows.len()]).collect())
    }

    fn update(&self, _: f64, _: Option<Schedule>) -> TrainFuture<OptimStep> {
        if let Some(times) = &self.times {
            times.machine.pass((times.update)());
        }
        let mut state = self.state.lock();
        state.step += 1;
        ready(OptimStep { step: state.step, ..OptimStep::default() })
    }

    fn takes_parts(&self, algorithm: Option<&Algorithm>) -> bool {
        algorithm.is_none_or(Algorithm::takes_parts)
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
