//! Stage that evaluates published weights during training, on a separate thread and engine.
//!
//! Trained steps pass through. The stage keeps the published weights of a step that is due, so that
//! its evaluation is pinned to one version. Between two tokens it passes steps on: training waits for
//! one token at most. The metrics travel with the next step, or with the run's last step, which
//! waits for them.
//!
//! At most one evaluation runs at a time. Of those that become due meanwhile the newest runs next,
//! and the others are skipped with a warning.
//!
//! In order ([`Evaluator::in_order`]) no evaluation is skipped, and each step waits for its own: a
//! synchronous run logs the same metrics in the same rows each time (law V3). Evaluations on the
//! engines of the run are always in order, and the engines get no other weights meanwhile
//! ([`EvaluationHold`]).
//!
//! Memory: the weights of the evaluated version and of the next one, and a KV cache.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::data::{Tokenizer, Version};
use crate::engine::TokenEngine;
use crate::flow::{Io, RunContext, Signal, Stage, StageError, StageSpec, TryRecv};
use crate::observe::logs::{AnswerWriter, JsonlLogger, LogError, MetricsLogger, last_step};
use crate::observe::{Metric, Metrics, StepMetrics};
use crate::rollout::{EvalSpec, Evaluation};
use crate::stages::generate::EngineSettings;
use crate::stages::sync::EvaluationHold;
use crate::stages::train::Trained;
use crate::train::Snapshot;

/// Stage that evaluates the weights of every n-th step.
pub struct Evaluator<E: TokenEngine, W = <E as TokenEngine>::Weights> {
    make: Box<dyn Fn(&EngineSettings) -> E + Send>,
    set_weights: SetWeights<E, W>,
    tokenizer: Arc<Tokenizer>,
    settings: EngineSettings,
    spec: Arc<EvalSpec>,
    every: u64,
    last: Option<u64>,
    /// Step that the run was resumed at; 0 for a new run.
    resumed_at: u64,
    in_order: bool,
    hold: Option<EvaluationHold>,
    metrics: Option<Metrics>,
    log: Option<AnswerLog>,
}

/// Gives published weights to the engine.
type SetWeights<E, W> = Box<dyn Fn(&mut E, Version, &W) + Send>;

/// Evaluations in a run folder: rows in `evaluations.jsonl`, and the answers of each evaluation in
/// `evaluations/step_000100.jsonl`.
pub struct AnswerLog {
    rows: JsonlLogger,
    folder: PathBuf,
    /// The last step with a row of an earlier part of the run.
    evaluated: u64,
}

impl AnswerLog {
    /// Log in this run folder.
    pub fn new(run: impl AsRef<Path>) -> Result<Self, LogError> {
        let rows = JsonlLogger::at(run.as_ref().join("evaluations.jsonl"))?;
        let evaluated = last_step(rows.path())?;
        Ok(AnswerLog { rows, folder: run.as_ref().join("evaluations"), evaluated })
    }

    pub(super) fn row(&mut self, step: u64, row: &StepMetrics) -> Result<(), LogError> {
        self.rows.log(step, row)
    }

    fn answers(&self, step: u64) -> Result<AnswerWriter, LogError> {
        AnswerWriter::create(self.folder.join(format!("step_{step:06}.jsonl")), &[])
    }
}

impl<E: TokenEngine> Evaluator<E> {
    /// Evaluates weights of every `every`-th step, on the engine that `make` returns.
    pub fn by(
        make: impl Fn(&EngineSettings) -> E + Send + 'static,
        tokenizer: &Arc<Tokenizer>,
        spec: EvalSpec,
        every: u64,
    ) -> Self {
        Evaluator::with(Box::new(make), Box::new(E::set_weights), tokenizer, spec, every)
    }
}

impl<E: TokenEngine, W> Evaluator<E, W> {
    pub(super) fn with(
        make: Box<dyn Fn(&EngineSettings) -> E + Send>,
        set_weights: SetWeights<E, W>,
        tokenizer: &Arc<Tokenizer>,
        spec: EvalSpec,
        every: u64,
    ) -> Self {
        Evaluator {
            make,
            set_weights,
            tokenizer: tokenizer.clone(),
            settings: EngineSettings::default(),
            spec: Arc::new(spec),
            every: every.max(1),
            last: None,
            resumed_at: 0,
            in_order: false,
            hold: None,
            metrics: None,
            log: None,
        }
    }

    /// Number of completions in flight, at least 1; 64 by default.
    pub fn slots(mut self, slots: usize) -> Self {
        self.settings.slots = slots.max(1);
        self
    }

    /// Number of threads of the engine, at least 1; 1 by default.
    pub fn threads(mut self, threads: usize) -> Self {
        self.settings.threads = threads.max(1);
        self
    }

    /// Seed of the sampling; 0 by default.
    pub fn seed(mut self, seed: u64) -> Self {
        self.settings.seed = seed;
        self
    }

    /// Last step of the run, whose weights are evaluated too.
    pub fn last(self, step: u64) -> Self {
        Evaluator { last: Some(step), ..self }
    }

    /// Step that the run is resumed at.
    pub fn after(self, step: u64) -> Self {
        Evaluator { resumed_at: step, ..self }
    }

    /// If true, each step passes after its own evaluation. Default: false.
    pub fn in_order(self, in_order: bool) -> Self {
        Evaluator { in_order: in_order || self.hold.is_some(), ..self }
    }

    /// Evaluates in order, and holds the engine at a version during its evaluation.
    pub(super) fn hold(self, hold: &EvaluationHold) -> Self {
        Evaluator { hold: Some(hold.clone()), in_order: true, ..self }
    }

    /// Metrics to report to, instead of the flow's.
    pub fn metrics(self, metrics: &Metrics) -> Self {
        Evaluator { metrics: Some(metrics.clone()), ..self }
    }

    /// Writes evaluations to this log.
    pub fn log(self, log: Option<AnswerLog>) -> Self {
        Evaluator { log, ..self }
    }

    fn is_due(&self, step: u64) -> bool {
        step.is_multiple_of(self.every) || self.last == Some(step)
    }
}

/// Engine of the stage, and the evaluations in progress and due.
struct EvalWorker<E: TokenEngine, W> {
    engine: E,
    held: Option<Trained<W>>,
    run: Option<EvalRun<E>>,
    next: Option<(u64, Snapshot<W>)>,
    /// Metrics of the newest evaluation, until a step takes them.
    found: StepMetrics,
}

/// Evaluation of one step's weights.
struct EvalRun<E: TokenEngine> {
    step: u64,
    version: Version,
    evaluation: Evaluation<E>,
    answers: Option<AnswerWriter>,
}

impl<E: TokenEngine, W: Send + Sync + 'static> Evaluator<E, W> {
    /// Takes a step and returns the one before.
    fn take(&mut self, worker: &mut EvalWorker<E, W>, trained: Trained<W>) -> Result<Option<Trained<W>>, StageError> {
        // The first message carries the initial weights. After a resume they are evaluated already,
        // unless the run was killed during their evaluation.
        let first = trained.step == 0;
        let step = if first { self.resumed_at } else { trained.step };
        let known = first && self.resumed_at > 0 && self.log.as_ref().is_none_or(|log| log.evaluated >= step);
        if let Some(publish) = trained.publish.as_ref().filter(|_| self.is_due(step) && !known)
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
            let answers = self.log.as_ref().map(|log| log.answers(step)).transpose()?;
            let evaluation = Evaluation::begin(&self.spec, &self.tokenizer, &worker.engine, version, Vec::new());
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
        answers.map_or(Ok(()), |mut answers| answers.finish())?;
        let summary = evaluation.summary();
        worker.found = summary.row();
        worker.found.insert(Metric::EvalStep.key().to_owned(), step as f64);
        worker.found.insert(Metric::EvalVersion.key().to_owned(), version as f64);
        if let Some(metrics) = &self.metrics {
            summary.publish(metrics);
        }
        if let Some(log) = &mut self.log {
            log.row(step, &worker.found)?;
        }
        let shown = |name: &str, value: Option<f64>| value.map_or(String::new(), |value| format!(" {name}={value:.4}"));
        let (greedy, sampled) = (shown("greedy", summary.greedy_accuracy), shown("sampled", summary.accuracy));
        let best = summary.pass_at.last_key_value().filter(|(k, _)| **k > 1);
        let best = best.map_or(String::new(), |(k, value)| format!(" pass@{k}={value:.4}"));
        tracing::info!("Evaluated step {step}:{greedy}{sampled}{best}{}", shown("reward", summary.reward));
        self.begin_next(worker)
    }

    /// Sends a step with the metrics found so far. The first message is not logged and takes none.
    fn pass(
        &self,
        io: &mut Io<Trained<W>, Trained<W>>,
        worker: &mut EvalWorker<E, W>,
        step: Trained<W>,
    ) -> Result<(), StageError> {
        let first = step.step == 0;
        io.send(if first { step } else { Trained { evaluated: std::mem::take(&mut worker.found), ..step } })?;
        self.hold.iter().for_each(EvaluationHold::pass);
        Ok(())
    }
}

impl<E: TokenEngine, W: Send + Sync + 'static> Stage for Evaluator<E, W> {
    type In = Trained<W>;
    type Out = Trained<W>;

    fn attach(&mut self, context: &mut RunContext) {
        context.fill(&mut self.metrics);
    }

    fn run(&mut self, io: &mut Io<Self::In, Self::Out>) -> Result<(), StageError> {
        let engine = (self.make)(&self.settings);
        let mut worker = EvalWorker { engine, held: None, run: None, next: None, found: StepMetrics::new() };
        let mut more = true;
        while io.signal() != Signal::Stop && (more || worker.run.is_some()) {
            let arrived = match &worker.run {
                None => {
                    let arrived = io.recv()?;
                    more = arrived.is_some();
                    arrived
                }
                Some(_) if self.in_order || !more => None,
                Some(_) => match io.try_recv()? {
                    TryRecv::Item(trained) => Some(trained),
                    TryRecv::Empty => None,
                    TryRecv::Closed => {
                        more = false;
                        None
                    }
                },
            };
            if let Some(trained) = arrived
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
        StageSpec::thread().knob("eval.threads or eval.max_num_seqs, or a rarer eval.every")
    }
}
