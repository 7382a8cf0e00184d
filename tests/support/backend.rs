//! A backend that trains nothing, for tests of everything around it.

use std::path::Path;
use std::sync::{Arc, Mutex};

use rollflow::algo::Schedule;
use rollflow::train::{
    BackendState, CheckpointMetadata, ForwardBackward, OptimStep, SaveCheckpoint, SavedCheckpoint, Snapshot, TrainBatch,
    TrainError, TrainFuture, TrainingBackend,
};

/// What it was asked for.
pub enum Asked {
    Score,
    Update(u64),
    Save(u64),
}

/// What comes of a pass over a batch, but for the tokens.
pub type Forward = Box<dyn Fn(&TrainBatch, &BackendState) -> ForwardBackward + Send + Sync>;

/// What it thinks of the trained tokens of a batch.
pub type Scores = Box<dyn Fn(&TrainBatch) -> Vec<Vec<f64>> + Send + Sync>;

/// Counts its updates; the number of them is its weights.
pub struct Counting {
    pub state: Mutex<BackendState>,
    pub forward: Forward,
    pub scores: Scores,
    pub hears: Box<dyn Fn(Asked) + Send + Sync>,
}

impl Default for Counting {
    fn default() -> Self {
        let (forward, hears) = (Box::new(|_: &_, _: &_| ForwardBackward::default()), Box::new(|_| ()));
        let certain = |batch: &TrainBatch| batch.sequences.iter().map(|sequence| vec![-1.0; sequence.rows.len()]).collect();
        Counting { state: Mutex::default(), forward, scores: Box::new(certain), hears }
    }
}

fn ready<T: Clone + Send + 'static>(answer: T) -> TrainFuture<T> {
    TrainFuture::ready(Ok::<T, TrainError>(answer))
}

impl TrainingBackend for Counting {
    type Weights = u64;
    fn forward_backward(&self, batch: Arc<TrainBatch>) -> TrainFuture<ForwardBackward> {
        ready(ForwardBackward { tokens: batch.batch_tokens, ..(self.forward)(&batch, &self.state()) })
    }
    fn score(&self, batch: Arc<TrainBatch>) -> TrainFuture<Vec<Vec<f64>>> {
        (self.hears)(Asked::Score);
        ready((self.scores)(&batch))
    }
    fn update(&self, _: f64, _: Option<Schedule>) -> TrainFuture<OptimStep> {
        let mut state = self.state.lock().unwrap();
        state.step += 1;
        (self.hears)(Asked::Update(state.step));
        ready(OptimStep { step: state.step, ..OptimStep::default() })
    }
    fn snapshot(&self) -> TrainFuture<Snapshot<u64>> {
        self.state.lock().unwrap().weight_version += 1;
        self.current()
    }
    fn current(&self) -> TrainFuture<Snapshot<u64>> {
        let state = self.state();
        ready(Snapshot { version: state.weight_version, step: state.step, weights: Arc::new(state.step) })
    }
    fn save_checkpoint(&self, request: SaveCheckpoint) -> SavedCheckpoint {
        (self.hears)(Asked::Save(request.step));
        SavedCheckpoint::ready(Ok(request.run_folder))
    }
    fn load_weights(&self, _: Arc<u64>) -> TrainFuture<()> {
        ready(())
    }
    fn load_checkpoint(&self, _: &Path) -> TrainFuture<CheckpointMetadata> {
        ready(CheckpointMetadata::default())
    }
    fn state(&self) -> BackendState {
        self.state.lock().unwrap().clone()
    }
}
