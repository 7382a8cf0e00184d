//! Weights for generators of the same process: the newest version is swapped in, nobody waits (law F2).
//!
//! Says `Synced weights to 1 engines (version 12)` as a `tracing` event.

use std::sync::Arc;
use std::time::Instant;

use crate::data::Version;
use crate::flow::{Io, RunContext, Stage, StageError, StageSpec, WeightsId, WeightsTx};
use crate::observe::{Metric, Metrics};
use crate::rollout::Admission;
use crate::stages::train::Trained;

/// Publishes the weights that a training step brings along and passes the step on.
pub struct WeightSync<W> {
    to: WeightsTx<W>,
    metrics: Option<Metrics>,
    admission: Option<Admission>,
    log_every: u64,
    /// The step whose sync was said last.
    said: Option<u64>,
    /// The most that listened at a time.
    engines: usize,
}

impl<W: Send + Sync + 'static> WeightSync<W> {
    /// Publishes on this edge.
    pub fn to(to: WeightsTx<W>) -> Self {
        WeightSync { to, metrics: None, admission: None, log_every: 1, said: None, engines: 0 }
    }

    /// Says that weights were synced at most once in `n` steps, for runs that sync at every step.
    pub fn log_every(self, n: u64) -> Self {
        WeightSync { log_every: n, ..self }
    }

    fn say(&mut self, step: u64, version: Version) {
        if self.said.is_none_or(|said| step >= said + self.log_every) {
            self.said = Some(step);
            // Those that have no more to do at the end of a run are gone already.
            self.engines = self.engines.max(self.to.readers());
            tracing::info!("Synced weights to {} engines (version {version})", self.engines);
        }
    }

    /// The edge's identity.
    pub fn id(&self) -> WeightsId {
        self.to.id()
    }
}

impl<W: Send + Sync + 'static> Stage for WeightSync<W> {
    type In = Trained<W>;
    type Out = Trained<W>;

    fn run(&mut self, io: &mut Io<Trained<W>, Trained<W>>) -> Result<(), StageError> {
        while let Some(trained) = io.recv()? {
            if let Some(publish) = &trained.publish {
                let started = Instant::now();
                self.to.publish(publish.version, Arc::clone(&publish.weights))?;
                if let Some(admission) = &self.admission {
                    admission.published(publish.version);
                }
                if let Some(metrics) = &self.metrics {
                    metrics.set(Metric::WeightVersion, &["trainer"], publish.version as f64);
                    metrics.observe(Metric::SyncTime, &[], started.elapsed().as_secs_f64());
                }
                self.say(trained.step, publish.version);
            }
            io.send(trained)?;
        }
        Ok(())
    }

    fn attach(&mut self, context: &mut RunContext) {
        context.fill(&mut self.admission);
        context.fill(&mut self.metrics);
    }

    fn spec(&self) -> StageSpec {
        Admission::released_by(self.admission.as_ref(), StageSpec::thread().publishes(self.id()))
    }
}
