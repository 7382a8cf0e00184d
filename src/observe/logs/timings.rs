//! `timings.jsonl`: when each step was written down, and what took the time. Unlike `metrics.jsonl` it
//! differs from run to run.

use std::path::Path;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use super::{JsonlLogger, MetricsLogger, StepMetrics};
use crate::observe::{Baseline, Metric, Metrics, ObserveError};

/// Name of the file.
pub const TIMINGS: &str = "timings.jsonl";

/// Appends a row per step to `timings.jsonl`.
///
/// | key | value |
/// | --- | --- |
/// | `time_seconds` | when the row was written, after the step's end, since 1970 |
/// | `elapsed_seconds` | the same, since this process began the steps |
/// | `step_seconds`, `sync_seconds` | time of the optimizer step, and of the newest publication of weights |
/// | `generated_tokens`, `trained_tokens` | totals since then; generators may already be at later steps |
/// | `generated_tokens_per_second`, `trained_tokens_per_second` | since the row before |
/// | `stage_NAME_STATE_seconds` | time since then that the stage's workers spent in a state, up to a quarter of a second late; absent if 0 |
pub struct TimingsLogger {
    rows: JsonlLogger,
    metrics: Metrics,
    began: Instant,
    /// Totals at that time.
    at_begin: Baseline,
    /// Time and totals of the row before.
    before: (f64, [f64; 2]),
}

impl TimingsLogger {
    /// Appends to `timings.jsonl` in `folder`, and reads totals from `metrics`.
    ///
    /// # Errors
    /// The file can't be opened.
    pub fn new(folder: impl AsRef<Path>, metrics: &Metrics) -> Result<Self, ObserveError> {
        let rows = JsonlLogger::at(folder.as_ref().join(TIMINGS))?;
        let (metrics, at_begin) = (metrics.clone(), metrics.baseline());
        Ok(TimingsLogger { rows, metrics, began: Instant::now(), at_begin, before: (0.0, [0.0; 2]) })
    }
}

impl MetricsLogger for TimingsLogger {
    fn log(&mut self, step: u64, _: &StepMetrics) -> Result<(), ObserveError> {
        let newest = |metric, labels: &[&str]| self.metrics.newest(metric, labels);
        let (elapsed, now) = (self.began.elapsed().as_secs_f64(), SystemTime::now().duration_since(UNIX_EPOCH));
        let total = |metric, labels: &[&str]| newest(metric, labels).unwrap_or_default() - self.at_begin.total(metric, labels);
        let totals = [total(Metric::GeneratedTokens, &[]), total(Metric::Tokens, &["trained"])];
        let (since, counted) = std::mem::replace(&mut self.before, (elapsed, totals));
        let mut row = StepMetrics::from([
            ("time_seconds".to_owned(), now.unwrap_or_default().as_secs_f64()),
            ("elapsed_seconds".to_owned(), elapsed),
        ]);
        for (name, total, before) in [("generated", totals[0], counted[0]), ("trained", totals[1], counted[1])] {
            row.insert(format!("{name}_tokens"), total);
            row.insert(format!("{name}_tokens_per_second"), (total - before) / (elapsed - since).max(1e-9));
        }
        let durations = [("step_seconds", Metric::StepTime), ("sync_seconds", Metric::SyncTime)];
        row.extend(durations.into_iter().filter_map(|(key, metric)| Some((key.to_owned(), newest(metric, &[])?))));
        for (labels, _) in self.metrics.series(Metric::StageTime) {
            let seconds = total(Metric::StageTime, &[&labels[0], &labels[1]]);
            if seconds > 0.0 {
                row.insert(format!("stage_{}_{}_seconds", labels[0], labels[1]), seconds);
            }
        }
        self.rows.log(step, &row)
    }

    fn finish(&mut self) -> Result<(), ObserveError> {
        self.rows.finish()
    }
}
