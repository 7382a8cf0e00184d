//! Interface of reference models.

use std::sync::Arc;

use crate::data::Sample;

/// Error of a reference model.
pub type ReferenceError = Box<dyn std::error::Error + Send + Sync>;

/// Scores tokens under given weights, and blends weights.
pub trait ReferenceModel: Send + 'static {
    /// Weights that the trainer publishes.
    type Weights: Send + Sync + 'static;

    /// Called once on the scoring thread before the first score.
    fn start(&mut self) {}

    /// Writes `ref_log_probs` into the samples of one group.
    fn score(&mut self, weights: &Arc<Self::Weights>, samples: &mut [Sample]) -> Result<(), ReferenceError>;

    /// `(1 − share) · old + share · new`.
    fn blend(&self, old: &Self::Weights, new: &Self::Weights, share: f64) -> Self::Weights;

    /// Encodes weights as one file of a checkpoint.
    fn encode(weights: &Self::Weights) -> Result<Vec<u8>, ReferenceError>
    where
        Self: Sized;
}

/// Reference model with log-probability 0 for every token and empty weights, for simulated runs.
#[derive(Clone, Copy, Debug, Default)]
pub struct UnscoredReference;

impl ReferenceModel for UnscoredReference {
    type Weights = ();

    fn score(&mut self, _: &Arc<()>, samples: &mut [Sample]) -> Result<(), ReferenceError> {
        samples.iter_mut().for_each(|sample| sample.ref_log_probs = vec![0.0; sample.tokens.len()]);
        Ok(())
    }

    fn blend(&self, _: &(), _: &(), _: f64) {}

    fn encode(_: &()) -> Result<Vec<u8>, ReferenceError> {
        Ok(Vec::new())
    }
}
