//! Check before a run that trainer and generator agree about log-probabilities.

use std::sync::Arc;

use super::{TrainError, TrainingBackend, collate};
use crate::algo::{Aggregation, compare_log_probs};
use crate::data::Sample;

/// Checks that `backend` assigns the tokens of `samples` the generator's log-probabilities, within
/// a mean of `tolerance` nats. Both must have the same weights. One forward pass; read-only.
pub fn probe<B: TrainingBackend>(backend: &B, samples: &[Sample], tolerance: f64) -> Result<(), TrainError> {
    let failed = |error| TrainError::Probe(Arc::new(error));
    let batch = collate(samples, Aggregation::TokenMean).map_err(failed)?;
    let generator: Vec<f64> = batch.sequences.iter().filter_map(|sequence| sequence.behaviour.clone()).flatten().collect();
    let trainer = backend.score(Arc::new(batch)).wait().map_err(failed)?.concat();
    Ok(compare_log_probs(&generator, &trainer, tolerance)?)
}
