//! Evaluation of published weights on held-out pairs: accuracy, margin and loss.

use std::path::PathBuf;
use std::sync::Arc;

use super::Reports;
use crate::algo::{Aggregation, Loss, OffPolicy, PairMetrics};
use crate::data::{Batch, Sample};
use crate::flow::{Io, RunContext, Stage, StageError, StageSpec};
use crate::model::{FrozenWeights, ModelConfig};
use crate::observe::logs::short;
use crate::observe::{Metric, StepMetrics};
use crate::stages::reference::Reference;
use crate::stages::train::Trained;
use crate::train::{LocalConfig, Scorer, TrainBatch, collate};

/// Stage that evaluates weights by the loss of held-out pairs: a preference loss, or a reward
/// model's. It computes in this process. Steps pass in order, each after its own evaluation. Nothing
/// is sampled, so that the same weights give the same metrics.
pub struct PairEvaluator {
    scorer: Scorer,
    threads: Option<usize>,
    loss: Arc<dyn Loss>,
    /// Chosen and rejected completions, pair after pair.
    samples: Vec<Sample>,
    /// Name of each pair's data set; none if there are no data sets.
    sources: Vec<String>,
    reference: Option<Reference<FrozenWeights, Batch>>,
    reports: Reports,
}

impl PairEvaluator {
    /// Evaluates the weights of every `every`-th step of a model of this shape. `samples` holds the
    /// chosen and the rejected completion of each pair in turn.
    pub fn new(config: LocalConfig, model: ModelConfig, loss: Arc<dyn Loss>, samples: Vec<Sample>, every: u64) -> Self {
        let (threads, scorer, reports) = (config.threads, Scorer::new(config, model), Reports::every(every));
        PairEvaluator { threads, scorer, loss, samples, sources: Vec::new(), reference: None, reports }
    }

    /// Names the data set of each pair, for a reference by data set. Default: none.
    pub fn sources(self, sources: Vec<String>) -> Self {
        PairEvaluator { sources, ..self }
    }

    /// Adds a reference policy with fixed weights, which scores the pairs once.
    pub fn reference(self, reference: Reference<FrozenWeights, Batch>) -> Self {
        PairEvaluator { reference: Some(reference), ..self }
    }

    /// Last step of the run, whose weights are evaluated too.
    pub fn last(mut self, step: u64) -> Self {
        self.reports.last = Some(step);
        self
    }

    /// Resumes after step `after`, whose weights are evaluated already, and writes a row of each
    /// evaluation to `evaluations.jsonl` in the run folder, if there is one.
    pub fn report(mut self, after: u64, run_folder: Option<PathBuf>) -> Self {
        (self.reports.resumed_at, self.reports.folder) = (after, run_folder);
        self
    }

    /// Metrics of the pairs under these weights, and the loss over all of them.
    fn judge(&mut self, weights: &Arc<FrozenWeights>) -> Result<(PairMetrics, f64), StageError> {
        let batch = collate(&self.samples, Aggregation::SeqMeanTokenMean)?;
        let batch = TrainBatch { pairs: true, ..batch };
        let log_probs = self.scorer.score(weights, &batch).concat();
        // Losses of pairs do not use entropies.
        let entropies = vec![0.0; log_probs.len()];
        let output = batch
            .evaluate(&batch.all(), &*self.loss, &OffPolicy::default(), &log_probs, &entropies, None)
            .map_err(StageError::new)?;
        Ok((output.metrics.pairs, output.loss))
    }

    fn evaluate(&mut self, trained: &Trained<FrozenWeights>) -> Result<Option<StepMetrics>, StageError> {
        let step = trained.step;
        // The first message carries the initial weights.
        let is_due = if step == 0 { self.reports.resumed_at == 0 } else { self.reports.is_due(step) };
        let Some(publish) = trained.publish.as_ref().filter(|_| is_due) else { return Ok(None) };
        let (pairs, loss) = self.judge(&publish.weights)?;
        let gauges =
            [(Metric::EvalPairAccuracy, pairs.accuracy()), (Metric::EvalPairMargin, pairs.margin()), (Metric::EvalLoss, loss)];
        let row = gauges.into_iter().map(|(metric, value)| (metric.key().to_owned(), value)).collect();
        let row = self.reports.row(step, publish.version, row)?;
        if let Some(metrics) = &self.reports.metrics {
            gauges.into_iter().for_each(|(metric, value)| metrics.set(metric, &[], value));
        }
        let [accuracy, margin, loss] = gauges.map(|(_, value)| short(value));
        tracing::info!("Evaluated step {step}: {} pairs accuracy={accuracy} margin={margin} loss={loss}", pairs.pairs);
        Ok(Some(row))
    }
}

impl Stage for PairEvaluator {
    type In = Trained<FrozenWeights>;
    type Out = Trained<FrozenWeights>;

    fn attach(&mut self, context: &mut RunContext) {
        context.fill(&mut self.reports.metrics);
    }

    fn run(&mut self, io: &mut Io<Self::In, Self::Out>) -> Result<(), StageError> {
        // The first message is not logged: its metrics travel with the first step.
        let mut found = self.reports.open()?;
        self.threads.iter().for_each(|threads| crate::model::use_threads(*threads));
        if let Some(mut reference) = self.reference.take() {
            let sources = self.sources.iter().cloned().chain(std::iter::repeat(String::new()));
            reference.score_held_out(io, sources.zip(self.samples.chunks_mut(2)).collect())?;
        }
        while let Some(trained) = io.recv()? {
            found = self.evaluate(&trained)?.unwrap_or(found);
            let trained = if trained.step == 0 { trained } else { Trained { evaluated: std::mem::take(&mut found), ..trained } };
            io.send(trained)?;
        }
        Ok(())
    }

    fn spec(&self) -> StageSpec {
        // No core is reserved for it: it computes now and then.
        StageSpec::default().knob("eval.threads, or a rarer eval.every")
    }
}
