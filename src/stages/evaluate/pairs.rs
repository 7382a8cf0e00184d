//! The stage that judges held-out pairs while a run trains on others: how often, and by how much, the chosen completion comes out ahead.
//!
//! Trained steps pass through it in order, each when its own evaluation is done. Nothing is sampled, so that the numbers are the same each time.

use std::fmt;
use std::sync::Arc;

use super::stage::AnswerLog;
use crate::algo::PairMetrics;
use crate::flow::{Io, RunContext, Stage, StageError, StageSpec};
use crate::observe::logs::short;
use crate::observe::{Metric, Metrics, StepMetrics};
use crate::stages::train::Trained;

/// What held-out pairs came to under some weights.
#[derive(Clone, Copy, Debug, Default)]
pub struct JudgedPairs {
    /// Counts and margins. Scores are those of the loss: β times log-ratios, or a reward model's.
    pub pairs: PairMetrics,
    /// The loss over all of them.
    pub loss: f64,
}

impl JudgedPairs {
    /// The numbers by the catalogue's names.
    pub fn row(&self) -> StepMetrics {
        let row = [
            (Metric::EvalPairAccuracy, self.pairs.accuracy()),
            (Metric::EvalPairMargin, self.pairs.margin()),
            (Metric::EvalLoss, self.loss),
        ];
        row.into_iter().map(|(metric, value)| (metric.key().to_owned(), value)).collect()
    }
}

/// Judges weights by held-out pairs.
pub trait PairJudge<W>: Send + 'static {
    /// Called once on the thread that judges, before anything is judged.
    fn start(&mut self) -> Result<(), StageError> {
        Ok(())
    }

    /// What the pairs come to under these weights.
    fn judge(&mut self, weights: &Arc<W>) -> Result<JudgedPairs, StageError>;
}

/// Evaluates published weights on held-out pairs now and then.
pub struct PairEvaluator<W> {
    judge: Box<dyn PairJudge<W>>,
    every: u64,
    last: Option<u64>,
    before: u64,
    log: Option<AnswerLog>,
    metrics: Option<Metrics>,
}

impl<W: Send + Sync + 'static> PairEvaluator<W> {
    /// Judges the weights of every `every`-th step.
    pub fn new(judge: impl PairJudge<W>, every: u64) -> Self {
        PairEvaluator { judge: Box::new(judge), every: every.max(1), last: None, before: 0, log: None, metrics: None }
    }

    /// The weights of this step are evaluated too: the run's last.
    pub fn last(self, step: u64) -> Self {
        PairEvaluator { last: Some(step), ..self }
    }

    /// The run goes on after this step, whose weights were evaluated already.
    pub fn after(self, step: u64) -> Self {
        PairEvaluator { before: step, ..self }
    }

    /// Writes a row of each evaluation to `evaluations.jsonl`.
    pub fn log(self, log: Option<AnswerLog>) -> Self {
        PairEvaluator { log, ..self }
    }

    /// Sets the gauges of the newest evaluation there.
    pub fn metrics(self, metrics: &Metrics) -> Self {
        PairEvaluator { metrics: Some(metrics.clone()), ..self }
    }

    fn is_due(&self, trained: &Trained<W>) -> bool {
        // The first message brings the weights that a run begins with, or goes on with.
        let (first, step) = (trained.step == 0, trained.step);
        if first { self.before == 0 } else { step.is_multiple_of(self.every) || self.last == Some(step) }
    }

    fn evaluate(&mut self, trained: &Trained<W>) -> Result<Option<StepMetrics>, StageError> {
        let Some(publish) = trained.publish.as_ref().filter(|_| self.is_due(trained)) else { return Ok(None) };
        let judged = self.judge.judge(&publish.weights)?;
        let mut found = judged.row();
        found.insert(Metric::EvalStep.key().to_owned(), trained.step as f64);
        found.insert(Metric::EvalVersion.key().to_owned(), publish.version as f64);
        if let Some(log) = &mut self.log {
            log.row(trained.step, &found)?;
        }
        if let Some(metrics) = &self.metrics {
            metrics.set(Metric::EvalPairAccuracy, &[], judged.pairs.accuracy());
            metrics.set(Metric::EvalPairMargin, &[], judged.pairs.margin());
            metrics.set(Metric::EvalLoss, &[], judged.loss);
        }
        let (step, JudgedPairs { pairs, loss }) = (trained.step, judged);
        tracing::info!(
            "Evaluated step {step}: {} pairs accuracy={} margin={} loss={}",
            pairs.pairs,
            short(pairs.accuracy()),
            short(pairs.margin()),
            short(loss)
        );
        Ok(Some(found))
    }
}

impl<W: Send + Sync + 'static> Stage for PairEvaluator<W> {
    type In = Trained<W>;
    type Out = Trained<W>;

    fn attach(&mut self, context: &mut RunContext) {
        context.fill(&mut self.metrics);
    }

    fn run(&mut self, io: &mut Io<Self::In, Self::Out>) -> Result<(), StageError> {
        self.judge.start()?;
        // What the first weights come to goes with the first step, since nobody writes the first message down.
        let mut found = StepMetrics::new();
        while let Some(trained) = io.recv()? {
            found = self.evaluate(&trained)?.unwrap_or(found);
            let trained = if trained.step == 0 { trained } else { Trained { evaluated: std::mem::take(&mut found), ..trained } };
            io.send(trained)?;
        }
        Ok(())
    }

    fn spec(&self) -> StageSpec {
        // It computes now and then, and no core is set aside for it.
        StageSpec::thread().knob("eval.threads, or a rarer eval.every")
    }
}

impl<W> fmt::Debug for PairEvaluator<W> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.debug_struct("PairEvaluator").field("every", &self.every).finish_non_exhaustive()
    }
}
