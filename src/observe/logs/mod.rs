//! Logs of a run: one row of numbers per step, to files, the terminal, Prometheus, a closure, or
//! all of them.
//!
//! A row is complete on disk when [`MetricsLogger::log`] returns. A crash truncates at most the
//! line that was being written, and the next run that appends removes the truncated end.

mod console;
mod dead_letters;
mod every;
mod jsonl;
mod lines;
mod rewind;
mod rollouts;
mod statistics;
mod tensorboard;
mod timings;

use std::collections::BTreeMap;

pub use console::{announce_training, console_line, log_to_console, short};
pub use dead_letters::{DEAD_LETTERS, DeadLetter, Failure, FailureKind, dead_letters};
pub use every::Every;
pub use jsonl::{JsonlLogger, metrics_row, metrics_rows};
pub use lines::{JsonLines, read_lines, read_whole_lines};
pub use rewind::{count_lines, last_step, rewind, rewind_events, rewind_to_lines};
pub use rollouts::{JudgedAnswer, Rollout};
pub(super) use statistics::around;
pub use statistics::{MetricStats, compute_stats_from_jsonl, smoothed, smoothed_at};
pub use tensorboard::TensorBoardLogger;
pub use timings::{TIMINGS, TimingsLogger};

use super::{Metric, Metrics, ObserveError};

/// One step's numbers. Those the catalogue knows are named by [`Metric::key`]; a pipeline may add its own.
pub type StepMetrics = BTreeMap<String, f64>;

/// Takes one row a step.
pub trait MetricsLogger: Send {
    /// Writes the row of one step.
    fn log(&mut self, step: u64, metrics: &StepMetrics) -> Result<(), ObserveError>;

    /// Writes what is still held back. Called once, after the last step.
    fn finish(&mut self) -> Result<(), ObserveError> {
        Ok(())
    }
}

/// A closure is a logger.
impl<F: FnMut(u64, &StepMetrics) + Send> MetricsLogger for F {
    fn log(&mut self, step: u64, metrics: &StepMetrics) -> Result<(), ObserveError> {
        self(step, metrics);
        Ok(())
    }
}

/// Gauges without labels take the row's values, so that Prometheus and the files show the same
/// numbers. Other keys are ignored.
impl MetricsLogger for Metrics {
    fn log(&mut self, _step: u64, metrics: &StepMetrics) -> Result<(), ObserveError> {
        for (key, &value) in metrics {
            if let Some(metric) = Metric::from_key(key)
                && metric.kind() == "gauge"
                && metric.labels().is_empty()
            {
                self.set(metric, &[], value);
            }
        }
        Ok(())
    }
}

/// Several loggers are one. Each gets every row, also when another fails; the first error is returned.
impl MetricsLogger for Vec<Box<dyn MetricsLogger>> {
    fn log(&mut self, step: u64, metrics: &StepMetrics) -> Result<(), ObserveError> {
        self.iter_mut().map(|logger| logger.log(step, metrics)).fold(Ok(()), Result::and)
    }

    fn finish(&mut self) -> Result<(), ObserveError> {
        self.iter_mut().map(|logger| logger.finish()).fold(Ok(()), Result::and)
    }
}
