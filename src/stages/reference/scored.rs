//! Writes the reference policy's log-probabilities into groups on their way to the batcher, in
//! parallel with generators and trainer.
//!
//! Law V3: in a synchronous run the version that sampled a group stays the newest until the group
//! is trained. A moving reference is therefore a function of that version, too. Dropped groups pass
//! unscored.

use std::fmt;
use std::sync::Arc;

use super::model::ReferenceModel;
use super::moving::{MovingReference, Share};
use crate::data::{Sample, Scored};
use crate::flow::{Io, Stage, StageError, StageSpec, WeightsRx};

/// Stage between filter and batcher that scores samples under a reference policy.
pub struct Reference<W> {
    model: Box<dyn ReferenceModel<Weights = W>>,
    weights: Source<W>,
    threads: usize,
}

enum Source<W> {
    Frozen(Arc<W>),
    Following { published: WeightsRx<W>, share: Share, state: MovingReference<W> },
}

impl<W: Send + Sync + 'static> Reference<W> {
    /// Scores with fixed weights.
    pub fn frozen(model: impl ReferenceModel<Weights = W>, weights: Arc<W>) -> Self {
        Reference { model: Box::new(model), weights: Source::Frozen(weights), threads: 1 }
    }

    /// Starts as the first published version and blends in later ones by `share`:
    /// [`ema`](super::ema), [`periodic`](super::periodic), or a closure of the newest version
    /// included and the new one.
    pub fn following<M: ReferenceModel<Weights = W>>(
        model: M,
        published: WeightsRx<W>,
        share: impl Fn(u64, u64) -> f64 + Send + 'static,
    ) -> Self {
        let weights = Source::Following { published, share: Box::new(share), state: MovingReference::new::<M>() };
        Reference { model: Box::new(model), weights, threads: 1 }
    }

    /// Sets the number of cores, for the thread budget.
    pub fn threads(self, threads: usize) -> Self {
        Reference { threads, ..self }
    }

    /// State of a moving reference, to be passed to the trainer for its checkpoints.
    pub fn state(&self) -> Option<MovingReference<W>> {
        match &self.weights {
            Source::Frozen(_) => None,
            Source::Following { state, .. } => Some(state.clone()),
        }
    }

    /// Weights to score `samples` with.
    fn weights(&mut self, io: &mut Io<Scored, Scored>, samples: &[Sample]) -> Result<Arc<W>, StageError> {
        match &mut self.weights {
            Source::Frozen(weights) => Ok(weights.clone()),
            Source::Following { published, share, state } => {
                let sampled = samples.iter().filter_map(|sample| sample.versions.newest()).max().unwrap_or(0);
                let newest = io.wait_weights(published, sampled)?;
                Ok(state.see(newest.0, newest.1, share, |old, new, share| self.model.blend(old, new, share)).weights)
            }
        }
    }
}

impl<W: Send + Sync + 'static> Stage for Reference<W> {
    type In = Scored;
    type Out = Scored;

    fn run(&mut self, io: &mut Io<Scored, Scored>) -> Result<(), StageError> {
        self.model.start();
        while let Some(mut scored) = io.recv()? {
            if scored.dropped().is_none() {
                let weights = self.weights(io, &scored.group().samples)?;
                self.model.score(&weights, scored.samples_mut()).map_err(StageError::new)?;
            }
            io.send(scored)?;
        }
        Ok(())
    }

    fn spec(&self) -> StageSpec {
        let spec = StageSpec::thread().threads(self.threads).knob("threads");
        match &self.weights {
            Source::Frozen(_) => spec,
            Source::Following { published, .. } => spec.subscribes(published.id()),
        }
    }
}

impl<W> fmt::Debug for Reference<W> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("Reference")
    }
}
