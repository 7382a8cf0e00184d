//! Weight sync: new weights for the generators, in this process ([`WeightSync`]) or on servers
//! ([`RemoteSync`]).

#[cfg(feature = "torch")]
mod export;
#[cfg(feature = "torch")]
mod held;
#[cfg(feature = "torch")]
mod links;
mod remote;
mod sleep;

use std::sync::Arc;
use std::time::{Duration, Instant};

#[cfg(feature = "torch")]
pub use export::{Exporter, probe_texts};
#[cfg(feature = "torch")]
pub(crate) use held::PIECE;
pub use remote::{EvaluationHold, RemoteSync};
pub use sleep::SleepServers;

use crate::data::Version;
use crate::flow::{Io, RunContext, Stage, StageError, StageSpec, WeightsTx, weights};
use crate::observe::logs::Every;
use crate::observe::{Metric, Metrics};
use crate::rollout::Admission;
use crate::stages::train::Trained;

/// Changes that shorten a sync or make it rarer.
const ADVICE: &str = "publish less often (sync.every), send less (lora.sync = \"adapter\", deltas of [store], engine.dtype = \"bf16\"), \
                      or use a faster link";

/// Publishes the weights of a training step to generators of the same process, and passes the step
/// on. The newest version is swapped in, and nothing waits (law F2).
///
/// Logs `Synced weights to 1 engines (version 12)` as a `tracing` event.
pub struct WeightSync<W> {
    /// Set by hand, or taken from the flow.
    to: Option<WeightsTx<W>>,
    announcer: Announcer,
    /// Largest number of readers so far.
    engines: usize,
    before: Option<Box<dyn FnMut() + Send>>,
}

/// Publishes on the flow's edge, to the stages that read weights of this type.
impl<W> Default for WeightSync<W> {
    fn default() -> Self {
        WeightSync { to: None, announcer: Announcer::default(), engines: 0, before: None }
    }
}

impl<W: Send + Sync + 'static> WeightSync<W> {
    /// Publishes on this edge.
    pub fn to(to: WeightsTx<W>) -> Self {
        WeightSync { to: Some(to), ..WeightSync::default() }
    }

    /// Logs a sync at most once in `n` steps.
    pub fn log_every(mut self, n: impl Into<Every>) -> Self {
        self.announcer.log_every = n.into();
        self
    }

    /// Calls `before` when a version is about to be published, such as to let simulated time pass.
    pub fn before_publish(self, before: impl FnMut() + Send + 'static) -> Self {
        WeightSync { before: Some(Box::new(before)), ..self }
    }
}

impl<W: Send + Sync + 'static> Stage for WeightSync<W> {
    type In = Trained<W>;
    type Out = Trained<W>;

    fn attach(&mut self, context: &mut RunContext) {
        self.announcer.attach(context);
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
                if let Some(before) = &mut self.before {
                    before();
                }
                let started = Instant::now();
                to.publish(publish.version, Arc::clone(&publish.weights))?;
                // Readers that have finished at the end of a run are gone already.
                self.engines = self.engines.max(to.readers());
                self.announcer.announce(trained.step, publish.version, self.engines, || started.elapsed());
            }
            io.send(trained)?;
        }
        Ok(())
    }

    fn spec(&self) -> StageSpec {
        self.announcer.releases(self.to.iter().fold(StageSpec::default().advice(ADVICE), StageSpec::publishes))
    }
}

/// Announces synced versions to admission, metrics and log.
#[derive(Default)]
struct Announcer {
    metrics: Option<Metrics>,
    admission: Option<Admission>,
    /// Steps from one line of the log to the next.
    log_every: Every,
    /// Step whose sync was logged last.
    logged: Option<u64>,
}

impl Announcer {
    fn attach(&mut self, context: &mut RunContext) {
        context.fill(&mut self.admission);
        context.fill(&mut self.metrics);
    }

    fn announce(&mut self, step: u64, version: Version, engines: usize, time: impl FnOnce() -> Duration) {
        if let Some(admission) = &self.admission {
            admission.published(version);
        }
        if let Some(metrics) = &self.metrics {
            metrics.set(Metric::WeightVersion, &["trainer"], version as f64);
            metrics.observe(Metric::SyncTime, &[], time().as_secs_f64());
        }
        if self.logged.is_none_or(|logged| step >= logged + self.log_every.at(step)) {
            self.logged = Some(step);
            log(engines, version);
        }
    }

    /// Adds the release of waiting prompts to the spec.
    fn releases(&self, spec: StageSpec) -> StageSpec {
        match self.admission.as_ref().filter(|admission| admission.pace().in_flight > 0) {
            Some(admission) => spec.raises(admission.window()),
            None => spec,
        }
    }
}

fn log(engines: usize, version: Version) {
    tracing::info!("Synced weights to {engines} engines (version {version})");
}
