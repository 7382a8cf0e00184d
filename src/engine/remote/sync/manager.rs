//! Weight sync of a run's engines.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::mpsc::{self, UnboundedSender};
use tokio::task::JoinError;
use tokio::time::{Instant, timeout, timeout_at};

use super::engine_sync::{Phase, StepError, SyncedEngine, sync_engine};
use super::verify::{Checksums, outliers};
use super::{IsolatedEngine, SyncConfig, SyncError, Update};
use crate::data::Version;
use crate::engine::remote::{FleetHandle, LoadedAdapter};

/// Longest time for an engine to report what it serves.
const LOOK: Duration = Duration::from_secs(1);

/// Wait for other engines, in addition to twice the time of the first.
const GRACE: Duration = Duration::from_secs(1);

/// Result of a sync.
#[derive(Debug)]
pub struct SyncReport {
    /// Version of the weights.
    pub version: Version,
    /// Duration of the sync.
    pub time: Duration,
    /// Result of each engine, in their order: the phases that it went through, with their
    /// durations. A phase that was retried is there again.
    pub engines: Vec<Result<Vec<(&'static str, Duration)>, IsolatedEngine>>,
}

impl SyncReport {
    /// Number of engines that hold the version.
    pub fn held(&self) -> usize {
        self.engines.iter().filter(|engine| engine.is_ok()).count()
    }

    /// Engines that failed.
    pub fn isolated(&self) -> impl Iterator<Item = &IsolatedEngine> {
        self.engines.iter().filter_map(|engine| engine.as_ref().err())
    }
}

/// Brings versions to the engines of a fleet, and records in the fleet which engine serves which.
pub struct WeightSyncManager {
    shared: Arc<Shared>,
}

struct Shared {
    fleet: FleetHandle,
    config: SyncConfig,
    state: Mutex<State>,
}

struct State {
    update: Option<Arc<Update>>,
    engines: Vec<EngineSync>,
}

#[derive(Clone, Default)]
struct EngineSync {
    sums: Option<Checksums>,
    busy: bool,
    /// Last logged failure; the same failure is logged once.
    logged: Option<String>,
    /// Loaded adapters, oldest first.
    adapters: Vec<Arc<LoadedAdapter>>,
}

type EngineResult = (usize, Result<SyncedEngine, IsolatedEngine>);

impl WeightSyncManager {
    /// Creates a manager of these engines.
    pub fn new(fleet: FleetHandle, config: SyncConfig) -> Self {
        let state = State { update: None, engines: vec![EngineSync::default(); fleet.engines().len()] };
        WeightSyncManager { shared: Arc::new(Shared { fleet, config, state: Mutex::new(state) }) }
    }

    /// Engines and their states.
    pub fn fleet(&self) -> &FleetHandle {
        &self.shared.fleet
    }

    /// Brings a version to all engines. At least one must hold it; the others get no work until
    /// they do. A sync that takes much longer than the first continues in the background.
    pub async fn sync(&self, update: Update) -> Result<SyncReport, SyncError> {
        let (version, update) = (update.version, Arc::new(update));
        self.shared.state().update = Some(update.clone());
        self.shared.fleet.offer(version);
        let report = self.bring(self.free().await, update).await;
        if report.engines.is_empty() {
            return Err(SyncError::NoEngines);
        }
        if report.held() == 0 {
            return Err(SyncError::NoneHolds { version, failures: report.isolated().cloned().collect() });
        }
        // Until an engine holds it, the version before is the best one.
        self.shared.fleet.require(version);
        self.shared.clone().retire();
        Ok(report)
    }

    /// Brings engines that are behind to the newest version. Returns `None` if there are none.
    pub async fn catch_up(&self) -> Option<SyncReport> {
        let update = self.shared.state().update.clone()?;
        self.shared.clone().retire();
        self.look(&update).await;
        let mut behind = self.shared.fleet.behind();
        behind.retain(|place| !self.shared.state().engines[*place].busy);
        if behind.is_empty() { None } else { Some(self.bring(behind, update).await) }
    }

    /// Waits for engines without a sync in progress, and returns their places.
    async fn free(&self) -> Vec<usize> {
        loop {
            let engines = 0..self.shared.fleet.engines().len();
            let free: Vec<usize> = engines.clone().filter(|place| !self.shared.state().engines[*place].busy).collect();
            if engines.is_empty() || !free.is_empty() {
                return free;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Asks engines whether they still serve `update`: an engine may have restarted unnoticed.
    async fn look(&self, update: &Update) {
        let asked = self.shared.fleet.engines().iter().enumerate().map(|(place, engine)| {
            let (engine, label, adapter) = (engine.clone(), update.label(), update.adapter);
            let serves = tokio::spawn(async move {
                let control = engine.weights()?;
                let serves = async {
                    match adapter {
                        true => control.adapters().await.map(|has| has.contains(&label)),
                        false => control.served().await.map(|says| says.is_some_and(|says| says == label)),
                    }
                };
                timeout(LOOK, serves).await.ok()?.ok()
            });
            (place, serves)
        });
        for (place, serves) in asked.collect::<Vec<_>>() {
            let busy = self.shared.state().engines[place].busy;
            if let Ok(Some(false)) = serves.await
                && !busy
            {
                self.shared.fleet.mark_doubtful(place);
            }
        }
    }

    async fn bring(&self, places: Vec<usize>, update: Arc<Update>) -> SyncReport {
        let (version, started) = (update.version, Instant::now());
        let (results, mut received) = mpsc::unbounded_channel();
        for (at, place) in places.iter().enumerate() {
            self.shared.clone().start(*place, update.clone(), at, results.clone());
        }
        drop(results);
        let mut came: Vec<Option<Result<SyncedEngine, IsolatedEngine>>> = places.iter().map(|_| None).collect();
        let mut until = None;
        loop {
            let next = match until {
                None => received.recv().await,
                Some(until) => timeout_at(until, received.recv()).await.ok().flatten(),
            };
            let Some((at, result)) = next else { break };
            if result.is_ok() && until.is_none() {
                until = Some(Instant::now() + started.elapsed() + GRACE);
            }
            came[at] = Some(result);
        }
        let sums: Vec<_> = came.iter().map(|came| came.as_ref()?.as_ref().ok()?.sums.clone()).collect();
        for (at, tensor) in outliers(&sums) {
            came[at] = Some(Err(self.shared.isolated(places[at], Phase::Check, StepError::Unlike { tensor })));
        }
        let time = started.elapsed();
        let recorded = |(place, came): (usize, Option<Result<SyncedEngine, _>>)| {
            let late = StepError::Late { seconds: time.as_secs_f64() };
            let Some(result) = came else { return Err(self.shared.isolated(place, Phase::Load, late)) };
            self.shared.record(place, &update, &result);
            result.map(|held| held.times)
        };
        SyncReport { version, time, engines: places.into_iter().zip(came).map(recorded).collect() }
    }
}

impl Shared {
    /// Syncs one engine in a separate task, which contains panics of its client. The result is
    /// recorded even if it comes too late for the report.
    fn start(self: Arc<Self>, place: usize, update: Arc<Update>, at: usize, results: UnboundedSender<EngineResult>) {
        self.state().engines[place].busy = true;
        let before = self.state().engines[place].sums.clone();
        tokio::spawn(async move {
            let (fleet, given, config) = (self.fleet.clone(), update.clone(), self.config.clone());
            let driven = tokio::spawn(async move { sync_engine(&fleet, place, &given, &config, before.as_ref()).await }).await;
            let broke = |error: JoinError| Err(self.isolated(place, Phase::Load, StepError::Broke(error.to_string())));
            let result = driven.unwrap_or_else(broke);
            self.state().engines[place].busy = false;
            if let Err(late) = results.send((at, result)) {
                self.record(place, &update, &late.0.1);
            }
        });
    }

    fn record(&self, place: usize, update: &Update, result: &Result<SyncedEngine, IsolatedEngine>) {
        let mut state = self.state();
        let engine = &mut state.engines[place];
        engine.sums = result.as_ref().ok().and_then(|held| held.sums.clone());
        match result {
            Ok(_) => {
                engine.logged = None;
                self.fleet.mark_found(place);
                let (name, version, folder) = (update.label(), update.version, update.folder.clone());
                let adapter = update.adapter.then(|| Arc::new(LoadedAdapter { name, version, folder }));
                if let Some(adapter) = &adapter {
                    // The engine may have lost it and loaded it again.
                    engine.adapters.retain(|other| other.name != adapter.name);
                    engine.adapters.push(adapter.clone());
                }
                self.fleet.mark_verified(place, version, adapter);
            }
            Err(isolated) => {
                self.fleet.mark_doubtful(place);
                let why = isolated.to_string();
                if engine.logged.as_ref() != Some(&why) {
                    tracing::warn!("{why}");
                }
                engine.logged = Some(why);
            }
        }
    }

    /// Unloads adapters that no request names.
    fn retire(self: Arc<Self>) {
        for place in 0..self.fleet.engines().len() {
            // Requests hold the adapter that they name.
            let unused: Vec<_> =
                self.state().engines[place].adapters.extract_if(.., |adapter| Arc::strong_count(adapter) == 1).collect();
            for adapter in unused {
                let shared = self.clone();
                tokio::spawn(async move {
                    let engine = shared.fleet.engines()[place].clone();
                    let Some(control) = engine.weights() else { return };
                    match timeout(LOOK, control.unload_adapter(&adapter.name)).await {
                        // A restarted engine does not know the adapter.
                        Ok(Err(error)) if !error.fault.passes() => tracing::debug!("{error}"),
                        Ok(Ok(())) => {}
                        Ok(Err(_)) | Err(_) => shared.state().engines[place].adapters.push(adapter),
                    }
                });
            }
        }
    }

    fn isolated(&self, place: usize, phase: Phase, error: StepError) -> IsolatedEngine {
        IsolatedEngine { engine: self.fleet.engines()[place].name(), phase, error }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}
