//! Weights for generators of the same process: the newest version is swapped in, and nothing waits
//! (law F2).

use std::sync::Arc;
use std::time::Instant;

use crate::flow::{Io, RunContext, Stage, StageError, StageSpec, WeightsTx, weights};
use crate::observe::{Metric, Metrics};
use crate::rollout::Admission;
use crate::stages::train::Trained;

/// Publishes the weights of a training step and passes the step on.
///
/// Logs `Synced weights to 1 engines (version 12)` as a `tracing` event.
pub struct WeightSync<W> {
    /// Set by hand, or taken from the flow.
    to: Option<WeightsTx<W>>,
    metrics: Option<Metrics>,
    admission: Option<Admission>,
    log_every: u64,
    /// Step whose sync was logged last.
    logged: Option<u64>,
    /// Largest number of readers so far.
    engines: usize,
}

/// Publishes on the flow's edge, to the stages that read weights of this type.
impl<W> Default for WeightSync<W> {
    fn default() -> Self {
        WeightSync { to: None, metrics: None, admission: None, log_every: 1, logged: None, engines: 0 }
    }
}

impl<W: Send + Sync + 'static> WeightSync<W> {
    /// Publishes on this edge.
    pub fn to(to: WeightsTx<W>) -> Self {
        WeightSync { to: Some(to), ..WeightSync::default() }
    }

    /// Logs a sync at most once in `n` steps.
    pub fn log_every(self, n: u64) -> Self {
        WeightSync { log_every: n, ..self }
    }
}

impl<W: Send + Sync + 'static> Stage for WeightSync<W> {
    type In = Trained<W>;
    type Out = Trained<W>;

    fn attach(&mut self, context: &mut RunContext) {
        context.fill(&mut self.admission);
        context.fill(&mut self.metrics);
        if self.to.is_none() {
            // A second publisher gets an edge without readers, which the graph's check rejects.
            self.to = Some(context.publisher().unwrap_or_else(|| weights().0));
        }
    }

    fn run(&mut self, io: &mut Io<Trained<W>, Trained<W>>) -> Result<(), StageError> {
        // The edge stays with the stage: its readers must not see it close before this result does.
        let to = self.to.get_or_insert_with(|| weights().0);
        while let Some(trained) = io.recv()? {
            if let Some(publish) = &trained.publish {
                let started = Instant::now();
                to.publish(publish.version, Arc::clone(&publish.weights))?;
                if let Some(admission) = &self.admission {
                    admission.published(publish.version);
                }
                if let Some(metrics) = &self.metrics {
                    metrics.set(Metric::WeightVersion, &["trainer"], publish.version as f64);
                    metrics.observe(Metric::SyncTime, &[], started.elapsed().as_secs_f64());
                }
                // Readers that have finished at the end of a run are gone already.
                self.engines = self.engines.max(to.readers());
                if self.logged.is_none_or(|logged| trained.step >= logged + self.log_every) {
                    self.logged = Some(trained.step);
                    tracing::info!("Synced weights to {} engines (version {})", self.engines, publish.version);
                }
            }
            io.send(trained)?;
        }
        Ok(())
    }

    fn spec(&self) -> StageSpec {
        let spec = StageSpec::default();
        let spec = self.to.iter().fold(spec, StageSpec::publishes);
        Admission::released_by(self.admission.as_ref(), spec)
    }
}
