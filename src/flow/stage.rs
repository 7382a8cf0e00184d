//! Traits that a user implements: [`Source`], [`Stage`], [`AsyncStage`] and [`Sink`], each with a
//! [`StageSpec`].

use std::error::Error;
use std::fmt;

use serde::{Serialize, Serializer};

use super::weights::WeightsId;
use super::{AsyncIo, Io, Message, RunContext, WeightsRx, WeightsTx, Window};

/// Source of items, on a named OS thread.
pub trait Source: Send + 'static {
    /// Type of its output.
    type Out: Message;

    /// Returns the next item, or `None` at the *end* (law F5). An error ends the run (law F3). The
    /// runner checks for drain and stop between two calls, so a call must not wait for ever.
    fn next(&mut self) -> Result<Option<Self::Out>, StageError>;

    /// Same as [`Stage::attach`].
    fn attach(&mut self, _context: &mut RunContext) {}

    /// Specification. A source has one worker.
    fn spec(&self) -> StageSpec {
        StageSpec::default()
    }
}

/// Stage on a named OS thread: for computation, and for values that must not leave their thread.
pub trait Stage: Send + 'static {
    /// Type of its input.
    type In: Message;
    /// Type of its output.
    type Out: Message;

    /// Receives until [`Io::recv`] returns `None`, then returns. An error ends the run (law F3),
    /// except [`StageError::closed`]: use `?` on every send. A return before the end of the input
    /// drains the run.
    fn run(&mut self, io: &mut Io<Self::In, Self::Out>) -> Result<(), StageError>;

    /// Takes what the stages of the flow share. Called once, when the stage is put on the graph,
    /// before `spec` and `replica`. A stage that wraps another one forwards the call.
    fn attach(&mut self, _context: &mut RunContext) {}

    /// Specification.
    fn spec(&self) -> StageSpec {
        StageSpec::default()
    }

    /// Returns a further worker. Only a stage without state between items has one; otherwise
    /// [`StageSpec::workers`] must be 1.
    fn replica(&self) -> Option<Self>
    where
        Self: Sized,
    {
        None
    }
}

/// Stage on a tokio task: for work that waits, such as HTTP. It must neither compute for long nor
/// block.
pub trait AsyncStage: Send + 'static {
    /// Type of its input.
    type In: Message;
    /// Type of its output.
    type Out: Message;

    /// Same as [`Stage::run`]; write it as an `async fn`.
    fn run(&mut self, io: &mut AsyncIo<Self::In, Self::Out>) -> impl Future<Output = Result<(), StageError>> + Send;

    /// Same as [`Stage::attach`].
    fn attach(&mut self, _context: &mut RunContext) {}

    /// Specification.
    fn spec(&self) -> StageSpec {
        StageSpec::default()
    }

    /// Same as [`Stage::replica`].
    fn replica(&self) -> Option<Self>
    where
        Self: Sized,
    {
        None
    }
}

/// Sink of items, on a named OS thread. Closures `FnMut(T)` and `FnMut(T) -> Result<(),
/// StageError>` are sinks too.
pub trait Sink: Send + 'static {
    /// Type of its input.
    type In: Message;

    /// Takes one item. An error ends the run (law F3).
    fn accept(&mut self, item: Self::In) -> Result<(), StageError>;

    /// Same as [`Stage::attach`].
    fn attach(&mut self, _context: &mut RunContext) {}

    /// Flushes. Called once after the last item, also when the run was drained or stopped, or
    /// another stage failed.
    fn finish(&mut self) -> Result<(), StageError> {
        Ok(())
    }

    /// Specification. A sink has one worker.
    fn spec(&self) -> StageSpec {
        StageSpec::default()
    }
}

/// Specification of a stage: workers, threads and the edges that it uses.
#[derive(Clone, Debug, Serialize)]
pub struct StageSpec {
    pub(crate) workers: usize,
    pub(crate) ordered: bool,
    pub(crate) threads: usize,
    #[serde(serialize_with = "is_some")]
    pub(crate) window: Option<Window>,
    pub(crate) knob: Option<String>,
    #[serde(skip)]
    pub(crate) advice: Option<String>,
    #[serde(skip)]
    pub(crate) raises: Option<Window>,
    #[serde(skip)]
    pub(crate) publishes: Vec<WeightsId>,
    #[serde(skip)]
    pub(crate) subscribes: Vec<WeightsId>,
}

fn is_some<S: Serializer>(window: &Option<Window>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_bool(window.is_some())
}

impl Default for StageSpec {
    /// Specification of one worker that computes next to nothing.
    fn default() -> Self {
        StageSpec {
            workers: 1,
            ordered: false,
            threads: 0,
            window: None,
            knob: None,
            advice: None,
            raises: None,
            publishes: Vec::new(),
            subscribes: Vec::new(),
        }
    }
}

impl StageSpec {
    /// Number of workers that share the input. More than 1 require a stage with replicas. Default:
    /// 1.
    pub fn workers(self, n: usize) -> Self {
        StageSpec { workers: n, ..self }
    }

    /// Keeps the order of the input with several workers (law D6). A worker that is ahead waits,
    /// blocked, with one item.
    pub fn ordered(self) -> Self {
        StageSpec { ordered: true, ..self }
    }

    /// Cores that each worker computes with, for the thread budget. Default: 0, which is not
    /// counted.
    pub fn threads(self, n: usize) -> Self {
        StageSpec { threads: n, ..self }
    }

    /// Declares that the stage publishes weights at this end of an edge.
    pub fn publishes<W>(mut self, end: &WeightsTx<W>) -> Self {
        self.publishes.push(end.id().clone());
        self
    }

    /// Declares that the stage reads weights at this end of an edge.
    pub fn subscribes<W>(mut self, end: &WeightsRx<W>) -> Self {
        self.subscribes.push(end.id().clone());
        self
    }

    /// Window that admits each item. Only for sources.
    pub fn window(self, window: Window) -> Self {
        StageSpec { window: Some(window), ..self }
    }

    /// Declares that the stage raises `window`. A graph is rejected if a source waits for a window
    /// that only stages raise ([`Window::raised_by_stages`]), and none does.
    pub fn raises(self, window: Window) -> Self {
        StageSpec { raises: Some(window), ..self }
    }

    /// Setting to raise when this stage is the bottleneck, such as "threads or slots". The report
    /// names it.
    pub fn knob(self, knob: impl Into<String>) -> Self {
        StageSpec { knob: Some(knob.into()), ..self }
    }

    /// Change that helps when this stage is the bottleneck and no setting is to be raised, such as
    /// "publish less often". The report names it instead of [`StageSpec::knob`].
    pub fn advice(self, advice: impl Into<String>) -> Self {
        StageSpec { advice: Some(advice.into()), ..self }
    }
}

/// Early end of a stage: a failure, or a cancellation because its consumer is gone.
///
/// Any `std` error converts to a failure with `?`. So this type is no `std` error itself.
pub struct StageError(Option<Box<dyn Error + Send + Sync>>);

impl StageError {
    /// Returns a failure, from an error or a message.
    pub fn new(cause: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        StageError(Some(cause.into()))
    }

    /// Returns a cancellation, as a send does when downstream is gone. It is not a failure of the
    /// run.
    pub fn closed() -> Self {
        StageError(None)
    }

    /// Returns true for a cancellation.
    pub fn is_closed(&self) -> bool {
        self.0.is_none()
    }

    /// Returns true for a failure by an error of type `E`.
    pub fn is<E: Error + 'static>(&self) -> bool {
        self.0.as_ref().is_some_and(|cause| cause.is::<E>())
    }

    /// Returns the cause of a failure; `None` for a cancellation.
    pub(crate) fn into_cause(self) -> Option<Box<dyn Error + Send + Sync>> {
        self.0
    }
}

impl<E: Error + Send + Sync + 'static> From<E> for StageError {
    fn from(error: E) -> Self {
        StageError::new(error)
    }
}

impl fmt::Display for StageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            None => f.write_str("downstream is gone"),
            Some(cause) => cause.fmt(f),
        }
    }
}

impl fmt::Debug for StageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
