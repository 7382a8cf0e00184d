//! Runs untrusted programs, such as code that a model wrote.
//!
//! A [`Sandbox`] checks which isolation the kernel offers, and fails if that is not enough. Each run is
//! its own process with an empty environment, no network, its own file system, and limits on every
//! resource. At its end it is killed with all processes that it started.
//! [docs/how_to/sandbox.md](../../../docs/how_to/sandbox.md) describes each layer.
//!
//! The warden (`src/sandbox/warden`) sets this up. It is a separate program, which this crate embeds
//! and executes from memory: no code runs in a copy of the training process, which has many threads
//! and much memory. It is in C, because a build script can compile and embed C, while Cargo cannot
//! embed a Rust binary into a library (artifact dependencies are unstable). The crates `landlock` and
//! `seccompiler` would replace `walls.c`, a third of it; namespaces, mounts, limits, reaping and the
//! transport of output would be the same system calls in Rust.

mod cases;
mod config;
mod isolation;
mod live;
mod program;
mod referee;
mod run;
mod runner;
mod warden;

use std::fmt;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex, MutexGuard};

pub use cases::{CodeTests, NoTests, extract_code};
pub use config::{Limits, SandboxConfig, SandboxRule, Walls};
pub use isolation::Isolation;
pub use program::{Program, ProgramError};
pub use run::{Ended, Job, Ran};
pub use runner::{TestResults, TestRunner};

/// Runs programs in the strongest isolation that the machine offers. Clones share the bound on
/// concurrent runs.
#[derive(Clone)]
pub struct Sandbox(Arc<Inner>);

struct Inner {
    config: SandboxConfig,
    isolation: Isolation,
    slots: Mutex<usize>,
    freed: Condvar,
}

/// Failure of a sandbox.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// The interpreter is missing.
    #[error(transparent)]
    Program(#[from] ProgramError),
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
    /// A job's file has an invalid name.
    #[error("{0:?} can't be a file of a job: give a plain name, without folders")]
    FileName(String),
}

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
            let check = Job::new(config.program.check.clone());
            match run::run(&config, walls, &check) {
                Ok((ran, layers)) if ran.ended == Ended::Exited(0) => {
                    let isolation = Isolation { walls, layers, missing };
                    let inner = Inner { config, isolation, slots: Mutex::new(0), freed: Condvar::new() };
                    return Ok(Sandbox(Arc::new(inner)));
                }
                Ok((ran, _)) => missing.push(format!("{walls}: {} {ran}", config.program.path.display())),
                Err(SandboxError::Setup(why)) if why == UNREACHABLE => missing.push(format!(
                    "{walls}: {why}; as root the sandbox runs programs as a user without rights, who may not read {}: install the program where all \
                     users may read it, such as /usr/bin",
                    config.program.path.display()
                )),
                Err(SandboxError::Setup(why)) => missing.push(format!("{walls}: {why}")),
                Err(other) => return Err(other),
            }
        }
        Err(SandboxError::NoWalls(missing.join("; ")))
    }

    /// Returns the isolation of Python programs on this machine.
    pub fn probe() -> Result<Isolation, SandboxError> {
        Ok(Sandbox::new(SandboxConfig::python()?)?.isolation().clone())
    }

    /// Returns the isolation of programs.
    pub fn isolation(&self) -> &Isolation {
        &self.0.isolation
    }

    /// Returns the settings.
    pub fn config(&self) -> &SandboxConfig {
        &self.0.config
    }

    /// Runs a program to its end or time limit. Waits if too many programs run.
    pub fn run(&self, job: &Job) -> Result<Ran, SandboxError> {
        let _slot = self.slot();
        run::run(&self.0.config, self.0.isolation.walls, job).map(|(ran, _)| ran)
    }

    /// Starts a program that exchanges lines with this process. It counts as running only while the
    /// caller holds a [`Sandbox::slot`].
    fn start(&self, job: &Job) -> Result<live::Live, SandboxError> {
        live::Live::start(&self.0.config, self.0.isolation.walls, job)
    }

    fn slot(&self) -> Slot<'_> {
        let most = self.0.config.concurrency.max(1);
        let mut taken = self.0.taken();
        while *taken >= most {
            self.0.freed.wait(&mut taken);
        }
        *taken += 1;
        Slot(&self.0)
    }
}

impl Inner {
    fn taken(&self) -> MutexGuard<'_, usize> {
        self.slots.lock()
    }
}

struct Slot<'a>(&'a Inner);

impl Drop for Slot<'_> {
    fn drop(&mut self) {
        *self.0.taken() -= 1;
        self.0.freed.notify_one();
    }
}

impl fmt::Debug for Sandbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sandbox")
            .field("program", &self.0.config.program.path)
            .field("isolation", &self.0.isolation)
            .finish_non_exhaustive()
    }
}
