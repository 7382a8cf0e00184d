//! Jobs of each kind of node: sources, stages, sinks, tees and merges.

use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use futures_util::FutureExt;

use super::clock::State;
use super::control::Signal;
use super::edge::{Rx, Tx};
use super::io::{AsyncIo, Inlet, Io, Outlet, Seat};
use super::launch::{Job, Post};
use super::order::Turnstile;
use super::{AsyncStage, Message, RunContext, Sink, Source, Stage, StageError, StageSpec, Until};

/// Stage that is ready to be wired.
pub struct StageNode<In, Out> {
    pub(crate) spec: StageSpec,
    pub(crate) task: bool,
    pub(crate) replicable: bool,
    pub(crate) jobs: Jobs<In, Out>,
}

/// Makes a stage's workers from the ends of its edges.
type Jobs<In, Out> = Box<dyn FnOnce(Rx<In>, Tx<Out>) -> Vec<Job> + Send>;

type Order = Option<Arc<Turnstile>>;

impl<In: Message, Out: Message> StageNode<In, Out> {
    fn new<S: Send + 'static>(
        stage: S,
        spec: StageSpec,
        task: bool,
        replica: fn(&S) -> Option<S>,
        job: fn(S, Rx<In>, Tx<Out>, Order) -> Job,
    ) -> Self {
        let (workers, replicable) = (spec.workers, replica(&stage).is_some());
        let order: Order = (spec.ordered && workers > 1).then(Arc::default);
        let jobs = Box::new(move |rx: Rx<In>, tx: Tx<Out>| {
            let copies: Vec<S> = (1..workers).filter_map(|_| replica(&stage)).collect();
            copies.into_iter().chain([stage]).map(|stage| job(stage, rx.clone(), tx.clone(), order.clone())).collect()
        });
        StageNode { spec, task, replicable, jobs }
    }
}

/// Marks a stage that runs on an OS thread.
pub struct OnThread;
/// Marks a stage that runs on tokio.
pub struct OnTokio;
/// Marks a closure.
pub struct ByClosure;

/// Argument of [`Flow::stage`](super::Flow::stage): every [`Stage`] and every [`AsyncStage`].
/// Implement those instead; `Place` distinguishes the two.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a stage that takes `{In}`",
    label = "wired to a port of `{In}`",
    note = "implement `Stage` or `AsyncStage` with `type In = {In}`, or wire it to a port of what it takes"
)]
pub trait IntoStage<In, Out, Place> {
    /// Prepares the node for wiring.
    #[doc(hidden)]
    fn into_node(self, context: &mut RunContext) -> StageNode<In, Out>;
}

impl<S: Stage> IntoStage<S::In, S::Out, OnThread> for S {
    fn into_node(mut self, context: &mut RunContext) -> StageNode<S::In, S::Out> {
        self.attach(context);
        let spec = self.spec();
        StageNode::new(self, spec, false, S::replica, |mut stage, rx, tx, order| {
            Job::thread(move |post| {
                let mut io = Io(AsyncIo::new(rx, tx, order, post.seat.clone()));
                let result = catch_unwind(AssertUnwindSafe(|| stage.run(&mut io)));
                post.settle(result, io.0.inlet.ended);
            })
        })
    }
}

impl<S: AsyncStage> IntoStage<S::In, S::Out, OnTokio> for S {
    fn into_node(mut self, context: &mut RunContext) -> StageNode<S::In, S::Out> {
        self.attach(context);
        let spec = self.spec();
        StageNode::new(self, spec, true, S::replica, |mut stage, rx, tx, order| {
            Job::task(async move |post: Post| {
                let mut io = AsyncIo::new(rx, tx, order, post.seat.clone());
                let result = AssertUnwindSafe(stage.run(&mut io)).catch_unwind().await;
                post.settle(result, io.inlet.ended);
            })
        })
    }
}

/// Stage of any type from `In` to `Out`, for choices at run time.
pub struct BoxedStage<In, Out>(Box<IntoNode<In, Out>>);

type IntoNode<In, Out> = dyn FnOnce(&mut RunContext) -> StageNode<In, Out> + Send;

impl<In, Out> BoxedStage<In, Out> {
    /// Boxes any [`Stage`] or [`AsyncStage`].
    pub fn new<Place>(stage: impl IntoStage<In, Out, Place> + Send + 'static) -> Self {
        BoxedStage(Box::new(move |context| stage.into_node(context)))
    }
}

/// Marks a [`BoxedStage`].
pub struct Boxed;

impl<In: Message, Out: Message> IntoStage<In, Out, Boxed> for BoxedStage<In, Out> {
    fn into_node(self, context: &mut RunContext) -> StageNode<In, Out> {
        (self.0)(context)
    }
}

pub(crate) fn source<S: Source>(mut source: S, tx: Tx<S::Out>) -> Job {
    Job::thread(move |post| {
        let window = source.spec().window;
        let outlet = Outlet::new(tx, post.seat.clone());
        let Seat { meter, control, .. } = &post.seat;
        let result = catch_unwind(AssertUnwindSafe(|| {
            while control.signal() == Signal::Run {
                if let Some(window) = window.as_ref().filter(|window| !window.try_admit())
                    && !meter.block_on(meter.wait(State::Credit, window.admit(control)))
                {
                    break;
                }
                let Some(item) = source.next()? else {
                    window.iter().for_each(|window| window.give_back());
                    break;
                };
                outlet.send_blocking(item, None)?;
            }
            Ok(())
        }));
        post.settle(result, true);
    })
}

/// Sink that is ready to be wired.
pub struct SinkNode<T> {
    pub(crate) spec: StageSpec,
    pub(crate) job: Box<dyn FnOnce(Rx<T>, Until) -> Job + Send>,
}

/// Argument of [`Flow::sink`](super::Flow::sink): every [`Sink`], and closures `FnMut(T)` or
/// `FnMut(T) -> Result<(), StageError>`. Implement [`Sink`] instead; `By` distinguishes them.
#[diagnostic::on_unimplemented(message = "`{Self}` is not a sink that takes `{T}`", label = "wired to a port of `{T}`")]
pub trait IntoSink<T, By> {
    /// Prepares the node for wiring.
    #[doc(hidden)]
    fn into_node(self, context: &mut RunContext) -> SinkNode<T>;
}

impl<S: Sink> IntoSink<S::In, OnThread> for S {
    fn into_node(mut self, context: &mut RunContext) -> SinkNode<S::In> {
        self.attach(context);
        let spec = self.spec();
        let job = |rx, until: Until| {
            Job::thread(move |post| {
                let mut inlet = Inlet::new(rx, post.seat.clone());
                let result = catch_unwind(AssertUnwindSafe(|| {
                    let (mut taken, takes_none) = (0, until.takes_none(&post.seat.stage));
                    while !takes_none && let Some(item) = inlet.recv_blocking() {
                        self.accept(item)?;
                        taken += 1;
                        if until.is_reached(taken, &post.seat.stage) {
                            break;
                        }
                    }
                    self.finish()
                }));
                post.settle(result, inlet.ended);
            })
        };
        SinkNode { spec, job: Box::new(job) }
    }
}

impl<T: Message, R: SinkResult, F: FnMut(T) -> R + Send + 'static> IntoSink<T, ByClosure> for F {
    fn into_node(self, context: &mut RunContext) -> SinkNode<T> {
        Each { take: self, _types: PhantomData }.into_node(context)
    }
}

/// Return type of a closure that is a sink.
pub trait SinkResult {
    /// Converts it to a result.
    #[doc(hidden)]
    fn into_result(self) -> Result<(), StageError>;
}

impl SinkResult for () {
    fn into_result(self) -> Result<(), StageError> {
        Ok(self)
    }
}

impl SinkResult for Result<(), StageError> {
    fn into_result(self) -> Result<(), StageError> {
        self
    }
}

struct Each<F, T> {
    take: F,
    _types: PhantomData<fn(T)>,
}

impl<T: Message, R: SinkResult, F: FnMut(T) -> R + Send + 'static> Sink for Each<F, T> {
    type In = T;

    fn accept(&mut self, item: T) -> Result<(), StageError> {
        (self.take)(item).into_result()
    }
}

/// Sends every item to every branch, in order. The slowest branch delays the others once their
/// edges are full.
pub(crate) fn tee<T: Message + Clone>(rx: Rx<T>, branches: Vec<Tx<T>>) -> Job {
    Job::task(async move |post: Post| {
        let mut inlet = Inlet::new(rx, post.seat.clone());
        let mut outlets: Vec<Outlet<T>> = branches.into_iter().map(|tx| Outlet::new(tx, post.seat.clone())).collect();
        let last = outlets.pop();
        let sent = AssertUnwindSafe(async {
            while let Some(item) = inlet.recv().await {
                for outlet in &outlets {
                    outlet.send(item.clone(), None).await?;
                }
                if let Some(last) = &last {
                    last.send(item, None).await?;
                }
            }
            Ok(())
        });
        let result = sent.catch_unwind().await;
        post.settle(result, inlet.ended);
    })
}

/// Forwards one input of a merge. Each input has its own worker, so no wait is a branch of a
/// `select!`.
pub(crate) fn merge<T: Message>(rx: Rx<T>, tx: Tx<T>) -> Job {
    Job::task(async move |post: Post| {
        let mut inlet = Inlet::new(rx, post.seat.clone());
        let outlet = Outlet::new(tx, post.seat.clone());
        let sent = AssertUnwindSafe(async {
            while let Some(item) = inlet.recv().await {
                outlet.send(item, None).await?;
            }
            Ok(())
        });
        let result = sent.catch_unwind().await;
        post.settle(result, inlet.ended);
    })
}
