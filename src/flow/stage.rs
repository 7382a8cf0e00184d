//! What a user implements: [`Source`], [`Stage`], [`AsyncStage`], [`Sink`], and what they say of themselves in a [`StageSpec`].

use std::error::Error;
use std::fmt;

use super::{AsyncIo, Io, Message, RunContext, WeightsId, Window};

/// Makes items. Runs on a named OS thread.
pub trait Source: Send + 'static {
    /// What it makes.
    type Out: Message;

    /// The next item, or `None` when there is none left (*end*, law F5). Between two calls the runner looks for drain and stop, so
    /// return from time to time. An error ends the run (law F3).
    fn next(&mut self) -> Result<Option<Self::Out>, StageError>;

    /// Takes what the stages of the flow share. Called once, when the source is put on the graph, before `spec`.
    fn attach(&mut self, _context: &mut RunContext) {}

    /// How it wants to be run. A source has one worker.
    fn spec(&self) -> StageSpec {
        StageSpec::thread()
    }
}

/// Turns items into items on a named OS thread: for what computes, and for what must not leave its thread.
pub trait Stage: Send + 'static {
    /// What it takes.
    type In: Message;
    /// What it makes.
    type Out: Message;

    /// Receives until [`Io::recv`] gives `None`, then returns. An error ends the run (law F3), but [`StageError::closed`] doesn't: `?`
    /// on every send. Returning before the input ended is fine too: it drains the run.
    fn run(&mut self, io: &mut Io<Self::In, Self::Out>) -> Result<(), StageError>;

    /// Takes what the stages of the flow share. Called once, when the stage is put on the graph, before `spec` and `replica`.
    fn attach(&mut self, _context: &mut RunContext) {}

    /// How it wants to be run.
    fn spec(&self) -> StageSpec {
        StageSpec::thread()
    }

    /// Another worker like this one. Only a stage without state between items has any; without, [`StageSpec::workers`] must be 1.
    fn replica(&self) -> Option<Self>
    where
        Self: Sized,
    {
        None
    }
}

/// Turns items into items on a tokio task: for what waits, such as HTTP. It must neither compute for long nor block.
pub trait AsyncStage: Send + 'static {
    /// What it takes.
    type In: Message;
    /// What it makes.
    type Out: Message;

    /// As [`Stage::run`]; write it as an `async fn`.
    fn run(&mut self, io: &mut AsyncIo<Self::In, Self::Out>) -> impl Future<Output = Result<(), StageError>> + Send;

    /// As [`Stage::attach`].
    fn attach(&mut self, _context: &mut RunContext) {}

    /// How it wants to be run.
    fn spec(&self) -> StageSpec {
        StageSpec::task()
    }

    /// As [`Stage::replica`].
    fn replica(&self) -> Option<Self>
    where
        Self: Sized,
    {
        None
    }
}

/// Takes items out of the graph. Runs on a named OS thread. Closures `FnMut(T)` and `FnMut(T) -> Result<(), StageError>` are sinks too.
pub trait Sink: Send + 'static {
    /// What it takes.
    type In: Message;

    /// Takes one item. An error ends the run (law F3).
    fn accept(&mut self, item: Self::In) -> Result<(), StageError>;

    /// Takes what the stages of the flow share. Called once, when the sink is put on the graph, before `spec`.
    fn attach(&mut self, _context: &mut RunContext) {}

    /// Called once after the last item, also when the run was drained or stopped or another stage failed: the place to flush.
    fn finish(&mut self) -> Result<(), StageError> {
        Ok(())
    }

    /// How it wants to be run. A sink has one worker.
    fn spec(&self) -> StageSpec {
        StageSpec::thread()
    }
}

/// How a stage wants to be run.
#[derive(Clone, Debug)]
pub struct StageSpec {
    pub(crate) workers: usize,
    pub(crate) threads: usize,
    pub(crate) ordered: bool,
    pub(crate) publishes: Vec<WeightsId>,
    pub(crate) subscribes: Vec<WeightsId>,
    pub(crate) window: Option<Window>,
    pub(crate) raises: Option<Window>,
    pub(crate) knob: Option<String>,
}

impl StageSpec {
    /// One worker on an OS thread of its own that computes next to nothing.
    pub fn thread() -> Self {
        StageSpec {
            workers: 1,
            threads: 0,
            ordered: false,
            publishes: Vec::new(),
            subscribes: Vec::new(),
            window: None,
            raises: None,
            knob: None,
        }
    }

    /// One worker as a tokio task. The same defaults; which of the two it is, the implemented trait says.
    pub fn task() -> Self {
        StageSpec::thread()
    }

    /// `n` workers that share the input. Takes a stage with replicas.
    pub fn workers(self, n: usize) -> Self {
        StageSpec { workers: n, ..self }
    }

    /// Several workers' output in the order of their input (law D6). A worker that is ahead waits, blocked, holding one item.
    pub fn ordered(self) -> Self {
        StageSpec { ordered: true, ..self }
    }

    /// Cores that each worker computes with, for the thread budget. 0, the default: not worth counting.
    pub fn threads(self, n: usize) -> Self {
        StageSpec { threads: n, ..self }
    }

    /// It publishes weights on this edge.
    pub fn publishes(mut self, edge: WeightsId) -> Self {
        self.publishes.push(edge);
        self
    }

    /// It reads weights from this edge.
    pub fn subscribes(mut self, edge: WeightsId) -> Self {
        self.subscribes.push(edge);
        self
    }

    /// Sources only: each item waits for admission by `window`.
    pub fn window(self, window: Window) -> Self {
        StageSpec { window: Some(window), ..self }
    }

    /// The stage raises `window` while it runs. A graph in which a source waits for a window that only stages raise, and none does, is
    /// rejected ([`Window::raised_by_stages`]).
    pub fn raises(self, window: Window) -> Self {
        StageSpec { raises: Some(window), ..self }
    }

    /// What to give this stage more of when it is the bottleneck, as in "threads or slots". The report says it.
    pub fn knob(self, knob: impl Into<String>) -> Self {
        StageSpec { knob: Some(knob.into()), ..self }
    }
}

/// Why a stage ended before its time: it failed, or whom it worked for is gone.
///
/// Any `std` error turns into a failure with `?`. (So this is not a `std` error itself, which would forbid that.)
pub struct StageError(Kind);

enum Kind {
    Closed,
    Failed(Box<dyn Error + Send + Sync>),
}

impl StageError {
    /// A failure, from an error or a message.
    pub fn new(cause: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        StageError(Kind::Failed(cause.into()))
    }

    /// What a send gives when downstream is gone: the runner takes it for a cancellation, not for a failure.
    pub fn closed() -> Self {
        StageError(Kind::Closed)
    }

    /// Whether it is a cancellation.
    pub fn is_closed(&self) -> bool {
        matches!(self.0, Kind::Closed)
    }

    /// Whether it is a failure by this error.
    pub fn is<E: Error + 'static>(&self) -> bool {
        matches!(&self.0, Kind::Failed(cause) if cause.is::<E>())
    }

    /// The cause of a failure; `None` for a cancellation.
    pub(crate) fn into_cause(self) -> Option<Box<dyn Error + Send + Sync>> {
        match self.0 {
            Kind::Closed => None,
            Kind::Failed(cause) => Some(cause),
        }
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
            Kind::Closed => f.write_str("downstream is gone"),
            Kind::Failed(cause) => cause.fmt(f),
        }
    }
}

impl fmt::Debug for StageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
