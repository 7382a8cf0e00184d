//! The stage that evaluates while a run trains, on a thread and an engine of its own.
//!
//! Trained steps pass through it. Of one that is due it keeps the published weights, which nobody writes to: the evaluation is pinned to that
//! version however far the training gets. Between two tokens of it, whatever was trained passes on; so training never waits for more than a
//! token. What the evaluation found travels with the step that passes next, or with the last one of the run, which waits for it.
//!
//! Two evaluations are never under way. Of those that become due meanwhile the newest is held next, and the others are left out, with a word.
//! A synchronous run leaves none out, and its steps pass when their own evaluation is done: the same numbers stand in the same rows each time
//! (law V3), while the trainer goes on as far as edges let it. So do the steps of a run whose evaluations ask the engines that it trains with, which
//! are given no other weights meanwhile ([`EvaluationHold`]).
//!
//! Memory: the weights of the version asked, of the one that is next, and a KV cache.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::evaluation::{Evaluation, Exam};
use crate::data::{Tokenizer, Version};
use crate::engine::{OnNewWeights, TokenEngine};
use crate::flow::{Io, RunContext, Signal, Stage, StageError, StageSpec, TryRecv};
use crate::observe::logs::{AnswerWriter, JsonlLogger, LogError, MetricsLogger, last_step};
use crate::observe::{Metric, Metrics, StepMetrics};
use crate::stages::generate::EngineSettings;
use crate::stages::sync::EvaluationHold;
use crate::stages::train::Trained;
use crate::train::Snapshot;

/// Evaluates published weights now and then.
pub struct Evaluator<E: TokenEngine, W = <E as TokenEngine>::Weights> {
    make: Box<dyn Fn(&EngineSettings) -> E + Send>,
    give: Give<E, W>,
    tokenizer: Arc<Tokenizer>,
    settings: EngineSettings,
    exam: Arc<Exam>,
    every: u64,
    last: Option<u64>,
    /// Steps that an earlier part of the run took.
    before: u64,
    in_order: bool,
    hold: Option<EvaluationHold>,
    metrics: Option<Metrics>,
    log: Option<AnswerLog>,
}

/// How published weights get to the engine.
type Give<E, W> = Box<dyn Fn(&mut E, Version, &W) + Send>;

/// Where evaluations of a run are written down: `evaluations.jsonl` with a row each, and `evaluations/step_000100.jsonl` with the answers.
pub struct AnswerLog {
    rows: JsonlLogger,
    folder: PathBuf,
    /// The last step that has a row of an earlier part of the run.
    evaluated: u64,
}

impl AnswerLog {
    /// In the folder of a run.
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
    /// Holds `exam` on weights of every `every`-th step, by the engine that `make` gives on this stage's thread.
    pub fn by(make: impl Fn(&EngineSettings) -> E + Send + 'static, tokenizer: &Arc<Tokenizer>, exam: Exam, every: u64) -> Self {
        Evaluator::with((make, E::set_weights), tokenizer, exam, every)
    }
}

impl<E: TokenEngine, W> Evaluator<E, W> {
    /// By the engine that the first of both makes and the second gives weights.
    pub(super) fn with(
        (make, give): (impl Fn(&EngineSettings) -> E + Send + 'static, impl Fn(&mut E, Version, &W) + Send + 'static),
        tokenizer: &Arc<Tokenizer>,
        exam: Exam,
        every: u64,
    ) -> Self {
        Evaluator {
            make: Box::new(make),
            give: Box::new(give),
            tokenizer: tokenizer.clone(),
            settings: EngineSettings { slots: 64, seed: 0, threads: 1, on_new_weights: OnNewWeights::default() },
            exam: Arc::new(exam),
            every: every.max(1),
            last: None,
            before: 0,
            in_order: false,
            hold: None,
            metrics: None,
            log: None,
        }
    }

    /// Answers that are generated at the same time; 64 unless told otherwise.
    pub fn slots(mut self, slots: usize) -> Self {
        self.settings.slots = slots.max(1);
        self
    }

    /// Cores of its engine.
    pub fn threads(mut self, threads: usize) -> Self {
        self.settings.threads = threads.max(1);
        self
    }

    /// Keys its random numbers.
    pub fn seed(mut self, seed: u64) -> Self {
        self.settings.seed = seed;
        self
    }

    /// The weights of this step are evaluated too: the run's last.
    pub fn last(self, step: u64) -> Self {
        Evaluator { last: Some(step), ..self }
    }

    /// The run goes on after this step.
    pub fn after(self, step: u64) -> Self {
        Evaluator { before: step, ..self }
    }

    /// Every step passes when its own evaluation is done.
    pub fn in_order(self, in_order: bool) -> Self {
        Evaluator { in_order: in_order || self.hold.is_some(), ..self }
    }

    /// The engine serves a version for as long as its evaluation lasts, and every step passes when its own is done.
    pub(super) fn hold(self, hold: &EvaluationHold) -> Self {
        Evaluator { hold: Some(hold.clone()), in_order: true, ..self }
    }

    /// Shows what it finds there.
    pub fn metrics(self, metrics: &Metrics) -> Self {
        Evaluator { metrics: Some(metrics.clone()), ..self }
    }

    /// Writes down what it finds.
    pub fn log(self, log: Option<AnswerLog>) -> Self {
        Evaluator { log, ..self }
    }

    fn is_due(&self, step: u64) -> bool {
        step.is_multiple_of(self.every) || self.last == Some(step)
    }
}

/// What the stage is in the middle of.
struct Desk<E, W> {
    engine: E,
    held: Option<Trained<W>>,
    sitting: Option<Sitting>,
    next: Option<(u64, Snapshot<W>)>,
    /// What the newest evaluation came to, until a step takes it along.
    found: StepMetrics,
}

/// An evaluation under way.
struct Sitting {
    step: u64,
    version: Version,
    evaluation: Evaluation,
    answers: Option<AnswerWriter>,
}

impl<E: TokenEngine, W: Send + Sync + 'static> Evaluator<E, W> {
    /// Takes a step in, and gives the one before free.
    fn take(&mut self, desk: &mut Desk<E, W>, trained: Trained<W>) -> Result<Option<Trained<W>>, StageError> {
        // The first message brings the weights that the run begins or goes on with. The latter are evaluated already, unless the run was
        // killed while an evaluation ran alongside its steps.
        let first = trained.step == 0;
        let step = if first { self.before } else { trained.step };
        let known = first && self.before > 0 && self.log.as_ref().is_none_or(|log| log.evaluated >= step);
        if let Some(publish) = trained.publish.as_ref().filter(|_| self.is_due(step) && !known)
            && let Some((left_out, _)) = desk.next.replace((step, publish.clone()))
        {
            tracing::warn!("Evaluation of step {left_out} left out: the one before is still under way; raise eval.every");
        }
        let before = desk.held.replace(trained);
        self.begin_next(desk)?;
        Ok(before)
    }

    fn begin_next(&self, desk: &mut Desk<E, W>) -> Result<(), StageError> {
        if desk.sitting.is_none()
            && let Some((step, Snapshot { version, weights, .. })) = desk.next.take()
        {
            (self.give)(&mut desk.engine, version, &weights);
            let answers = self.log.as_ref().map(|log| log.answers(step)).transpose()?;
            let evaluation = Evaluation::begin(&self.exam, &self.tokenizer, version, Vec::new());
            desk.sitting = Some(Sitting { step, version, evaluation, answers });
        }
        Ok(())
    }

    /// One token of every answer under way; at the end of an evaluation, what it comes to.
    fn advance(&mut self, desk: &mut Desk<E, W>) -> Result<(), StageError> {
        let Some(Sitting { evaluation, answers, .. }) = &mut desk.sitting else { return Ok(()) };
        for judged in evaluation.advance(&mut desk.engine)? {
            answers.as_mut().map_or(Ok(()), |answers| answers.write(&judged))?;
        }
        let Some(Sitting { step, version, evaluation, answers }) = desk.sitting.take_if(|sitting| sitting.evaluation.is_done())
        else {
            return Ok(());
        };
        answers.map_or(Ok(()), |mut answers| answers.finish())?;
        let summary = evaluation.summary();
        desk.found = summary.row();
        desk.found.insert(Metric::EvalStep.key().to_owned(), step as f64);
        desk.found.insert(Metric::EvalVersion.key().to_owned(), version as f64);
        if let Some(metrics) = &self.metrics {
            summary.publish(metrics);
        }
        if let Some(log) = &mut self.log {
            log.row(step, &desk.found)?;
        }
        let shown = |what: &str, value: Option<f64>| value.map_or(String::new(), |value| format!(" {what}={value:.4}"));
        let (greedy, sampled) = (shown("greedy", summary.greedy_accuracy), shown("sampled", summary.accuracy));
        let best = summary.pass_at.last_key_value().filter(|(k, _)| **k > 1);
        let best = best.map_or(String::new(), |(k, value)| format!(" pass@{k}={value:.4}"));
        tracing::info!("Evaluated step {step}:{greedy}{sampled}{best}{}", shown("reward", summary.reward));
        self.begin_next(desk)
    }
}

/// What was found by now goes with it, unless it is the first message, which nobody writes down.
fn with<W>(trained: Trained<W>, found: &mut StepMetrics) -> Trained<W> {
    if trained.step == 0 { trained } else { Trained { evaluated: std::mem::take(found), ..trained } }
}

impl<E: TokenEngine, W: Send + Sync + 'static> Evaluator<E, W> {
    /// A step goes on, with what was found by now.
    fn pass(&self, io: &mut Io<Trained<W>, Trained<W>>, desk: &mut Desk<E, W>, step: Trained<W>) -> Result<(), StageError> {
        io.send(with(step, &mut desk.found))?;
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
        let mut desk = Desk { engine, held: None, sitting: None, next: None, found: StepMetrics::new() };
        let mut more = true;
        while io.signal() != Signal::Stop && (more || desk.sitting.is_some()) {
            let arrived = match &desk.sitting {
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
                && let Some(before) = self.take(&mut desk, trained)?
            {
                self.pass(io, &mut desk, before)?;
            }
            self.advance(&mut desk)?;
            if desk.sitting.is_none()
                && let Some(held) = desk.held.take()
            {
                self.pass(io, &mut desk, held)?;
            }
        }
        match desk.held.take() {
            Some(held) => self.pass(io, &mut desk, held),
            None => Ok(()),
        }
    }

    fn spec(&self) -> StageSpec {
        // It computes now and then, and no core is set aside for it.
        StageSpec::thread().knob("threads or slots, or a rarer eval.every")
    }
}
