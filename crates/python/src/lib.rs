//! Calls functions and classes of a user's Python file.
//!
//! They run in processes of the user's own interpreter, which this crate starts, bounds in memory and
//! time, and replaces when they end. A process loads `python/rollflow` from this program and the user's
//! file, then answers questions: one JSON object a line, over pipes. The questions are those of
//! `docs/reference/protocols.md`, so that a file can be served over HTTP instead. Environments of the
//! packages verifiers and openenv-core run there too.

mod process;
mod settings;
mod workers;

use std::time::TryFromFloatSecsError;

use rollflow_settings::params::ParamsError;

use process::Command;
pub use settings::{OpenEnvEnvironment, PythonEnvironment, PythonProcesses, PythonReward, VerifiersEnvironment};
pub use workers::{Session, Workers};

/// Failure of a call in a Python process, or of the process.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PythonError {
    /// A number of seconds that is no duration.
    #[error("a timeout of Python: {0}")]
    Seconds(#[from] TryFromFloatSecsError),
    /// Configuration that is not readable.
    #[error("environment.config: {0}")]
    Config(#[from] ParamsError),
    /// The interpreter does not start.
    #[error(
        "{python} can't be started: {why}. Install it, or name the interpreter of your environment: python = \".venv/bin/python\""
    )]
    Start {
        /// Interpreter.
        python: String,
        /// Reason.
        why: String,
    },
    /// The file does not load.
    #[error("{name} did not load with {python}: {why}")]
    Load {
        /// File and what it defines.
        name: String,
        /// Interpreter.
        python: String,
        /// Traceback, or reason.
        why: String,
    },
    /// A call raised an exception.
    #[error("{name} failed: {traceback}")]
    Failed {
        /// File and what it defines.
        name: String,
        /// Traceback, or reason.
        traceback: String,
    },
    /// A call took too long.
    #[error(
        "{name} gave no answer within {seconds:.1} s, and its process was ended; look for an endless loop, or raise the timeout"
    )]
    Late {
        /// File and what it defines.
        name: String,
        /// The timeout.
        seconds: f64,
    },
    /// The process ended during a call, or since an episode began.
    #[error("{name}: its process ended ({why})")]
    Ended {
        /// File and what it defines.
        name: String,
        /// Exit status and the process's last lines, or reason.
        why: String,
    },
}
