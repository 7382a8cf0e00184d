//! Log-probabilities under weights that are not trained, by the forward pass of the trainer.

use std::sync::Arc;

use super::replica::Replica;
use super::{LocalConfig, TrainBatch, TrainError, collate};
use crate::algo::Aggregation;
use crate::data::Sample;
use crate::model::{FrozenWeights, ModelConfig};

/// Scores samples. Of `LocalConfig` only temperature, device, format, micro-batches and threads
/// matter. Weights already on its device and in its format are shared.
pub struct Scorer {
    config: Arc<LocalConfig>,
    model: ModelConfig,
    /// Replica of the weights last used.
    replica: Option<(Arc<FrozenWeights>, Replica)>,
}

impl Scorer {
    /// Creates a scorer for a model.
    pub fn new(config: LocalConfig, model: ModelConfig) -> Self {
        Scorer { config: Arc::new(config), model, replica: None }
    }

    /// The model's shape.
    pub fn model(&self) -> &ModelConfig {
        &self.model
    }

    /// Log-probabilities of the batch's trained tokens under `weights`, one list per sequence.
    /// Equals `TrainingBackend::score` with the same weights, bit for bit if micro-batches are
    /// equal.
    pub fn score(&mut self, weights: &Arc<FrozenWeights>, batch: &TrainBatch) -> Vec<Vec<f64>> {
        let known = self.replica.take().filter(|(of, _)| Arc::ptr_eq(of, weights));
        let (_, replica) = self.replica.insert(known.unwrap_or_else(|| {
            let on_device = weights.read().on(self.config.compute);
            (weights.clone(), Replica::new(&self.config, &self.model, &on_device))
        }));
        let mut scores = vec![Vec::new(); batch.sequences.len()];
        for part in self.config.micro_batches(batch, &self.model, 1) {
            replica
                .score(batch, &part)
                .expect("it has all parameters")
                .into_iter()
                .for_each(|(sequence, [log_probs, _])| scores[sequence] = log_probs);
        }
        scores
    }

    /// Writes `ref_log_probs` into samples that are scored together.
    pub fn annotate(&mut self, weights: &Arc<FrozenWeights>, samples: &mut [Sample]) -> Result<(), TrainError> {
        samples.iter_mut().for_each(|sample| sample.ref_log_probs = vec![0.0; sample.tokens.len()]);
        let batch = match collate(samples, Aggregation::TokenMean) {
            Err(TrainError::NothingToTrain(_)) => return Ok(()),
            batch => batch?,
        };
        let scores = self.score(weights, &batch);
        for ((sample, sequence), scores) in samples.iter_mut().zip(&batch.sequences).zip(scores) {
            for (row, log_prob) in sequence.rows.iter().zip(scores) {
                sample.ref_log_probs[row + 1] = log_prob as f32;
            }
        }
        Ok(())
    }
}
