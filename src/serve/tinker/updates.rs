//! `metrics.jsonl` of a model: a row per update, so that its training can be watched as a run's.

use std::path::Path;

use crate::observe::logs::{JsonlLogger, rewind};
use crate::observe::{Metric, MetricsLogger, ObserveError, StepMetrics};
use crate::train::{ForwardBackward, OptimStep};

/// The rows of one model. A file that can't be written is a warning: training does not need it.
pub(super) struct Updates {
    rows: Option<JsonlLogger>,
    /// The passes since the last update.
    passes: Option<ForwardBackward>,
}

impl Updates {
    /// Continues the file in `folder` after update `step`; later ones are repeated.
    pub fn after(step: u64, folder: &Path) -> Self {
        let open = || {
            rewind(&folder.join("metrics.jsonl"), (step > 0).then_some(step))?;
            JsonlLogger::new(folder)
        };
        let rows = open().map_err(|error| warn(folder, &error)).ok();
        Updates { rows, passes: None }
    }

    /// Adds a pass.
    pub fn pass(&mut self, pass: ForwardBackward) {
        match &mut self.passes {
            Some(passes) => passes.merge(pass),
            passes => *passes = Some(pass),
        }
    }

    /// Leaves out the passes since the last update.
    pub fn forget(&mut self) {
        self.passes = None;
    }

    /// Writes the row of update `step`.
    pub fn update(&mut self, step: u64, optim: &OptimStep, folder: &Path) {
        let (Some(passes), Some(rows)) = (self.passes.take(), &mut self.rows) else { return };
        if let Err(error) = rows.log(step, &row(&passes, optim)) {
            warn(folder, &error);
        }
    }
}

fn warn(folder: &Path, error: &ObserveError) {
    tracing::warn!("{}: no row in metrics.jsonl: {error}", folder.display());
}

/// The losses are sums, and how a client divides them is its own affair: the row has the mean.
fn row(passes: &ForwardBackward, optim: &OptimStep) -> StepMetrics {
    let tokens = passes.tokens as f64;
    let mut row = vec![(Metric::Loss, passes.loss / tokens.max(1.0)), (Metric::LearningRate, optim.lr)];
    let entropy = if passes.tokens > 0 { passes.entropy } else { f64::NAN };
    row.extend([(Metric::Entropy, entropy), (Metric::GradNorm, optim.grad_norm)]);
    if passes.gap.tokens > 0 {
        row.extend([(Metric::LogProbGapMean, passes.gap.mean()), (Metric::LogProbGapMax, passes.gap.max())]);
        row.push((Metric::ApproxKl, passes.gap.approx_kl()));
    }
    let mut row: StepMetrics =
        row.into_iter().filter(|(_, value)| !value.is_nan()).map(|(metric, value)| (metric.key().to_owned(), value)).collect();
    row.insert("trained_tokens".to_owned(), tokens);
    row
}
