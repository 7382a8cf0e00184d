//! Steps that an evaluating stage evaluates, and where it reports.

use std::path::PathBuf;

use crate::data::Version;
use crate::observe::logs::{JsonLines, JsonlLogger, JudgedAnswer, MetricsLogger, last_step};
use crate::observe::{Metric, Metrics, ObserveError, StepMetrics};

pub(super) struct Reports {
    every: u64,
    pub last: Option<u64>,
    /// Step that the run was resumed at; 0 for a new run.
    pub resumed_at: u64,
    pub metrics: Option<Metrics>,
    /// Run folder; none: nothing is logged.
    pub folder: Option<PathBuf>,
    /// Log of rows, and the last step with a row of an earlier part of the run.
    rows: Option<(JsonlLogger, u64)>,
}

impl Reports {
    pub fn every(every: u64) -> Self {
        Reports { every: every.max(1), last: None, resumed_at: 0, metrics: None, folder: None, rows: None }
    }

    pub fn is_due(&self, step: u64) -> bool {
        step.is_multiple_of(self.every) || self.last == Some(step)
    }

    /// Opens the log of the run folder.
    pub fn open(&mut self) -> Result<(), ObserveError> {
        if let Some(folder) = &self.folder {
            let rows = JsonlLogger::at(folder.join("evaluations.jsonl"))?;
            let evaluated = last_step(rows.path())?;
            self.rows = Some((rows, evaluated));
        }
        Ok(())
    }

    /// Returns true if an earlier part of the run has evaluated `step`, as far as is known.
    pub fn has_evaluated(&self, step: u64) -> bool {
        self.rows.as_ref().is_none_or(|(_, evaluated)| *evaluated >= step)
    }

    /// Log of one evaluation's completions.
    pub fn answers(&self, step: u64) -> Result<Option<JsonLines<JudgedAnswer>>, ObserveError> {
        let file = |folder: &PathBuf| folder.join(format!("evaluations/step_{step:06}.jsonl"));
        self.folder.as_ref().map(|folder| JsonLines::create(file(folder))).transpose()
    }

    /// Completes an evaluation's row with its step and version, and logs it.
    pub fn row(&mut self, step: u64, version: Version, mut row: StepMetrics) -> Result<StepMetrics, ObserveError> {
        row.insert(Metric::EvalStep.key().to_owned(), step as f64);
        row.insert(Metric::EvalVersion.key().to_owned(), version as f64);
        self.rows.as_mut().map_or(Ok(()), |(rows, _)| rows.log(step, &row))?;
        Ok(row)
    }
}
