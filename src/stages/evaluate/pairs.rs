//! Stage that evaluates published weights on held-out pairs during training: accuracy, margin and loss.
//!
//! Steps pass through in order, each after its own evaluation. Nothing is sampled, so that the same
//! weights give the same metrics.

use std::sync::Arc;

use super::stage::AnswerLog;
use crate::algo::{Aggregation, Loss, OffPolicy, PairMetrics};
use crate::data::Sample;
use crate::flow::{Io, RunContext, Stage, StageError, StageSpec};
use crate::model::{FrozenWeights, ModelConfig};
use crate::observe::logs::short;
use crate::observe::{Metric, Metrics, StepMetrics};
use crate::stages::reference::{LocalReference, ReferenceModel};
use crate::stages::train::Trained;
use crate::train::{LocalConfig, PackedColumns, Scorer, collate};

/// Stage that evaluates weights by the loss of held-out pairs: a preference loss, or a reward
/// model's. It computes in this process.
pub struct PairEvaluator {
    scorer: Scorer,
    threads: Option<usize>,
    loss: Arc<dyn Loss>,
    /// Chosen and rejected completions, pair after pair.
    samples: Vec<Sample>,
    reference: Option<(LocalReference, Arc<FrozenWeights>)>,
    every: u64,
    last: Option<u64>,
    resumed_at: u64,
    log: Option<AnswerLog>,
    metrics: Option<Metrics>,
}

impl PairEvaluator {
    /// Evaluates the weights of every `every`-th step of a model of this shape. `samples` holds the
    /// chosen and the rejected completion of each pair in turn.
    pub fn new(config: LocalConfig, model: ModelConfig, loss: Arc<dyn Loss>, samples: Vec<Sample>, every: u64) -> Self {
        PairEvaluator {
            threads: config.threads,
            scorer: Scorer::new(config, model),
            loss,
            samples,
            reference: None,
            every: every.max(1),
            last: None,
            resumed_at: 0,
            log: None,
            metrics: None,
        }
    }

    /// Adds a frozen reference policy, which scores the pairs once.
    pub fn reference(self, model: LocalReference, weights: Arc<FrozenWeights>) -> Self {
        PairEvaluator { reference: Some((model, weights)), ..self }
    }

    /// Last step of the run, whose weights are evaluated too.
    pub fn last(self, step: u64) -> Self {
        PairEvaluator { last: Some(step), ..self }
    }

    /// Step that the run is resumed at. Its weights are evaluated already.
    pub fn after(self, step: u64) -> Self {
        PairEvaluator { resumed_at: step, ..self }
    }

    /// Writes a row of each evaluation to this log.
    pub fn log(self, log: Option<AnswerLog>) -> Self {
        PairEvaluator { log, ..self }
    }

    /// Metrics to report to, instead of the flow's.
    pub fn metrics(self, metrics: &Metrics) -> Self {
        PairEvaluator { metrics: Some(metrics.clone()), ..self }
    }

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

    fn is_due(&self, step: u64) -> bool {
        // The first message carries the initial weights.
        if step == 0 { self.resumed_at == 0 } else { step.is_multiple_of(self.every) || self.last == Some(step) }
    }

    /// Metrics of the pairs under these weights, and the loss over all of them.
    fn judge(&mut self, weights: &Arc<FrozenWeights>) -> Result<(PairMetrics, f64), StageError> {
        let batch = collate(&self.samples.iter().collect::<Vec<_>>(), Aggregation::SeqMeanTokenMean)?.in_pairs();
        let log_probs = self.scorer.score(weights, &batch).concat();
        let columns = PackedColumns::new(&batch, &(0..batch.sequences.len()).collect::<Vec<_>>());
        // Losses of pairs do not use entropies.
        let entropies = vec![0.0; log_probs.len()];
        let output = columns
            .evaluate(&*self.loss, &OffPolicy::default(), &log_probs, &entropies, batch.batch_tokens)
            .map_err(StageError::new)?;
        Ok((output.metrics.pairs, output.loss))
    }

    fn evaluate(&mut self, trained: &Trained<FrozenWeights>) -> Result<Option<StepMetrics>, StageError> {
        let step = trained.step;
        let Some(publish) = trained.publish.as_ref().filter(|_| self.is_due(step)) else { return Ok(None) };
        let (pairs, loss) = self.judge(&publish.weights)?;
        let gauges =
            [(Metric::EvalPairAccuracy, pairs.accuracy()), (Metric::EvalPairMargin, pairs.margin()), (Metric::EvalLoss, loss)];
        let position = [(Metric::EvalStep, step as f64), (Metric::EvalVersion, publish.version as f64)];
        let row = gauges.into_iter().chain(position).map(|(metric, value)| (metric.key().to_owned(), value)).collect();
        if let Some(log) = &mut self.log {
            log.row(step, &row)?;
        }
        if let Some(metrics) = &self.metrics {
            gauges.into_iter().for_each(|(metric, value)| metrics.set(metric, &[], value));
        }
        tracing::info!(
            "Evaluated step {step}: {} pairs accuracy={} margin={} loss={}",
            pairs.pairs,
            short(pairs.accuracy()),
            short(pairs.margin()),
            short(loss)
        );
        Ok(Some(row))
    }
}

impl Stage for PairEvaluator {
    type In = Trained<FrozenWeights>;
    type Out = Trained<FrozenWeights>;

    fn attach(&mut self, context: &mut RunContext) {
        context.fill(&mut self.metrics);
    }

    fn run(&mut self, io: &mut Io<Self::In, Self::Out>) -> Result<(), StageError> {
        self.start()?;
        // The first message is not logged: its metrics travel with the first step.
        let mut found = StepMetrics::new();
        while let Some(trained) = io.recv()? {
            found = self.evaluate(&trained)?.unwrap_or(found);
            let trained = if trained.step == 0 { trained } else { Trained { evaluated: std::mem::take(&mut found), ..trained } };
            io.send(trained)?;
        }
        Ok(())
    }

    fn spec(&self) -> StageSpec {
        // No core is reserved for it: it computes now and then.
        StageSpec::thread().knob("eval.threads, or a rarer eval.every")
    }
}
