//! Curves of a run and its time by step, from files that are read as they grow.

use std::path::Path;

use anyhow::Result;
use rollflow::observe::logs::{TIMINGS, metrics_row};
use rollflow::observe::{Curves, ObserveError, StepAxes};

use super::growing::{GrowingLines, PlacedLine};

/// Curves of a run until now. Memory: 16 bytes a number of `metrics.jsonl`.
#[derive(Debug)]
pub(crate) struct RunCurves {
    metrics: GrowingLines,
    timings: GrowingLines,
    /// Values of each metric.
    pub curves: Curves,
    /// Time and tokens by step.
    pub axes: StepAxes,
}

impl RunCurves {
    /// Curves of the run in `folder`, of which nothing is read.
    pub fn of(folder: &Path) -> Self {
        let [metrics, timings] = ["metrics.jsonl", TIMINGS].map(|name| GrowingLines::of(folder.join(name)));
        RunCurves { metrics, timings, curves: Curves::default(), axes: StepAxes::default() }
    }

    /// Reads what is new. After a resume that cut off steps it reads all.
    pub fn refresh(&mut self) -> Result<()> {
        let RunCurves { metrics, timings, curves, axes } = self;
        if metrics.was_cut()? {
            *curves = Curves::default();
        }
        if timings.was_cut()? {
            *axes = StepAxes::default();
        }
        let path = metrics.path().to_owned();
        let row = |line: &PlacedLine| {
            let at = |source| ObserveError::Line { path: path.clone(), line: line.number, source };
            metrics_row(line.bytes).map_err(at)
        };
        metrics.each_new(|line| {
            let (step, row) = row(&line)?;
            curves.add(step, row);
            Ok(())
        })?;
        timings.each_new(|line| {
            // Times are no part of a run's result: a damaged row is none.
            metrics_row(line.bytes).into_iter().for_each(|(step, row)| axes.add(step, &row));
            Ok(())
        })
    }
}
