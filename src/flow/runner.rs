//! Runner of a checked graph: starts an OS thread or a tokio task for every worker, records how
//! each ends, and joins all (law F3).

use std::error::Error;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::AcqRel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, unbounded};
use tokio::runtime::{Builder, Runtime};

use super::clock::{Clock, Meter};
use super::control::{Control, Signal};
use super::crew::{Crew, Presence};
use super::graph::{Edge, Node};
use super::io::Seat;
use super::launch::{Job, Post, panic_message};
use super::plan::Kind;
use super::report::{Ended, Report};
use super::stall::StageWait;
use super::stats::{Board, Stats};
use super::wait::block_on;
use super::{Graph, GraphError, Simulation, Until, check, stall};
use crate::util::causes::full_message;

/// Threads for all tasks, which only wait.
const TASK_THREADS: usize = 2;

/// Failure of one worker.
#[derive(Debug)]
pub struct StageFailure {
    /// Name of the stage.
    pub stage: String,
    /// Index of the worker, from 0.
    pub worker: usize,
    /// If true, it panicked.
    pub panicked: bool,
    /// Error that it returned, or message of its panic.
    pub cause: Box<dyn Error + Send + Sync>,
}

impl fmt::Display for StageFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "stage {:?}", self.stage)?;
        if self.worker > 0 {
            write!(f, " (worker {})", self.worker)?;
        }
        write!(f, " {}: {}", if self.panicked { "panicked" } else { "failed" }, full_message(self.cause.as_ref()))
    }
}

/// Error of a run.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// Not started: the graph has errors.
    #[error("{}", check::listed(.0))]
    Graph(Vec<GraphError>),
    /// Not started: the system provided no runtime.
    #[error("the run could not be started: {0}")]
    Start(#[source] std::io::Error),
    /// Stalled: no stage could make progress (law F7). Each waited for another, or longer than
    /// [`Flow::stall_timeout`](super::Flow::stall_timeout) for code outside the graph. Everything
    /// was joined.
    #[error(
        "no stage can make progress:{}{}\nIf code outside the graph raises the window or publishes the weights, give it longer: Flow::stall_timeout",
        stall::listed(waits),
        failures.iter().map(|failure| format!("\nfound afterwards: {failure}")).collect::<String>()
    )]
    Stalled {
        /// Waits of the workers, in the order of declaration.
        waits: Vec<StageWait>,
        /// What stages reported when the stall ended them, such as a group that they waited for.
        failures: Vec<StageFailure>,
        /// Report until then.
        report: Box<Report>,
    },
    /// Stages failed. The first failure is the root cause (law F3). Everything was joined.
    #[error("{}", listed(failures))]
    Failed {
        /// Failures in their order in time.
        failures: Vec<StageFailure>,
        /// Report until then.
        report: Box<Report>,
    },
}

impl RunError {
    /// Report of the run, if it was started.
    pub fn report(&self) -> Option<&Report> {
        match self {
            RunError::Graph(_) | RunError::Start(_) => None,
            RunError::Stalled { report, .. } | RunError::Failed { report, .. } => Some(report),
        }
    }
}

fn listed(failures: &[StageFailure]) -> String {
    let others = failures.iter().skip(1).map(|failure| format!("\nafterwards: {failure}"));
    failures.iter().take(1).map(StageFailure::to_string).chain(others).collect()
}

/// Event from a worker to the runner.
pub(crate) enum Event {
    Failed(StageFailure),
    /// No worker can make progress now.
    Idle,
    /// No worker will make progress again.
    Stalled(Vec<StageWait>),
    /// A worker is gone, with its ends.
    Gone,
}

/// Ends a worker's time and reports it gone, when dropped.
struct Leave {
    post: Post,
    /// Number of running sinks, if this is one of them.
    sinks: Option<Arc<AtomicUsize>>,
    /// Number of the worker on a simulated machine.
    simulated: Option<(Simulation, usize)>,
}

impl Drop for Leave {
    fn drop(&mut self) {
        let Post { seat: Seat { meter, control, .. }, events, .. } = &self.post;
        meter.end();
        if self.sinks.as_ref().is_some_and(|sinks| sinks.fetch_sub(1, AcqRel) == 1) {
            // No sink is left, so no stage may wait for weights any more.
            control.raise(Signal::Stop);
        }
        meter.leave();
        events.send(Event::Gone).expect("the runner receives until every worker is gone");
        if let Some((simulation, worker)) = &self.simulated {
            simulation.leave(*worker);
        }
    }
}

/// Started worker.
enum Started {
    Thread(JoinHandle<()>),
    Task(tokio::task::JoinHandle<()>),
}

/// Checked graph with its jobs.
pub(crate) struct Declared {
    pub(crate) graph: Graph,
    pub(crate) edges: Vec<Edge>,
    pub(crate) nodes: Vec<Node>,
    /// Time limit of a run that only code outside the graph can continue.
    pub(crate) stall_timeout: Duration,
    pub(crate) warnings: Vec<String>,
}

pub(crate) fn run(
    declared: Declared,
    until: &Until,
    control: &Control,
    stats: &Stats,
    simulation: Option<&Simulation>,
) -> Result<Report, RunError> {
    let Declared { graph, edges, nodes, stall_timeout, warnings } = declared;
    for warning in &warnings {
        tracing::warn!(flow = graph.name, "{warning}");
    }
    let runtime = Builder::new_multi_thread().worker_threads(TASK_THREADS).thread_name("flow-tasks").enable_all().build();
    let runtime = runtime.map_err(RunError::Start)?;
    let gauges = edges.into_iter().zip(&graph.edges).map(|(edge, plan)| (edge.build)(plan.capacity)).collect();
    let jobs: Vec<Vec<Job>> = nodes.into_iter().map(|node| (node.jobs)(until)).collect();
    let clock = simulation.map_or_else(Clock::start, |simulation| Clock::Simulated(simulation.clone()));
    let (events, received) = unbounded();
    let crew = Crew::new({
        let events = events.clone();
        // After the run, the receiver is gone.
        move || drop(events.send(Event::Idle))
    });
    let presence = || (!clock.is_simulated()).then(|| Presence::new(&crew));
    let meter = || Arc::new(Meter::new(clock.clone(), presence()));
    let meters = jobs.iter().map(|jobs| jobs.iter().map(|_| meter()).collect()).collect();
    let board = stats.publish(Board { clock: clock.clone(), graph, meters, gauges, warnings });
    if let Clock::Simulated(simulation) = &clock {
        let (stats, control, events) = (stats.clone(), control.clone(), events.clone());
        simulation.on_stall(move || {
            if control.asked() == Signal::Run {
                let waits = stats.board().map(Board::waits).unwrap_or_default();
                events.send(Event::Stalled(waits)).expect("the runner receives until every worker is gone");
                control.stall();
            }
            control.raise(Signal::Stop);
        });
    }

    let watch = Watch { events, received, crew, stall_timeout };
    let (failures, stalled) = supervise(board, jobs, control, &runtime, &watch);
    // Waits for tasks that stages spawned.
    drop(runtime);

    let ended = match control.asked() {
        _ if !failures.is_empty() || stalled.is_some() => Ended::Failed,
        Signal::Run => Ended::Finished,
        Signal::Drain => Ended::Drained,
        Signal::Stop => Ended::Stopped,
    };
    let report = Box::new(board.report(ended));
    match stalled {
        Some(waits) => Err(RunError::Stalled { waits, failures, report }),
        None if failures.is_empty() => Ok(*report),
        None => Err(RunError::Failed { failures, report }),
    }
}

/// Channel of the run's events, and what detects a stall (law F7).
struct Watch {
    events: Sender<Event>,
    received: Receiver<Event>,
    crew: Arc<Crew>,
    stall_timeout: Duration,
}

/// Starts all jobs and waits until every worker is gone. Returns failures in their order in time, and
/// the waits of a stalled run.
fn supervise(
    board: &Board,
    jobs: Vec<Vec<Job>>,
    control: &Control,
    runtime: &Runtime,
    watch: &Watch,
) -> (Vec<StageFailure>, Option<Vec<StageWait>>) {
    let Watch { events, received, crew, stall_timeout } = watch;
    let is_sink = |node: usize| board.graph.nodes[node].kind == Kind::Sink;
    let mut running: usize = jobs.iter().map(Vec::len).sum();
    let sinks = jobs.iter().enumerate().filter(|(node, _)| is_sink(*node)).map(|(_, jobs)| jobs.len()).sum();
    let sinks = Arc::new(AtomicUsize::new(sinks));
    let mut places = Vec::new();
    for (node, jobs) in jobs.into_iter().enumerate() {
        let stage: Arc<str> = board.graph.name(node).into();
        for (worker, job) in jobs.into_iter().enumerate() {
            let meter = Arc::clone(&board.meters[node][worker]);
            let seat = Seat { stage: Arc::clone(&stage), meter, control: control.clone() };
            let post = Post { seat, events: events.clone(), worker };
            let sinks = is_sink(node).then(|| Arc::clone(&sinks));
            let simulated = match &board.clock {
                Clock::Machine(_) => None,
                Clock::Simulated(simulation) => Some((simulation.clone(), simulation.expect(post.name()))),
            };
            places.push((job, Leave { post, sinks, simulated }));
        }
    }
    let mut started = Vec::new();
    for (job, leave) in places {
        let post = leave.post.clone();
        match start(job, leave, runtime) {
            Ok(handle) => started.push((post, handle)),
            // Its ends are dropped with the job, as after a run.
            Err(error) => post.fail(false, format!("its thread could not be started: {error}").into()),
        }
    }
    if let Clock::Simulated(simulation) = &board.clock {
        simulation.begin();
    }
    let (mut failures, mut stalled) = (Vec::new(), None);
    // End of an idle run's time limit, and the crew's wake-ups at its start.
    let mut deadline: Option<(Instant, u64)> = None;
    while running > 0 {
        let event = match deadline {
            None => received.recv().ok(),
            Some((at, _)) => received.recv_deadline(at).ok(),
        };
        match event {
            Some(Event::Failed(failure)) => failures.push(failure),
            Some(Event::Gone) => running -= 1,
            Some(Event::Stalled(waits)) => stalled = Some(waits),
            Some(Event::Idle) => {
                let wakeups = crew.wakeups();
                let outside = board.waits().iter().any(StageWait::may_end_from_outside);
                // A limit beyond the clock is none.
                let end = Instant::now().checked_add(if outside { *stall_timeout } else { Duration::ZERO });
                deadline = end.map(|at| (at, wakeups));
            }
            None => {
                let idle_since = |(_, wakeups)| crew.is_idle() && crew.wakeups() == wakeups;
                // A stopped run ends by itself (law F5). A draining run that is idle has nothing left that could end by itself.
                if deadline.take().is_some_and(idle_since) && control.signal() != Signal::Stop {
                    if control.asked() == Signal::Run {
                        stalled = Some(board.waits());
                        control.stall();
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
        // A stage's own panics are caught where they happen; this one happened while the stage was dropped.
        if let Some(panic) = panic {
            post.fail(true, panic_message(panic.as_ref()).into());
        }
    }
    failures.extend(received.try_iter().filter_map(|event| match event {
        Event::Failed(failure) => Some(failure),
        Event::Gone | Event::Idle | Event::Stalled(_) => None,
    }));
    (failures, stalled)
}

fn start(job: Job, leave: Leave, runtime: &Runtime) -> std::io::Result<Started> {
    let (post, meter) = (leave.post.clone(), Arc::clone(&leave.post.seat.meter));
    let body: Box<dyn FnOnce(Post) + Send> = match job {
        Job::Thread(body) => body,
        // A simulated task gets its own thread: a wait for tokio's timers or sockets looks like a wait for ever.
        Job::Task(body) if meter.clock.is_simulated() => {
            let clock = meter.clock.clone();
            Box::new(move |post| clock.block_on(body(post)))
        }
        Job::Task(body) => {
            return Ok(Started::Task(runtime.spawn(async move {
                meter.begin();
                meter.attend(body(post)).await;
                drop(leave);
            })));
        }
    };
    let worker = std::thread::Builder::new().name(post.name());
    worker
        .spawn(move || {
            if let Some((simulation, worker)) = &leave.simulated {
                simulation.enter(*worker);
            }
            meter.begin();
            body(post);
            drop(leave);
        })
        .map(Started::Thread)
}
