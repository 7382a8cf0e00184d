//! Runs a checked graph: starts a named OS thread or a tokio task for every worker, hears how each ends, and joins all (law F3).

use std::error::Error;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::AcqRel};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::runtime::{Builder, Runtime};

use super::clock::{Clock, Meter};
use super::control::{Control, Signal};
use super::crew::{Crew, Presence};
use super::graph::{BuildEdge, BuildJobs};
use super::io::Seat;
use super::launch::{Job, Post, panic_message};
use super::report::{Ended, Report};
use super::stall::{StageWait, listed};
use super::stats::{Board, Stats};
use super::wait::block_on;
use super::{Graph, GraphErrors, GraphWarning, Kind, Simulation, Until, Window};

/// Tasks only wait, so two threads carry any number of them.
const TASK_THREADS: usize = 2;

/// Why a worker failed.
#[derive(Debug)]
pub enum Cause {
    /// It returned an error.
    Failed(Box<dyn Error + Send + Sync>),
    /// It panicked, with this message.
    Panicked(String),
}

/// One worker's failure.
#[derive(Debug)]
pub struct StageFailure {
    /// The stage's name.
    pub stage: String,
    /// Which of its workers, from 0.
    pub worker: usize,
    /// Why.
    pub cause: Cause,
}

impl fmt::Display for StageFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let StageFailure { stage, worker, cause } = self;
        write!(f, "stage {stage:?}")?;
        if *worker > 0 {
            write!(f, " (worker {worker})")?;
        }
        match cause {
            Cause::Panicked(message) => write!(f, " panicked: {message}"),
            Cause::Failed(error) => {
                write!(f, " failed: {error}")?;
                let mut source = error.source();
                while let Some(error) = source {
                    write!(f, ": {error}")?;
                    source = error.source();
                }
                Ok(())
            }
        }
    }
}

/// Why a run gave no report.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// It was not started: the graph is wrong.
    #[error(transparent)]
    Graph(#[from] GraphErrors),
    /// It was not started: the machine gave no runtime.
    #[error("the run could not be started: {0}")]
    Start(#[source] std::io::Error),
    /// No stage could make progress (law F7): each waited for another, or for something outside the graph that did not come within
    /// [`Flow::stall_timeout`](super::Flow::stall_timeout). Everything was joined.
    #[error(
        "no stage can make progress:{}\nIf code outside the graph raises the window or publishes the weights, give it longer: Flow::stall_timeout",
        listed(waits)
    )]
    Stalled {
        /// What each worker waits for, in the order of declaration.
        waits: Vec<StageWait>,
        /// What the run did until then.
        report: Box<Report>,
    },
    /// Stages failed. The first is the root cause, the others failed after it (law F3); everything was joined.
    #[error("{}", list(failures))]
    Failed {
        /// In the order in which they happened.
        failures: Vec<StageFailure>,
        /// What the run did until then.
        report: Box<Report>,
    },
}

impl RunError {
    /// What the run did, if it was started.
    pub fn report(&self) -> Option<&Report> {
        match self {
            RunError::Graph(_) | RunError::Start(_) => None,
            RunError::Stalled { report, .. } | RunError::Failed { report, .. } => Some(report),
        }
    }
}

fn list(failures: &[StageFailure]) -> String {
    let others = failures.iter().skip(1).map(|failure| format!("\nafterwards: {failure}"));
    failures.iter().take(1).map(StageFailure::to_string).chain(others).collect()
}

/// What workers tell the runner.
pub(crate) enum Event {
    Failed(StageFailure),
    /// None of them can go on, as of now.
    Idle,
    /// The same for good.
    Stalled(Vec<StageWait>),
    /// A worker is gone, and with it its ends.
    Gone,
}

/// Ends a worker's time and reports it gone, whichever way it goes.
struct Leave {
    meter: Arc<Meter>,
    events: Sender<Event>,
    control: Control,
    /// How many sinks run, if this is one of them.
    sinks: Option<Arc<AtomicUsize>>,
}

impl Drop for Leave {
    fn drop(&mut self) {
        self.meter.end();
        if self.sinks.as_ref().is_some_and(|sinks| sinks.fetch_sub(1, AcqRel) == 1) {
            // Nothing can be delivered any more, so nobody shall wait for weights to make it with.
            self.control.raise(Signal::Stop);
        }
        self.meter.leave();
        self.events.send(Event::Gone).expect("the runner hears until every worker is gone");
    }
}

/// A worker that was started.
enum Started {
    Thread(JoinHandle<()>),
    Task(tokio::task::JoinHandle<()>),
}

/// A checked graph with what it takes to run it.
pub(crate) struct Declared {
    pub(crate) graph: Graph,
    pub(crate) edges: Vec<BuildEdge>,
    pub(crate) jobs: Vec<Option<BuildJobs>>,
    pub(crate) windows: Vec<Option<Window>>,
    /// How long a run that nothing inside it can help waits for something outside.
    pub(crate) stall_timeout: Duration,
    pub(crate) warnings: Vec<GraphWarning>,
}

pub(crate) fn run(
    declared: Declared,
    until: &Until,
    control: &Control,
    stats: &Stats,
    simulation: Option<&Simulation>,
) -> Result<Report, RunError> {
    let Declared { graph, edges, jobs, windows, stall_timeout, warnings } = declared;
    for warning in &warnings {
        tracing::warn!(flow = graph.name, "{warning}");
    }
    let runtime = Builder::new_multi_thread().worker_threads(TASK_THREADS).thread_name("flow-tasks").enable_all().build();
    let runtime = runtime.map_err(RunError::Start)?;
    let gauges = edges.into_iter().zip(&graph.edges).map(|(build, edge)| build(edge.capacity)).collect();
    let jobs: Vec<Vec<Job>> = jobs.into_iter().map(|jobs| jobs.map_or_else(Vec::new, |jobs| jobs(until))).collect();
    let clock = simulation.map_or_else(Clock::start, |simulation| Clock::Simulated(simulation.clone()));
    let (events, heard) = channel();
    let crew = Crew::new({
        let events = events.clone();
        // A worker that is woken after the run is over finds nobody to tell.
        move || drop(events.send(Event::Idle))
    });
    let presence = || (!clock.is_simulated()).then(|| Presence::new(&crew));
    let meter = || Arc::new(Meter::new(clock.clone(), presence()));
    let meters = jobs.iter().map(|jobs| jobs.iter().map(|_| meter()).collect()).collect();
    let board = stats.publish(Board { clock: clock.clone(), graph, meters, windows, gauges });
    if let Clock::Simulated(simulation) = &clock {
        let (stats, control, events) = (stats.clone(), control.clone(), events.clone());
        simulation.on_stall(move || {
            if control.asked() == Signal::Run {
                let waits = stats.board().map(Board::waits).unwrap_or_default();
                events.send(Event::Stalled(waits)).expect("the runner hears until every worker is gone");
            }
            control.raise(Signal::Stop);
        });
    }

    let watch = Watch { crew, stall_timeout };
    let (failures, stalled) = supervise(board, jobs, control, &runtime, (events, heard), watch);
    // Waits for whatever tasks have spawned themselves.
    drop(runtime);

    let ended = match control.asked() {
        _ if !failures.is_empty() || stalled.is_some() => Ended::Failed,
        Signal::Run => Ended::Finished,
        Signal::Drain => Ended::Drained,
        Signal::Stop => Ended::Stopped,
    };
    let report = Report::new(board.snapshot(), ended, warnings);
    let report = Box::new(report);
    match stalled {
        Some(waits) => {
            failures.iter().for_each(|failure| tracing::error!("{failure}, after no stage could make progress"));
            Err(RunError::Stalled { waits, report })
        }
        None if failures.is_empty() => Ok(*report),
        None => Err(RunError::Failed { failures, report }),
    }
}

/// Notices a run in which no worker can go on (law F7).
struct Watch {
    crew: Arc<Crew>,
    stall_timeout: Duration,
}

/// When an idle run has been idle for too long, and the crew's wake-ups when it became so.
#[derive(Clone, Copy)]
struct Deadline {
    at: Instant,
    wakeups: u64,
}

impl Watch {
    /// The next event. None comes for good once the deadline is over.
    fn next(&self, heard: &Receiver<Event>, deadline: Option<Deadline>) -> Result<Event, RecvTimeoutError> {
        match deadline {
            None => heard.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(Deadline { at, .. }) => heard.recv_timeout(at.saturating_duration_since(Instant::now())),
        }
    }

    /// No worker can go on as of now. Only what code outside the graph may end is waited for; `None`: without limit.
    fn idle(&self, board: &Board) -> Option<Deadline> {
        let wakeups = self.crew.wakeups();
        let outside = board.waits().iter().any(|wait| wait.waits_for.may_end_from_outside());
        let time = if outside { self.stall_timeout } else { Duration::ZERO };
        Some(Deadline { at: Instant::now().checked_add(time)?, wakeups })
    }

    /// Whether no worker could go on since.
    fn has_stalled(&self, since: Deadline) -> bool {
        self.crew.is_idle() && self.crew.wakeups() == since.wakeups
    }
}

type Ending = (Vec<StageFailure>, Option<Vec<StageWait>>);

/// Starts all jobs, waits until every worker is gone, and returns the failures in the order in which they happened, and what each worker
/// waited for if none could go on.
fn supervise(
    board: &Board,
    jobs: Vec<Vec<Job>>,
    control: &Control,
    runtime: &Runtime,
    (events, heard): (Sender<Event>, Receiver<Event>),
    watch: Watch,
) -> Ending {
    let is_sink = |node: usize| board.graph.nodes[node].kind == Kind::Sink;
    let mut running: usize = jobs.iter().map(Vec::len).sum();
    let sinks = jobs.iter().enumerate().filter(|(node, _)| is_sink(*node)).map(|(_, jobs)| jobs.len()).sum();
    let sinks = Arc::new(AtomicUsize::new(sinks));
    let mut places = Vec::new();
    for (node, jobs) in jobs.into_iter().enumerate() {
        let stage: Arc<str> = board.graph.nodes[node].name.as_str().into();
        for (worker, job) in jobs.into_iter().enumerate() {
            let seat =
                Seat { stage: Arc::clone(&stage), meter: Arc::clone(&board.meters[node][worker]), control: control.clone() };
            let leave = Leave {
                meter: Arc::clone(&seat.meter),
                events: events.clone(),
                control: control.clone(),
                sinks: is_sink(node).then(|| Arc::clone(&sinks)),
            };
            let post = Post { seat, events: events.clone(), worker };
            let turn = Turn::of(&board.clock, &post);
            places.push((job, post, leave, turn));
        }
    }
    let mut started = Vec::new();
    for (job, post, leave, turn) in places {
        match start(job, post.clone(), leave, turn, runtime) {
            Ok(handle) => started.push((post, handle)),
            // Its ends are gone with the job, as if it had run.
            Err(error) => post.fail(Cause::Failed(format!("its thread could not be started: {error}").into())),
        }
    }
    if let Clock::Simulated(simulation) = &board.clock {
        simulation.begin();
    }
    let (mut failures, mut stalled, mut deadline) = (Vec::new(), None, None);
    while running > 0 {
        match watch.next(&heard, deadline) {
            Ok(Event::Failed(failure)) => failures.push(failure),
            Ok(Event::Gone) => running -= 1,
            Ok(Event::Idle) => deadline = watch.idle(board),
            Ok(Event::Stalled(waits)) => stalled = Some(waits),
            Err(_) => {
                // A run that stops ends by itself (law F5), and one that was asked to drain has nothing left that could end by itself.
                if deadline.take().is_some_and(|since| watch.has_stalled(since)) && control.signal() != Signal::Stop {
                    if control.asked() == Signal::Run {
                        stalled = Some(board.waits());
                    }
                    control.raise(Signal::Stop);
                }
            }
        }
    }
    for (post, handle) in started {
        let panic = match handle {
            Started::Thread(handle) => handle.join().err(),
            Started::Task(handle) => block_on(handle).err().and_then(|error| error.try_into_panic().ok()),
        };
        // A stage's own panics are caught where they happen; what arrives here is a panic while it was dropped.
        if let Some(panic) = panic {
            post.fail(Cause::Panicked(panic_message(panic.as_ref())));
        }
    }
    failures.extend(heard.try_iter().filter_map(|event| match event {
        Event::Failed(failure) => Some(failure),
        Event::Gone | Event::Idle | Event::Stalled(_) => None,
    }));
    (failures, stalled)
}

/// A worker's turns on a simulated machine. On a real one everybody goes at once.
struct Turn(Option<(Simulation, usize)>);

impl Turn {
    fn of(clock: &Clock, post: &Post) -> Self {
        Turn(match clock {
            Clock::Machine(_) => None,
            Clock::Simulated(simulation) => Some((simulation.clone(), simulation.expect(post.name()))),
        })
    }

    fn enter(&self) {
        if let Some((simulation, worker)) = &self.0 {
            simulation.enter(*worker);
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if let Some((simulation, worker)) = &self.0 {
            simulation.leave(*worker);
        }
    }
}

fn start(job: Job, post: Post, leave: Leave, turn: Turn, runtime: &Runtime) -> std::io::Result<Started> {
    let clock = post.seat.meter.clock.clone();
    let thread = |post: Post, leave: Leave, body: Box<dyn FnOnce(Post) + Send>| {
        let name = post.name();
        let body = move || {
            turn.enter();
            leave.meter.begin();
            body(post);
            drop(leave);
            drop(turn);
        };
        std::thread::Builder::new().name(name).spawn(body).map(Started::Thread)
    };
    match job {
        Job::Thread(body) => thread(post, leave, body),
        // There a task has a thread of its own: who waits on tokio's timers and sockets can't be told from who waits for ever.
        Job::Task(body) if clock.is_simulated() => thread(post, leave, Box::new(move |post| clock.block_on(body(post)))),
        Job::Task(body) => Ok(Started::Task(runtime.spawn(async move {
            leave.meter.begin();
            leave.meter.attend(body(post)).await;
            drop(leave);
        }))),
    }
}
