//! Runs untrusted programs, such as code that a model wrote.
//!
//! A [`Sandbox`] checks which isolation the kernel offers, and fails if that is not enough. Each run is
//! its own process with an empty environment, no network, its own file system, and limits on every
//! resource. At its end it is killed with all processes that it started.
//! [docs/how_to/sandbox.md](../../../docs/how_to/sandbox.md) describes each layer.
//!
//! The warden (`warden`) sets this up: a separate program, which this crate embeds and
//! executes from memory, so that no code runs in a copy of the training process. It is in C, because
//! a build script can compile and embed C, while Cargo can't embed a Rust binary into a library.

mod cases;
mod config;
mod live;
mod referee;
mod run;
mod runner;
mod warden;

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded};

pub use cases::{CodeTests, extract_code};
pub use config::{Limits, SandboxConfig, SandboxRule, Walls};
pub use run::{Ended, Job, Ran};

/// Runs programs in the strongest isolation that the machine offers. Clones share the bound on
/// concurrent runs, and the results of tests.
#[derive(Clone)]
pub struct Sandbox(Arc<Inner>);

struct Inner {
    config: SandboxConfig,
    walls: Walls,
    /// Active layers, innermost last.
    layers: Vec<String>,
    /// Stronger isolation that is not available, with the reason.
    missing: Vec<String>,
    /// A place for each program that may run, taken by an item in the channel.
    slots: (Sender<()>, Receiver<()>),
    results: runner::Results,
}

/// Failure of a sandbox.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// No program has this name.
    #[error("{name} can't be run: {source}. Install it, or name another")]
    NoProgram {
        /// Name or path.
        name: String,
        /// Cause.
        source: std::io::Error,
    },
    /// The program is no Python.
    #[error("{name} does not answer as Python does: {answer}")]
    NoPython {
        /// Name or path.
        name: String,
        /// Output of the program.
        answer: String,
    },
    /// The time limit is no duration.
    #[error("the time limit of programs: {0}")]
    Timeout(#[from] std::time::TryFromFloatSecsError),
    /// The machine lacks the required isolation.
    #[error(
        "this machine has no walls to run untrusted code behind: {0}. It takes Linux with either user namespaces or Landlock and seccomp; in a \
         container, allow it user namespaces. Where the code can be trusted, say unsandboxed = true"
    )]
    NoWalls(String),
    /// The warden could not be started.
    #[error("starting the sandbox: {0}")]
    Start(#[source] std::io::Error),
    /// The program could not be started in the sandbox.
    #[error("the sandbox could not be set up: {0}")]
    Setup(String),
    /// The warden ended unexpectedly.
    #[error("the sandbox broke while a program ran: {0}")]
    Broken(String),
    /// No place for a program was free by its deadline.
    #[error("too many other programs ran in the sandbox until the deadline")]
    Busy,
    /// A job's file has an invalid name.
    #[error("{0:?} can't be a file of a job: give a plain name, without folders")]
    FileName(String),
    /// Metadata that are no tests.
    #[error(
        "these are no tests: {0}. Expected is Python with asserts, a list of such, a list of {{\"input\": …, \"output\": …}}, or \
         {{\"inputs\": [ … ], \"outputs\": [ … ]}}, with \"fn_name\" and lists of arguments where a function is called"
    )]
    NoTests(String),
}

/// Most places for programs, since the channel of places allocates all of them.
const MOST_SLOTS: usize = 1 << 16;

/// Time of the warden to end a program before the deadline of its caller. As long before that, waiting for a
/// place ends.
const MARGIN: Duration = Duration::from_millis(100);

/// Message of the warden if its unprivileged user may not read the program.
const UNREACHABLE: &str = "starting the program: Permission denied";

impl Sandbox {
    /// Tries each isolation, strongest first, by running the program's check in it. Fails if the
    /// machine lacks the required isolation and [`SandboxConfig::unsandboxed`] is false.
    pub fn new(config: SandboxConfig) -> Result<Self, SandboxError> {
        let mut missing = Vec::new();
        let tried: &[Walls] = match &config.walls {
            Some(only) => std::slice::from_ref(only),
            None => &[Walls::Namespaces, Walls::Confined, Walls::None],
        };
        for &walls in tried {
            if walls == Walls::None && !config.unsandboxed {
                missing.push("to run without walls was not asked for".to_owned());
                continue;
            }
            let check = Job::new(config.check.clone());
            match run::run(&config, walls, &check) {
                Ok((ran, layers)) if ran.ended == Ended::Exited(0) => {
                    let (slots, results) = (bounded(config.concurrency.clamp(1, MOST_SLOTS)), runner::Results::default());
                    return Ok(Sandbox(Arc::new(Inner { config, walls, layers, missing, slots, results })));
                }
                Ok((ran, _)) => missing.push(format!("{walls}: {} {ran}", config.program.display())),
                Err(SandboxError::Setup(why)) if why == UNREACHABLE => missing.push(format!(
                    "{walls}: {why}; as root the sandbox runs programs as a user without rights, who may not read {}: install the program where all \
                     users may read it, such as /usr/bin",
                    config.program.display()
                )),
                Err(SandboxError::Setup(why)) => missing.push(format!("{walls}: {why}")),
                Err(other) => return Err(other),
            }
        }
        Err(SandboxError::NoWalls(missing.join("; ")))
    }

    /// Returns the kind of isolation.
    pub fn walls(&self) -> Walls {
        self.0.walls
    }

    /// Describes the isolation: its kind, its layers with the innermost last, and the stronger kinds
    /// that are not available, with the reasons.
    pub fn isolation(&self) -> String {
        let Inner { walls, layers, missing, .. } = &*self.0;
        let missing = if missing.is_empty() { String::new() } else { format!("; not had: {}", missing.join("; ")) };
        format!("{walls} ({}){missing}", layers.join("; "))
    }

    /// Returns the settings.
    pub fn config(&self) -> &SandboxConfig {
        &self.0.config
    }

    /// Runs a program to its end or time limit. Waits if too many programs run.
    pub fn run(&self, job: &Job) -> Result<Ran, SandboxError> {
        self.run_by(job, rollflow_util::deadline(Duration::MAX))
    }

    /// Runs a program like [`Sandbox::run`], and ends it by `deadline`. Fails if other programs took the
    /// time.
    pub fn run_by(&self, job: &Job, deadline: Instant) -> Result<Ran, SandboxError> {
        let slot = self.slot(deadline)?;
        let limits = job.limits.unwrap_or(self.0.config.limits);
        let ran = self.run_in_slot(&job.clone().limits(Limits { wall: limits.wall.min(slot.time), ..limits }))?;
        slot.check(ran.ended == Ended::Overdue && slot.time < limits.wall)?;
        Ok(ran)
    }

    /// Runs a program of a caller that holds a [`Sandbox::slot`].
    fn run_in_slot(&self, job: &Job) -> Result<Ran, SandboxError> {
        run::run(&self.0.config, self.0.walls, job).map(|(ran, _)| ran)
    }

    /// Starts a program that exchanges lines with this process. It counts as running only while the
    /// caller holds a [`Sandbox::slot`]. With `waiting`, it is ended if more lines than that wait.
    fn start(&self, job: &Job, waiting: Option<usize>) -> Result<live::Live, SandboxError> {
        live::Live::start(&self.0.config, self.0.walls, job, waiting)
    }

    /// Waits for a place. A caller without one still has time to report it before `deadline`.
    fn slot(&self, deadline: Instant) -> Result<Slot<'_>, SandboxError> {
        let (asked, (take, give_back)) = (Instant::now(), &self.0.slots);
        let latest = deadline.checked_sub(2 * MARGIN).unwrap_or(asked);
        take.send_deadline((), latest).map_err(|_| SandboxError::Busy)?;
        Ok(Slot { give_back, waited: asked.elapsed(), time: left(deadline) })
    }
}

/// Returns the running time until `deadline` of a program that starts now.
fn left(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now()).saturating_sub(MARGIN)
}

/// A place of a program.
struct Slot<'a> {
    give_back: &'a Receiver<()>,
    /// Time that its caller waited for it.
    waited: Duration,
    /// Time that was left then.
    time: Duration,
}

impl Slot<'_> {
    /// Fails if the deadline cut a program off, and other programs took most of the time.
    fn check(&self, cut: bool) -> Result<(), SandboxError> {
        if cut && self.waited > self.time { Err(SandboxError::Busy) } else { Ok(()) }
    }
}

impl Drop for Slot<'_> {
    fn drop(&mut self) {
        self.give_back.recv().expect("both ends are in the sandbox");
    }
}

impl fmt::Debug for Sandbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sandbox")
            .field("program", &self.0.config.program)
            .field("isolation", &self.isolation())
            .finish_non_exhaustive()
    }
}
