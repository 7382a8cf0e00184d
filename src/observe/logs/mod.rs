//! Logs of a run: one row of numbers per step, to files, the terminal, Prometheus, a closure, or
//! all of them.
//!
//! A row is complete on disk when [`MetricsLogger::log`] returns. A crash truncates at most the
//! line that was being written, and the next run that appends removes the truncated end.

mod answers;
mod console;
mod dead_letters;
mod jsonl;
mod lines;
mod rewind;
mod rollouts;
mod statistics;
mod tensorboard;

use std::collections::BTreeMap;
use std::path::PathBuf;

pub use answers::{AnswerWriter, JudgedAnswer, read_answers};
pub(crate) use console::short;
pub use console::{ConsoleLogger, announce_training, console_line};
pub use dead_letters::{DEAD_LETTERS, DeadLetter, DeadLetterWriter, Failure, FailureKind, read_dead_letters};
pub use jsonl::{JsonlLogger, jsonl_row, metrics_rows, read_metrics};
pub use rewind::{count_lines, last_step, rewind, rewind_events, rewind_to_lines};
pub use rollouts::{Rollout, RolloutWriter, read_rollouts};
pub use statistics::{MetricStats, compute_stats, compute_stats_from_jsonl};
pub use tensorboard::TensorBoardLogger;

use super::catalog::Kind;
use super::{Metric, Metrics};

/// One step's numbers. Those the catalogue knows are named by [`Metric::key`]; a pipeline may add its own.
pub type StepMetrics = BTreeMap<String, f64>;

/// A log that could not be written or read.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
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
}

/// Takes one row a step.
pub trait MetricsLogger: Send {
    /// Writes the row of one step.
    fn log(&mut self, step: u64, metrics: &StepMetrics) -> Result<(), LogError>;

    /// Writes what is still held back. Called once, after the last step.
    fn finish(&mut self) -> Result<(), LogError> {
        Ok(())
    }
}

/// A closure is a logger.
impl<F: FnMut(u64, &StepMetrics) + Send> MetricsLogger for F {
    fn log(&mut self, step: u64, metrics: &StepMetrics) -> Result<(), LogError> {
        self(step, metrics);
        Ok(())
    }
}

/// Gauges without labels take the row's values, so that Prometheus and the files show the same
/// numbers. Other keys are ignored.
impl MetricsLogger for Metrics {
    fn log(&mut self, _step: u64, metrics: &StepMetrics) -> Result<(), LogError> {
        for (key, &value) in metrics {
            if let Some(metric) = Metric::from_key(key)
                && metric.spec().kind == Kind::Gauge
                && metric.spec().labels.is_empty()
            {
                self.set(metric, &[], value);
            }
        }
        Ok(())
    }
}

/// Several loggers as one. Each gets every row, also when another fails; the first error is returned.
#[derive(Default)]
pub struct CompositeLogger(Vec<Box<dyn MetricsLogger>>);

impl CompositeLogger {
    /// No logger yet.
    pub fn new() -> Self {
        CompositeLogger::default()
    }

    /// One more.
    pub fn with(mut self, logger: impl MetricsLogger + 'static) -> Self {
        self.0.push(Box::new(logger));
        self
    }
}

impl MetricsLogger for CompositeLogger {
    fn log(&mut self, step: u64, metrics: &StepMetrics) -> Result<(), LogError> {
        self.0.iter_mut().map(|logger| logger.log(step, metrics)).fold(Ok(()), Result::and)
    }

    fn finish(&mut self) -> Result<(), LogError> {
        self.0.iter_mut().map(|logger| logger.finish()).fold(Ok(()), Result::and)
    }
}
