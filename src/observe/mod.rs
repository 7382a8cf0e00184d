//! Metrics for Prometheus, logs, lines on the console, the progress line and the final report of a
//! run.
//!
//! Every number has one declaration, a [`Metric`] of the catalogue, and is recorded through
//! [`Metrics`] or a [`logs::MetricsLogger`]. There is no global recorder: two runs in one process
//! do not share numbers, and nothing remains after a run (law F3).

pub mod catalog;
pub mod console;
mod demand;
pub mod logs;
mod machine;
mod progress;
mod recorder;
mod report;
mod server;
mod stage_sampler;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

pub use catalog::Metric;
pub use console::Console;
pub use logs::{MetricsLogger, StepMetrics};
pub use machine::gpus;
pub use progress::{duration, step_rate};
pub use recorder::{Baseline, Metrics};
pub use report::{Curves, EdgeActivity, FlowActivity, HtmlReport, StageShares, StepAxes};
pub use server::MetricsServer;
pub use stage_sampler::{sampled, sampled_with_progress};

/// Errors of logs, of the metrics server and of the thread that samples stages.
#[derive(Debug, thiserror::Error)]
pub enum ObserveError {
    /// The disk or the permissions do not allow it.
    #[error("{}: {source}; check that the folder exists, is writable and has space", path.display())]
    Io {
        /// Path of the file.
        path: PathBuf,
        /// Error of the system.
        source: std::io::Error,
    },
    /// A line is not what this file holds.
    #[error("{}, line {line}: {source}", path.display())]
    Line {
        /// Path of the file.
        path: PathBuf,
        /// Line number, from 1.
        line: usize,
        /// Description of the error.
        source: serde_json::Error,
    },
    /// The text is not an address.
    #[error("{given:?} is not an address to serve metrics at: {source}; write HOST:PORT, for example 127.0.0.1:9464")]
    Address {
        /// The text.
        given: String,
        /// Error of the resolution.
        source: std::io::Error,
    },
    /// Another program listens there.
    #[error(
        "the metrics address {address} is in use: stop the program that holds it, or choose another with --metrics HOST:PORT (port 0 takes a free one)"
    )]
    Busy {
        /// Address.
        address: SocketAddr,
    },
    /// The machine does not let us listen there.
    #[error("cannot serve metrics at {address}: {source}; choose another address with --metrics HOST:PORT")]
    Bind {
        /// Address.
        address: SocketAddr,
        /// Error of the system.
        source: std::io::Error,
    },
    /// The machine gave no thread or no event loop.
    #[error("cannot start {what}: {source}; the machine is out of threads or file handles")]
    Thread {
        /// The thread or event loop.
        what: String,
        /// Error of the system.
        source: std::io::Error,
    },
}

impl ObserveError {
    /// Makes an error of the system one about this file.
    fn at(path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_owned();
        move |source| ObserveError::Io { path, source }
    }
}
