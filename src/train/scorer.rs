//! Log-probabilities under weights that are not trained, by the forward pass of the trainer.

use std::sync::Arc;

use super::replica::Replica;
use super::{LocalConfig, TeacherColumn, TrainBatch, TrainError, collate};
use crate::algo::Aggregation;
use crate::data::{DataError, Sample, TopK, TopTokens};
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
        let mut scores = vec![Vec::new(); batch.sequences.len()];
        let parts = self.micro_batches(batch);
        let replica = self.replica(weights);
        for part in parts {
            let scored = replica.score(batch, &part, false).expect("it has all parameters");
            scored.into_iter().for_each(|(sequence, [log_probs, ..])| scores[sequence] = log_probs);
        }
        scores
    }

    /// The same with the likeliest tokens at each trained token.
    fn score_top(&mut self, weights: &Arc<FrozenWeights>, batch: &TrainBatch, top: TopK) -> Vec<(Vec<f64>, TeacherColumn)> {
        let mut scores = vec![Default::default(); batch.sequences.len()];
        let parts = self.micro_batches(batch);
        let replica = self.replica(weights);
        for part in parts {
            let scored = replica.score_top(batch, &part, top).expect("it has all parameters");
            scored.into_iter().for_each(|(sequence, own)| scores[sequence] = own);
        }
        scores
    }

    fn micro_batches(&self, batch: &TrainBatch) -> Vec<Vec<usize>> {
        self.config.micro_batches(batch, &self.model, self.model.is_packed_on(self.config.compute), 1)
    }

    fn replica(&mut self, weights: &Arc<FrozenWeights>) -> &Replica {
        let known = self.replica.take().filter(|(of, _)| Arc::ptr_eq(of, weights));
        let (_, replica) = self.replica.insert(known.unwrap_or_else(|| {
            let on_device = weights.read().on(self.config.compute);
            (weights.clone(), Replica::new(&self.config, &self.model, &on_device))
        }));
        replica
    }

    /// Drops the weights last used.
    pub(crate) fn forget(&mut self) {
        self.replica = None;
    }

    /// Writes `ref_log_probs` into samples that are scored together, and the likeliest tokens at each
    /// trained token, if any are selected.
    pub fn annotate(&mut self, weights: &Arc<FrozenWeights>, samples: &mut [Sample], top: TopK) -> Result<(), TrainError> {
        let unknown = |sample: &&Sample| sample.tokens.iter().any(|token| *token as usize >= self.model.vocab_size);
        if let Some(sample) = samples.iter().find(unknown) {
            let vocabulary = self.model.vocab_size;
            let problem =
                sample.problem(&format!("it has a token that the reference lacks, whose vocabulary has {vocabulary} tokens"));
            return Err(TrainError::from(DataError::Unusable(problem)));
        }
        samples.iter_mut().for_each(|sample| sample.ref_log_probs = vec![0.0; sample.tokens.len()]);
        let batch = match collate(samples, Aggregation::TokenMean) {
            Err(TrainError::NothingToTrain(_)) => return Ok(()),
            batch => batch?,
        };
        let scores = match top.k {
            0 => self.score(weights, &batch).into_iter().map(|log_probs| (log_probs, TeacherColumn::default())).collect(),
            _ => self.score_top(weights, &batch, top),
        };
        for ((sample, sequence), (scores, column)) in samples.iter_mut().zip(&batch.sequences).zip(scores) {
            for (row, log_prob) in sequence.rows.iter().zip(scores) {
                sample.ref_log_probs[row + 1] = log_prob as f32;
            }
            if top.k > 0 {
                sample.teacher = Some(spread(&column, &sequence.rows));
            }
        }
        Ok(())
    }
}

/// A column by position, of a sample whose targets are at `rows`.
fn spread(column: &TeacherColumn, rows: &[usize]) -> TopTokens {
    let (first, end) = (rows.first().map_or(0, |row| row + 1), rows.last().map_or(0, |row| row + 2));
    let (mut top, k) = (TopTokens::new(first, end, column.k), column.k.max(1));
    for ((row, ids), log_probs) in rows.iter().zip(column.ids.chunks(k)).zip(column.log_probs.chunks(k)) {
        let listed = ids.iter().zip(log_probs).map(|(id, log_prob)| (*id as u32, *log_prob as f32));
        top.set_all(row + 1, listed, usize::MAX).expect("there is room from the first row to the last");
    }
    top
}
