//! Check before a run that trainer and generator agree about log-probabilities.

use std::sync::Arc;

use super::{BatchError, TrainError, TrainingBackend, collate};
use crate::algo::{Aggregation, Disagreement, compare_log_probs};
use crate::data::Sample;

/// A probe that was not passed.
#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    /// The samples can't be scored.
    #[error("the samples of the start-up probe: {0}")]
    Collate(#[from] BatchError),
    /// The trainer failed.
    #[error("scoring the start-up probe: {0}")]
    Train(#[from] TrainError),
    /// The log-probabilities differ.
    #[error(transparent)]
    Disagreement(#[from] Disagreement),
}

/// Checks that `backend` assigns the tokens of `samples` the generator's log-probabilities, within
/// a mean of `tolerance` nats. Both must have the same weights. One forward pass; read-only.
pub fn probe<B: TrainingBackend>(backend: &B, samples: &[Sample], tolerance: f64) -> Result<(), ProbeError> {
    let batch = collate(samples, Aggregation::TokenMean)?;
    let generator: Vec<f64> = batch.sequences.iter().filter_map(|sequence| sequence.behaviour.clone()).flatten().collect();
    let trainer = backend.score(Arc::new(batch)).wait()?.concat();
    Ok(compare_log_probs(&generator, &trainer, tolerance)?)
}
