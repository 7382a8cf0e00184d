//! Frozen reference policy for batches of pairs or of recorded rollouts.

use std::fmt;
use std::sync::Arc;

use super::model::ReferenceModel;
use crate::data::Batch;
use crate::flow::{Io, Stage, StageError, StageSpec};

/// Stage between a source of batches and the trainer. Writes the reference policy's
/// log-probabilities into samples, in parallel with training. The weights never change.
pub struct BatchReference<W> {
    model: Box<dyn ReferenceModel<Weights = W>>,
    weights: Arc<W>,
    threads: usize,
}

impl<W: Send + Sync + 'static> BatchReference<W> {
    /// Creates a stage that scores with `weights`.
    pub fn new(model: impl ReferenceModel<Weights = W>, weights: Arc<W>) -> Self {
        BatchReference { model: Box::new(model), weights, threads: 1 }
    }

    /// Sets the number of cores, for the thread budget.
    pub fn threads(self, threads: usize) -> Self {
        BatchReference { threads, ..self }
    }
}

impl<W: Send + Sync + 'static> Stage for BatchReference<W> {
    type In = Batch;
    type Out = Batch;

    fn run(&mut self, io: &mut Io<Batch, Batch>) -> Result<(), StageError> {
        self.model.start();
        while let Some(mut batch) = io.recv()? {
            for group in &mut batch.groups {
                self.model.score(&self.weights, &mut group.samples).map_err(StageError::new)?;
            }
            io.send(batch)?;
        }
        Ok(())
    }

    fn spec(&self) -> StageSpec {
        StageSpec::thread().threads(self.threads).knob("threads")
    }
}

impl<W> fmt::Debug for BatchReference<W> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("BatchReference")
    }
}
