//! Held-out pairs judged in this process, by the forward pass of the trainer and the loss that it trains with.

use std::sync::Arc;

use super::pairs::{JudgedPairs, PairJudge};
use crate::algo::{Aggregation, Loss, OffPolicy};
use crate::data::Sample;
use crate::flow::StageError;
use crate::model::{FrozenWeights, ModelConfig};
use crate::stages::reference::{LocalReference, ReferenceModel};
use crate::train::{LocalConfig, PackedColumns, Scorer, collate};

/// Judges pairs by a loss of pairs: a preference loss, or a reward model's.
pub struct LocalPairJudge {
    scorer: Scorer,
    threads: Option<usize>,
    loss: Arc<dyn Loss>,
    /// Chosen and rejected, pair after pair.
    samples: Vec<Sample>,
    reference: Option<(LocalReference, Arc<FrozenWeights>)>,
}

impl LocalPairJudge {
    /// For a model of this shape. `samples`: chosen and rejected, pair after pair. Of `config` counts what a forward pass reads.
    pub fn new(config: LocalConfig, model: ModelConfig, loss: Arc<dyn Loss>, samples: Vec<Sample>) -> Self {
        LocalPairJudge { threads: config.threads, scorer: Scorer::new(config, model), loss, samples, reference: None }
    }

    /// With a frozen reference policy, which scores the pairs once.
    pub fn reference(self, model: LocalReference, weights: Arc<FrozenWeights>) -> Self {
        LocalPairJudge { reference: Some((model, weights)), ..self }
    }
}

impl PairJudge<FrozenWeights> for LocalPairJudge {
    fn start(&mut self) -> Result<(), StageError> {
        if let Some(threads) = self.threads {
            tch::set_num_threads(threads as i32);
        }
        if let Some((mut model, weights)) = self.reference.take() {
            for pair in self.samples.chunks_mut(2) {
                model.score(&weights, pair).map_err(StageError::new)?;
            }
        }
        Ok(())
    }

    fn judge(&mut self, weights: &Arc<FrozenWeights>) -> Result<JudgedPairs, StageError> {
        let batch = collate(&self.samples.iter().collect::<Vec<_>>(), Aggregation::SeqMeanTokenMean)?.in_pairs();
        let log_probs = self.scorer.score(weights, &batch).concat();
        let columns = PackedColumns::new(&batch, &(0..batch.sequences.len()).collect::<Vec<_>>());
        // No loss of pairs looks at entropies.
        let entropies = vec![0.0; log_probs.len()];
        let output = columns
            .evaluate(&*self.loss, &OffPolicy::default(), &log_probs, &entropies, batch.batch_tokens)
            .map_err(StageError::new)?;
        Ok(JudgedPairs { pairs: output.metrics.pairs, loss: output.loss })
    }
}
