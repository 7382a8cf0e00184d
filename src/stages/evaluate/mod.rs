//! Stages that evaluate published weights during training: [`Evaluator`] samples completions of
//! held-out prompts on a separate engine, `PairEvaluator` scores held-out pairs.
//!
//! Trained steps pass through. [`Evaluator`] keeps the published weights of a step that is due, so
//! that its evaluation is pinned to one version. Between two tokens it passes steps on: training
//! waits for one token at most. The metrics travel with the next step, or with the run's last step,
//! which waits for them. At most one evaluation runs at a time. Of those that become due meanwhile
//! the newest runs next, and the others are skipped with a warning.
//!
//! A resumed run (law C2) logs metrics again if the row that they travelled with is made again. The
//! weights of an evaluation that was interrupted are gone, unless the run resumes at its step: a
//! warning names it, and its completions are removed.
//!
//! Memory: the weights of the evaluated version and of the next one, and a KV cache.

#[cfg(feature = "torch")]
mod pairs;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::task::Poll;

#[cfg(feature = "torch")]
pub use pairs::PairEvaluator;

use crate::data::Version;
use crate::engine::TokenEngine;
use crate::engine::remote::Fleet;
use crate::flow::{Io, RunContext, Signal, Stage, StageError, StageSpec};
use crate::observe::logs::{JsonLines, JsonlLogger, JudgedAnswer, MetricsLogger, metrics_rows};
use crate::observe::{Metric, Metrics, ObserveError, StepMetrics};
use crate::rollout::{EvalSpec, Evaluation, passes};
use crate::stages::generate::Generator;
use crate::stages::sync::EvaluationHold;
use crate::stages::train::Trained;
use crate::train::{Snapshot, checkpoint};
use crate::util::atomic_file;

/// Stage that evaluates the weights of every n-th step.
pub struct Evaluator<E: TokenEngine, W = <E as TokenEngine>::Weights> {
    generator: Generator<E>,
    set_weights: fn(&mut E, Version, &W),
    spec: Arc<EvalSpec>,
    reports: Reports,
    in_order: bool,
    hold: Option<EvaluationHold>,
}

impl<E: TokenEngine> Evaluator<E> {
    /// Evaluates weights of every `every`-th step on an engine of `generator`, on the stage's thread. Of
    /// the generator's settings, only slots, threads and seed matter.
    pub fn new(generator: Generator<E>, spec: EvalSpec, every: u64) -> Self {
        let (spec, reports) = (Arc::new(spec), Reports::every(every));
        Evaluator { generator, set_weights: E::set_weights, spec, reports, in_order: false, hold: None }
    }
}

impl<W: Send + Sync + 'static> Evaluator<Fleet, W> {
    /// Evaluates on servers, whose weights [`RemoteSync`](crate::stages::sync::RemoteSync) syncs and
    /// verifies. Both share `hold`, so that all completions are of the evaluated version. Evaluates in
    /// order ([`Evaluator::in_order`]).
    pub fn remote(generator: Generator<Fleet>, spec: EvalSpec, every: u64, hold: &EvaluationHold) -> Self {
        let Evaluator { generator, spec, reports, .. } = Evaluator::new(generator, spec, every);
        let set_weights = |fleet: &mut Fleet, version, _: &W| fleet.set_weights(version, &());
        Evaluator { generator, set_weights, spec, reports, in_order: true, hold: Some(hold.clone()) }
    }
}

impl<E: TokenEngine, W> Evaluator<E, W> {
    /// Last step of the run, whose weights are evaluated too.
    pub fn last(mut self, step: u64) -> Self {
        self.reports.last = Some(step);
        self
    }

    /// If true, no evaluation is skipped, and each step passes after its own: a synchronous run logs
    /// the same metrics in the same rows each time (law V3). Default: false.
    pub fn in_order(self, in_order: bool) -> Self {
        Evaluator { in_order: in_order || self.hold.is_some(), ..self }
    }

    /// Resumes after step `after`, 0 for a new run, and writes evaluations to the run folder, if there is
    /// one: rows in `evaluations.jsonl`, and the completions of each evaluation in
    /// `evaluations/step_000100.jsonl`.
    pub fn report(mut self, after: u64, run_folder: Option<PathBuf>) -> Self {
        (self.reports.resumed_at, self.reports.folder) = (after, run_folder);
        self
    }
}

type Steps<W> = Io<Trained<W>, Trained<W>>;

/// Engine of the stage, and the evaluations in progress and due.
struct EvalWorker<E: TokenEngine, W> {
    engine: E,
    held: Option<Trained<W>>,
    run: Option<EvalRun<E>>,
    next: Option<(u64, Snapshot<W>)>,
    /// Metrics of the newest evaluation, until a step takes them.
    found: StepMetrics,
}

struct EvalRun<E: TokenEngine> {
    step: u64,
    version: Version,
    evaluation: Evaluation<E>,
    answers: Option<JsonLines<JudgedAnswer>>,
}

impl<E: TokenEngine, W: Send + Sync + 'static> Evaluator<E, W> {
    /// Takes a step and returns the one before.
    fn take(&mut self, worker: &mut EvalWorker<E, W>, trained: Trained<W>) -> Result<Option<Trained<W>>, StageError> {
        // The first message carries the initial weights. After a resume they are evaluated already,
        // unless the run was killed during their evaluation.
        let first = trained.step == 0;
        let step = if first { self.reports.resumed_at } else { trained.step };
        let known = first && step > 0 && self.reports.has_evaluated(step);
        if let Some(publish) = trained.publish.as_ref().filter(|_| self.reports.is_due(step) && !known)
            && let Some((skipped, _)) = worker.next.replace((step, publish.clone()))
        {
            tracing::warn!("Evaluation of step {skipped} skipped: the previous one is still running; raise eval.every");
        }
        let before = worker.held.replace(trained);
        self.begin_next(worker)?;
        Ok(before)
    }

    fn begin_next(&self, worker: &mut EvalWorker<E, W>) -> Result<(), StageError> {
        if worker.run.is_none()
            && let Some((step, Snapshot { version, weights, .. })) = worker.next.take()
        {
            (self.set_weights)(&mut worker.engine, version, &weights);
            let answers = self.reports.answers(step)?;
            let tokenizer = self.generator.tokenizer();
            let evaluation = Evaluation::begin(&self.spec, tokenizer, &worker.engine, version, Vec::new());
            worker.run = Some(EvalRun { step, version, evaluation, answers });
        }
        Ok(())
    }

    /// Computes one token of every completion in flight, and reports the evaluation when it is done.
    fn advance(&mut self, worker: &mut EvalWorker<E, W>) -> Result<(), StageError> {
        let Some(EvalRun { evaluation, answers, .. }) = &mut worker.run else { return Ok(()) };
        for judged in evaluation.advance(&mut worker.engine)? {
            answers.as_mut().map_or(Ok(()), |answers| answers.write(&judged))?;
        }
        let Some(EvalRun { step, version, evaluation, answers }) = worker.run.take_if(|run| run.evaluation.is_done()) else {
            return Ok(());
        };
        answers.map_or(Ok(()), |mut answers| answers.sync())?;
        let row = self.reports.row(step, version, evaluation.summary())?;
        let passes = passes(&row);
        if let Some(metrics) = &self.reports.metrics {
            passes.iter().for_each(|(k, value)| metrics.set(Metric::EvalPassAt, &[&k.to_string()], *value));
        }
        let value = |metric: Metric| row.get(metric.key()).copied();
        let shown = |name: &str, value: Option<f64>| value.map_or(String::new(), |value| format!(" {name}={value:.4}"));
        let (greedy, sampled) = (value(Metric::EvalGreedyAccuracy), value(Metric::EvalAccuracy));
        let best = passes.last_key_value().filter(|(k, _)| **k > 1);
        let best = best.map_or(String::new(), |(k, value)| shown(&format!("pass@{k}"), Some(*value)));
        let (greedy, sampled, reward) =
            (shown("greedy", greedy), shown("sampled", sampled), shown("reward", value(Metric::EvalReward)));
        tracing::info!("Evaluated step {step}:{greedy}{sampled}{best}{reward}");
        worker.found = row;
        self.begin_next(worker)
    }

    /// Sends a step with the metrics found so far. The first message is not logged and takes none.
    fn pass(&self, io: &mut Steps<W>, worker: &mut EvalWorker<E, W>, step: Trained<W>) -> Result<(), StageError> {
        io.send(if step.step == 0 { step } else { Trained { evaluated: std::mem::take(&mut worker.found), ..step } })?;
        self.hold.iter().for_each(EvaluationHold::pass);
        Ok(())
    }
}

impl<E: TokenEngine, W: Send + Sync + 'static> Stage for Evaluator<E, W> {
    type In = Trained<W>;
    type Out = Trained<W>;

    fn attach(&mut self, context: &mut RunContext) {
        context.fill(&mut self.reports.metrics);
    }

    fn run(&mut self, io: &mut Io<Self::In, Self::Out>) -> Result<(), StageError> {
        let (found, engine) = (self.reports.open()?, self.generator.engine());
        let mut worker = EvalWorker { engine, held: None, run: None, next: None, found };
        let mut more = true;
        while io.signal() != Signal::Stop && (more || worker.run.is_some()) {
            let arrived = match &worker.run {
                None => Poll::Ready(io.recv()?),
                Some(_) if self.in_order || !more => Poll::Pending,
                Some(_) => io.try_recv(),
            };
            more &= !matches!(arrived, Poll::Ready(None));
            if let Poll::Ready(Some(trained)) = arrived
                && let Some(before) = self.take(&mut worker, trained)?
            {
                self.pass(io, &mut worker, before)?;
            }
            self.advance(&mut worker)?;
            if worker.run.is_none()
                && let Some(held) = worker.held.take()
            {
                self.pass(io, &mut worker, held)?;
            }
        }
        match worker.held.take() {
            Some(held) => self.pass(io, &mut worker, held),
            None => Ok(()),
        }
    }

    fn spec(&self) -> StageSpec {
        // No core is reserved for it: it computes now and then.
        StageSpec::default().knob("eval.threads or eval.max_num_seqs, or a rarer eval.every")
    }
}

/// Steps that an evaluating stage evaluates, and where it reports.
struct Reports {
    every: u64,
    last: Option<u64>,
    /// Step that the run was resumed at; 0 for a new run.
    resumed_at: u64,
    metrics: Option<Metrics>,
    /// Run folder; none: nothing is logged.
    folder: Option<PathBuf>,
    /// Log of rows, and the last step with a row of an earlier part of the run.
    rows: Option<(JsonlLogger, u64)>,
}

impl Reports {
    fn every(every: u64) -> Self {
        Reports { every: every.max(1), last: None, resumed_at: 0, metrics: None, folder: None, rows: None }
    }

    fn is_due(&self, step: u64) -> bool {
        step.is_multiple_of(self.every) || self.last == Some(step)
    }

    /// Opens the log of rows. Returns the newest row of an earlier part of the run if no row of
    /// `metrics.jsonl` has it.
    fn open(&mut self) -> Result<StepMetrics, ObserveError> {
        let Some(folder) = &self.folder else { return Ok(StepMetrics::new()) };
        let rows = JsonlLogger::at(folder.join("evaluations.jsonl"))?;
        let mut earlier: BTreeMap<u64, StepMetrics> = metrics_rows(rows.path())?.collect::<Result<_, _>>()?;
        if self.resumed_at > 0 {
            self.remove_interrupted(&folder.join("evaluations"), &earlier)?;
        }
        let (evaluated, newest) = earlier.pop_last().unwrap_or_default();
        let is_lost = self.resumed_at > 0 && newest_logged(folder) < Some(evaluated);
        self.rows = Some((rows, evaluated));
        Ok(if is_lost { newest } else { StepMetrics::new() })
    }

    /// Removes the completions of evaluations that have no row.
    fn remove_interrupted(&self, folder: &Path, rows: &BTreeMap<u64, StepMetrics>) -> Result<(), ObserveError> {
        let Ok(entries) = std::fs::read_dir(folder) else { return Ok(()) };
        for path in entries.flatten().map(|entry| entry.path()) {
            let step = path.file_stem().and_then(|name| checkpoint::parse_step(name.to_str()?));
            let Some(step) = step.filter(|step| !rows.contains_key(step)) else { continue };
            if step != self.resumed_at {
                tracing::warn!("Evaluation of step {step} was interrupted and its weights are gone; its completions are removed");
            }
            atomic_file::remove(&path).map_err(|source| ObserveError::Io { path, source })?;
        }
        Ok(())
    }

    /// Returns true if an earlier part of the run has evaluated `step`, as far as is known.
    fn has_evaluated(&self, step: u64) -> bool {
        self.rows.as_ref().is_none_or(|(_, evaluated)| *evaluated >= step)
    }

    fn answers(&self, step: u64) -> Result<Option<JsonLines<JudgedAnswer>>, ObserveError> {
        let file = |folder: &PathBuf| folder.join(format!("evaluations/step_{step:06}.jsonl"));
        self.folder.as_ref().map(|folder| JsonLines::create(file(folder))).transpose()
    }

    /// Completes an evaluation's row with its step and version, and logs it.
    fn row(&mut self, step: u64, version: Version, mut row: StepMetrics) -> Result<StepMetrics, ObserveError> {
        row.insert(Metric::EvalStep.key().to_owned(), step as f64);
        row.insert(Metric::EvalVersion.key().to_owned(), version as f64);
        self.rows.as_mut().map_or(Ok(()), |(rows, _)| rows.log(step, &row))?;
        Ok(row)
    }
}

/// Step of the newest evaluation whose metrics are in a row of `metrics.jsonl`.
fn newest_logged(folder: &Path) -> Option<u64> {
    let rows = metrics_rows(folder.join("metrics.jsonl")).ok()?;
    rows.flatten().filter_map(|(_, row)| row.get(Metric::EvalStep.key()).map(|step| *step as u64)).max()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn c2_a_resumed_run_logs_an_evaluation_whose_row_was_lost_and_keeps_nothing_of_an_interrupted_one() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
        write("metrics.jsonl", "{\"step\":1,\"eval_step\":0}\n{\"step\":105}\n");
        write("evaluations.jsonl", "{\"step\":0,\"eval_step\":0}\n{\"step\":50,\"eval_step\":50,\"eval_reward_mean\":0.5}\n");
        std::fs::create_dir(folder.path().join("evaluations")).unwrap();
        let answers = [0, 50, 100].map(|step| format!("evaluations/step_{step:06}.jsonl"));
        answers.iter().for_each(|name| write(name, ""));
        let mut reports = Reports { resumed_at: 105, folder: Some(folder.path().to_owned()), ..Reports::every(50) };
        let found = reports.open().unwrap();
        assert_eq!((found.get("eval_step"), found.get("eval_reward_mean")), (Some(&50.0), Some(&0.5)));
        assert_eq!(answers.map(|name| folder.path().join(name).exists()), [true, true, false]);
        assert!(reports.has_evaluated(50) && !reports.has_evaluated(105));
        // The row of step 53 is kept.
        write("metrics.jsonl", "{\"step\":1,\"eval_step\":0}\n{\"step\":53,\"eval_step\":50}\n{\"step\":105}\n");
        assert_eq!(reports.open().unwrap(), StepMetrics::new());
    }
}
