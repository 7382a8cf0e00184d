//! Weight sync of a run's engines.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{join_all, select_all};
use tokio::sync::OwnedMutexGuard;
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tokio::time::{Instant, timeout, timeout_at};

use super::engine_sync::{BEFORE_THE_PAUSE, StepError, Synced, look_for_restart, still_serves, sync_engine};
use super::verify::{Checksums, outliers};
use super::{IsolatedEngine, SyncConfig, Update};
use crate::data::Version;
use crate::engine::EngineError;
use crate::engine::remote::handle::no_answer;
use crate::engine::remote::{EngineMemory, FleetHandle, RemoteError};
use crate::net::backoff;

/// Longest time for an engine to report what it serves.
const LOOK: Duration = Duration::from_secs(1);

/// Longest time for an engine to wake at the end of a run, and for a lost one to go to sleep.
const WAKE: Duration = Duration::from_secs(10);

/// Failures in a row from which on an engine is given weights ever more rarely between two versions.
const FAILURES: u32 = 3;

/// First and longest pause before an engine that keeps failing is given the newest version again.
const PAUSES: [Duration; 2] = [Duration::from_secs(2), Duration::from_secs(60)];

/// Wait for other engines, in addition to twice the time of the first. If engines may lag, three
/// times the time of the first is all.
const GRACE: Duration = Duration::from_secs(1);

/// Least time for which an engine that may skip versions serves one, in times of its pause.
const SERVES: u32 = 4;

/// Interval and time limit of an engine's health checks during its sync.
const CHECK: Duration = Duration::from_secs(2);

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
#[derive(Clone)]
pub struct WeightSyncManager {
    /// Engines and their states.
    pub fleet: FleetHandle,
    /// Policies, timeouts and retries.
    pub config: SyncConfig,
    /// Number of versions that an engine may be behind the newest and still get work. 0: an engine
    /// gets work under the newest version alone.
    pub max_lag: u64,
}

/// Traces of an engine's syncs.
#[derive(Default)]
pub(in crate::engine::remote) struct LastSync {
    /// Version that it serves, and its checksums.
    sums: Option<(Version, Checksums)>,
    /// Last logged failure; the same failure is logged once.
    logged: Option<String>,
    /// Time until which an engine that loads slowly may skip versions.
    serves_until: Option<Instant>,
    /// Failures in a row, and the time until which the engine is left alone between two versions.
    failures: u32,
    rests_until: Option<Instant>,
    /// Loaded adapters, oldest first. Each is kept while requests hold it.
    adapters: Vec<Arc<Update>>,
}

/// Place of an engine, and the right to sync it.
type Free = (usize, OwnedMutexGuard<LastSync>);

type EngineResult = Result<Synced, IsolatedEngine>;

/// Results of a sync. Those that have come when it is abandoned, for a newer version, are recorded.
struct Came<'a> {
    manager: &'a WeightSyncManager,
    update: &'a Update,
    received: UnboundedReceiver<(usize, Free, EngineResult)>,
    /// Result of each engine.
    results: Vec<Option<(Free, EngineResult)>>,
}

impl Came<'_> {
    /// Ends the wait for results. What comes later is recorded by the task of its engine.
    fn close(&mut self) {
        self.received.close();
        while let Ok((at, free, result)) = self.received.try_recv() {
            match self.results.get_mut(at) {
                Some(place) => *place = Some((free, result)),
                // The report is made.
                None => drop(self.manager.record(free, self.update, result, true)),
            }
        }
    }
}

impl Drop for Came<'_> {
    fn drop(&mut self) {
        self.close();
        for (free, result) in std::mem::take(&mut self.results).into_iter().flatten() {
            self.manager.record(free, self.update, result, false).ok();
        }
    }
}

impl WeightSyncManager {
    /// Brings a version to all engines, except those that may skip it. At least one must hold it. A
    /// sync that takes much longer than the first continues in the background. An engine with a
    /// version before the last [`WeightSyncManager::max_lag`] gets no work until it holds this one.
    ///
    /// # Errors
    ///
    /// [`EngineError::NoEngines`] and [`EngineError::NoneHolds`].
    pub async fn sync(&self, update: Update) -> Result<SyncReport, EngineError> {
        let (version, update) = (update.version, Arc::new(update));
        self.fleet.offer(&update);
        self.fleet.set_awake(false);
        let engines = self.due(self.free().await?, version);
        let report = self.bring(engines, update).await;
        if report.held() == 0 {
            return Err(EngineError::NoneHolds { version, failures: report.isolated().cloned().collect() });
        }
        // Until an engine holds it, the version before is the best one.
        self.fleet.require(version.saturating_sub(self.max_lag));
        self.retire();
        Ok(report)
    }

    /// Puts all engines to sleep until the next sync ([`SyncConfig::sleep`]). They must have no work. Waits
    /// for syncs in progress. One that fails is logged, and keeps its memory. After
    /// [`WeightSyncManager::wake`] it does nothing until the next sync.
    pub async fn sleep(&self) {
        self.fleet.set_asleep();
        let sleeps = self.fleet.staying().into_iter().map(|place| async move {
            let (Some(engine), Some(last)) = (self.fleet.engine(place), self.fleet.last_sync(place)) else { return };
            let Some(control) = engine.weights() else { return };
            // One that is lost may hang, and a sync with it.
            let longest = if self.fleet.why_lost(place).is_some() { WAKE.as_secs_f64() } else { f64::MAX };
            let free = timeout(Duration::try_from_secs_f64(longest).unwrap_or(Duration::MAX), last.lock()).await;
            let Ok(_free) = free else {
                tracing::warn!("{} is lost, and still being given weights; it keeps its memory", engine.name());
                self.fleet.begin_sleep(place);
                return;
            };
            let (started, limit) = (Instant::now(), self.config.step_timeout.min(longest));
            // Also if its answer does not come.
            if !self.fleet.begin_sleep(place) {
                return;
            }
            let slept = timeout(Duration::try_from_secs_f64(limit).unwrap_or(Duration::MAX), control.sleep()).await;
            self.fleet.record(place, |meter, name| meter.sync_phase(name, "sleep", started.elapsed()));
            match slept {
                Ok(Ok(())) => {}
                Ok(Err(error)) => tracing::warn!("{error}; it keeps its memory while the trainer takes a step"),
                Err(_) => tracing::warn!("{} does not sleep within {limit} s; it keeps its memory", engine.name()),
            }
        });
        join_all(sleeps).await;
    }

    /// Wakes engines that sleep, wholly or in part, for others to use them after the run. Waits for syncs in
    /// progress, which wake them. One that fails is logged.
    pub async fn wake(&self) {
        self.fleet.set_awake(true);
        let sleeping = self.fleet.staying().into_iter().filter(|place| self.fleet.may_sleep(*place));
        let wakes = sleeping.map(|place| async move {
            let (Some(engine), Some(last)) = (self.fleet.engine(place), self.fleet.last_sync(place)) else { return };
            let Some(control) = engine.weights() else { return };
            let limit = self.config.step_timeout;
            let free = timeout(Duration::try_from_secs_f64(limit).unwrap_or(Duration::MAX), last.lock()).await;
            let Ok(_free) = free else {
                tracing::warn!("{} is still being given weights after {limit} s; it may sleep on", engine.name());
                return;
            };
            if !self.fleet.may_sleep(place) {
                return;
            }
            let wake = async {
                control.wake(EngineMemory::Weights).await?;
                control.wake(EngineMemory::Cache).await?;
                control.resume().await
            };
            match timeout(WAKE, wake).await {
                Ok(Ok(())) => self.fleet.mark_asleep(place, false),
                Ok(Err(error)) => tracing::warn!("{error}; it may sleep on"),
                Err(_) => tracing::warn!("{} does not wake within {} s; it may sleep on", engine.name(), WAKE.as_secs()),
            }
        });
        join_all(wakes).await;
    }

    /// Brings engines without the newest version to it, except those that may skip it, and those that have
    /// failed repeatedly and rest. Returns `None` if there are none.
    pub async fn catch_up(&self) -> Option<SyncReport> {
        let update = self.fleet.offered().filter(|_| !self.fleet.is_asleep())?;
        self.retire();
        self.look().await;
        let holds = |place| self.fleet.served(place).is_none_or(|served| served.version >= update.version);
        let mut behind = self.fleet.behind();
        behind.extend(self.fleet.serving().into_iter().filter(|place| !holds(*place)));
        let behind = behind.into_iter().filter_map(|place| self.try_free(place));
        let rests = |(_, last): &Free| last.rests_until.is_some_and(|until| Instant::now() < until);
        let behind: Vec<Free> = behind.filter(|free| !self.may_skip(free, update.version) && !rests(free)).collect();
        if behind.is_empty() { None } else { Some(self.bring(behind, update).await) }
    }

    /// The engine at `place`, unless a sync of it is in progress.
    fn try_free(&self, place: usize) -> Option<Free> {
        Some((place, self.fleet.last_sync(place)?.try_lock_owned().ok()?))
    }

    /// Returns true if the engine continues with its version for a while instead of loading this one:
    /// its last load came late, and it will not be as old as the bound.
    fn may_skip(&self, (place, last): &Free, version: Version) -> bool {
        let newer = |served: Arc<Update>| served.version + self.max_lag > version;
        let serves = self.fleet.is_serving(*place) && self.fleet.served(*place).is_some_and(newer);
        serves && last.serves_until.is_some_and(|until| Instant::now() < until)
    }

    /// Engines that are to load a version. If all that get work may skip it, the one that has
    /// served its version longest does not.
    fn due(&self, free: Vec<Free>, version: Version) -> Vec<Free> {
        let (mut resting, mut due): (Vec<Free>, Vec<Free>) = free.into_iter().partition(|free| self.may_skip(free, version));
        resting.sort_by_key(|(_, last)| last.serves_until);
        if !due.iter().any(|(place, _)| self.fleet.is_serving(*place)) && !resting.is_empty() {
            due.push(resting.swap_remove(0));
        }
        due
    }

    /// Waits for engines without a sync in progress.
    async fn free(&self) -> Result<Vec<Free>, EngineError> {
        let places = self.fleet.reachable();
        let engines: Vec<_> = places.iter().filter_map(|place| Some((*place, self.fleet.last_sync(*place)?))).collect();
        if engines.is_empty() {
            return Err(EngineError::NoEngines);
        }
        let waits = engines.into_iter().map(|(place, last)| Box::pin(async move { (place, last.lock_owned().await) }));
        let (first, _, waits) = select_all(waits).await;
        drop(waits);
        let mut free: Vec<Free> = places.into_iter().filter_map(|place| self.try_free(place)).collect();
        free.push(first);
        free.sort_by_key(|(place, _)| *place);
        Ok(free)
    }

    /// Asks engines whether they still serve what they were given: an engine may have restarted
    /// unnoticed.
    async fn look(&self) {
        let asked = self.fleet.staying().into_iter().map(|place| tokio::spawn(look_for_restart(self.fleet.clone(), place)));
        join_all(asked.collect::<Vec<_>>()).await;
    }

    async fn bring(&self, engines: Vec<Free>, update: Arc<Update>) -> SyncReport {
        let (version, started) = (update.version, Instant::now());
        let (results, received) = mpsc::unbounded_channel();
        let places: Vec<usize> = engines.iter().map(|(place, _)| *place).collect();
        // Engines that lag get work under their version, so that no time is lost by going on without
        // them; those that joined or returned get the next version.
        let lag = self.max_lag > 0;
        let mut awaited: BTreeSet<usize> = (0..places.len()).collect();
        if lag && places.iter().any(|place| self.fleet.is_serving(*place)) {
            awaited.retain(|at| self.fleet.is_serving(places[*at]));
        }
        let results_of = engines.iter().map(|_| None).collect();
        let mut came = Came { manager: self, update: &update, received, results: results_of };
        for (at, free) in engines.into_iter().enumerate() {
            self.clone().start(free, update.clone(), at, results.clone());
        }
        drop(results);
        let mut until = None;
        loop {
            let next = match until {
                None => came.received.recv().await,
                Some(until) => timeout_at(until, came.received.recv()).await.ok().flatten(),
            };
            let Some((at, free, result)) = next else { break };
            if result.is_ok() && until.is_none() {
                until = Some(Instant::now() + if lag { 2 * started.elapsed() } else { started.elapsed() + GRACE });
            }
            came.results[at] = Some((free, result));
            awaited.remove(&at);
            if until.is_some() && awaited.is_empty() {
                break;
            }
        }
        came.close();
        let sums: Vec<_> = came.results.iter().map(|came| came.as_ref()?.1.as_ref().ok()?.1.clone()).collect();
        for (at, tensor) in outliers(&sums) {
            if let Some((_, result)) = &mut came.results[at] {
                *result = Err(self.isolated(places[at], "check", StepError::Unlike { tensor }));
            }
        }
        // While they waited for others, engines may have restarted.
        let looks = came.results.iter().zip(&places).map(|(came, place)| async {
            let Some((_, Ok(_))) = came else { return None };
            still_serves(&self.fleet, *place, &update).await.err()
        });
        for (at, error) in join_all(looks).await.into_iter().enumerate() {
            if let Some(((_, result), error)) = came.results[at].as_mut().zip(error) {
                *result = Err(self.isolated(places[at], "check", error));
            }
        }
        let time = started.elapsed();
        let recorded = |(place, came)| match came {
            Some((free, result)) => self.record(free, &update, result, false),
            None => {
                let late = self.isolated(place, "load", StepError::Late { seconds: time.as_secs_f64() });
                if lag {
                    tracing::debug!("{late}; it gets work under its version meanwhile");
                } else {
                    self.fleet.mark_late(place);
                    tracing::warn!("{late}");
                }
                Err(late)
            }
        };
        let came = std::mem::take(&mut came.results);
        SyncReport { version, time, engines: places.into_iter().zip(came).map(recorded).collect() }
    }

    /// Syncs one engine in a separate task, which contains panics of its client. The result is
    /// recorded even if it comes too late for the report.
    fn start(self, free: Free, update: Arc<Update>, at: usize, results: UnboundedSender<(usize, Free, EngineResult)>) {
        tokio::spawn(async move {
            // One that has lost this version has the same checksums again.
            let before = free.1.sums.as_ref().filter(|(version, _)| *version != update.version);
            let (place, before, given, manager) = (free.0, before.map(|(_, sums)| sums.clone()), update.clone(), self.clone());
            let task = async move {
                tokio::select! {
                    synced = sync_engine(&manager.fleet, place, &given, &manager.config, before.as_ref()) => synced,
                    error = manager.no_longer_answers(place) => Err(manager.isolated(place, "load", error.into())),
                }
            };
            let result = tokio::spawn(task).await;
            let result = result.unwrap_or_else(|error| Err(self.isolated(place, "load", StepError::Broke(error.to_string()))));
            if let Err(mpsc::error::SendError((_, free, result))) = results.send((at, free, result)) {
                self.record(free, &update, result, true).ok();
            }
        });
    }

    /// Waits until an engine that was well is lost, or does not answer two health checks in a row.
    /// Its connections may wait for minutes after it is well again; the next sync uses others.
    async fn no_longer_answers(&self, place: usize) -> RemoteError {
        let Some(engine) = self.fleet.engine(place).filter(|_| self.fleet.why_lost(place).is_none()) else {
            return std::future::pending().await;
        };
        let checks = async {
            let mut answered = true;
            loop {
                tokio::time::sleep(CHECK).await;
                match no_answer(engine.as_ref(), CHECK).await {
                    None => answered = true,
                    Some(_) if std::mem::take(&mut answered) => {}
                    Some(error) => {
                        self.fleet.mark_lost(place, error.clone());
                        return error;
                    }
                }
            }
        };
        tokio::select! {
            error = checks => error,
            error = self.fleet.until_lost(place) => error,
        }
    }

    /// Records the result of a sync, and returns the durations of its phases. If it came `late`, the
    /// engine may skip versions.
    fn record(
        &self,
        (place, mut last): Free,
        update: &Update,
        result: EngineResult,
        late: bool,
    ) -> Result<Vec<(&'static str, Duration)>, IsolatedEngine> {
        match result {
            Ok((times, sums)) => {
                last.sums = sums.map(|sums| (update.version, sums));
                (last.logged, last.failures, last.rests_until) = (None, 0, None);
                // Fetching and preparing do not keep it from its work.
                let pause = times.iter().filter(|(phase, _)| !BEFORE_THE_PAUSE.contains(phase));
                last.serves_until = late.then(|| Instant::now() + SERVES * pause.map(|(_, time)| *time).sum::<Duration>());
                self.fleet.mark_found(place);
                // Each engine has its own, so that its holders are counted.
                let served = Arc::new(update.without_tensors());
                if update.adapter {
                    // The engine may have lost it and loaded it again.
                    last.adapters.retain(|other| other.version != served.version);
                    last.adapters.push(served.clone());
                }
                self.fleet.mark_verified(place, served);
                Ok(times)
            }
            Err(isolated) => {
                if !isolated.leaves_its_weights(&self.fleet, place) {
                    self.fleet.mark_doubtful(place);
                    last.sums = None;
                }
                let why = isolated.to_string();
                if last.logged.as_ref() != Some(&why) {
                    tracing::warn!("{why}");
                }
                last.logged = Some(why);
                if matches!(isolated.error, StepError::Skipped { .. }) {
                    return Err(isolated);
                }
                last.failures = last.failures.saturating_add(1);
                let nth = last.failures.checked_sub(FAILURES - 1).filter(|nth| *nth > 0);
                let pause = nth.map(|nth| backoff(PAUSES[0], PAUSES[1], place as u64, nth));
                last.rests_until = pause.map(|pause| Instant::now() + pause);
                Err(isolated)
            }
        }
    }

    /// Unloads adapters that no request names, from engines without a sync in progress.
    fn retire(&self) {
        for (place, mut last) in self.fleet.staying().into_iter().filter_map(|place| self.try_free(place)) {
            for adapter in last.adapters.extract_if(.., |adapter| Arc::strong_count(adapter) == 1) {
                let fleet = self.fleet.clone();
                tokio::spawn(async move {
                    let Some(engine) = fleet.engine(place) else { return };
                    let Some(control) = engine.weights() else { return };
                    match timeout(LOOK, control.unload_adapter(&adapter.label())).await {
                        // A restarted engine does not know the adapter.
                        Ok(Err(error)) if !error.fault.passes() => tracing::debug!("{error}"),
                        Ok(Ok(())) => {}
                        Ok(Err(_)) | Err(_) => {
                            if let Some(last) = fleet.last_sync(place) {
                                last.lock().await.adapters.push(adapter);
                            }
                        }
                    }
                });
            }
        }
    }

    fn isolated(&self, place: usize, phase: &'static str, error: StepError) -> IsolatedEngine {
        IsolatedEngine { engine: self.fleet.name(place).to_string(), phase, error }
    }
}
