//! Shared state of a run's engines, for the fleet and the weight sync.
//!
//! An engine is *serving* and gets work, *behind* and waits for weights, or *lost* and waits for a
//! health check. The weight sync marks it as serving after verification. A lost engine may have
//! restarted with other weights, so it is behind when it returns, if it was ever given any. Engines
//! that were never given weights are assumed to serve the required ones.
//!
//! An engine that resumes under new weights is *on trial* until they are verified. If they are
//! refuted, its tokens of that time are invalid.

use std::fmt;
use std::sync::{Arc, OnceLock};

use tokio::sync::{Mutex, watch};

use super::meter::Meter;
use super::sync::{LastSync, Update};
use super::{InferenceEngine, RemoteError};
use crate::data::Version;
use crate::observe::Metrics;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EngineState {
    /// Gets work.
    Serving,
    /// Waits for weights.
    Behind,
    /// Waits for a health check.
    Lost,
}

/// Engines of a run. Clones share one state.
#[derive(Clone)]
pub struct FleetHandle {
    shared: Arc<Shared>,
}

struct Shared {
    engines: Vec<Arc<dyn InferenceEngine>>,
    standings: watch::Sender<Standings>,
    /// Held during the sync of an engine.
    last_syncs: Vec<Arc<Mutex<LastSync>>>,
    meter: OnceLock<Meter>,
}

/// States of all engines, by place.
#[derive(Default)]
pub(super) struct Standings {
    engines: Vec<Standing>,
    required: Option<Version>,
    /// Newest weights whose sync has started.
    offered: Option<Arc<Update>>,
}

#[derive(Clone, Default)]
struct Standing {
    /// Weights that were verified last. Those of an adapter are held by its requests, too.
    served: Option<Arc<Update>>,
    /// If true, the engine may have lost that version.
    doubtful: bool,
    /// If true, the engine samples under unverified weights.
    on_trial: bool,
    /// Number of refuted syncs.
    refuted: u64,
    lost: Option<RemoteError>,
}

impl FleetHandle {
    /// Creates a handle of engines that are assumed to be healthy.
    pub fn new(engines: Vec<Arc<dyn InferenceEngine>>) -> Self {
        let standings = Standings { engines: vec![Standing::default(); engines.len()], ..Standings::default() };
        let (standings, last_syncs) = (watch::Sender::new(standings), engines.iter().map(|_| Arc::default()).collect());
        FleetHandle { shared: Arc::new(Shared { engines, standings, last_syncs, meter: OnceLock::new() }) }
    }

    /// Reports the engines' activity and states to `metrics`. Only the first call has an effect.
    pub fn observe(&self, metrics: &Metrics) {
        let names = self.engines().iter().map(|engine| engine.name());
        if self.shared.meter.set(Meter::new(metrics, names)).is_ok() {
            self.change(|_| ());
        }
    }

    /// Records in the engines' metrics, if they are observed.
    pub(super) fn record(&self, record: impl FnOnce(&Meter)) {
        if let Some(meter) = self.shared.meter.get() {
            record(meter);
        }
    }

    /// Engines, by place.
    pub fn engines(&self) -> &[Arc<dyn InferenceEngine>] {
        &self.shared.engines
    }

    pub(super) fn state(&self, place: usize) -> EngineState {
        let standings = self.shared.standings.borrow();
        let Some(standing) = standings.engines.get(place) else { return EngineState::Lost };
        let old = standing.served.as_ref().is_some_and(|served| Some(served.version) < standings.required);
        match &standing.lost {
            Some(_) => EngineState::Lost,
            None if standing.doubtful || old => EngineState::Behind,
            None => EngineState::Serving,
        }
    }

    /// Returns true if the engine gets work.
    pub fn is_serving(&self, place: usize) -> bool {
        self.state(place) == EngineState::Serving
    }

    /// Weights that were verified last; those of an adapter if requests to the engine name one.
    pub fn served(&self, place: usize) -> Option<Arc<Update>> {
        self.of(place, |standing| standing.served.clone())
    }

    /// Error of a lost engine.
    pub fn why_lost(&self, place: usize) -> Option<RemoteError> {
        self.of(place, |standing| standing.lost.clone())
    }

    /// Places of reachable engines that wait for weights.
    pub fn behind(&self) -> Vec<usize> {
        (0..self.engines().len()).filter(|place| self.state(*place) == EngineState::Behind).collect()
    }

    pub(super) fn on_trial(&self, place: usize) -> bool {
        self.of(place, |standing| Some(standing.on_trial)).unwrap_or(false)
    }

    pub(super) fn refutations(&self, place: usize) -> u64 {
        self.of(place, |standing| Some(standing.refuted)).unwrap_or(0)
    }

    /// Records that the engine was verified to serve these weights.
    pub(super) fn mark_verified(&self, place: usize, weights: Arc<Update>) {
        self.mark(place, |standing| {
            (standing.served, standing.doubtful, standing.on_trial) = (Some(weights), false, false);
        });
    }

    /// Withholds work from the engine until its weights are verified. A trial continues.
    pub(super) fn mark_late(&self, place: usize) {
        self.mark(place, |standing| standing.doubtful = true);
    }

    /// Withholds work from the engine until its weights are verified. On trial, this refutes them.
    pub(super) fn mark_doubtful(&self, place: usize) {
        self.mark(place, |standing| {
            standing.doubtful = true;
            standing.refuted += u64::from(std::mem::take(&mut standing.on_trial));
        });
    }

    /// Records that the engine resumes under unverified weights.
    pub(super) fn start_trial(&self, place: usize) {
        self.mark(place, |standing| standing.on_trial = true);
    }

    pub(super) fn mark_lost(&self, place: usize, error: RemoteError) {
        self.mark(place, |standing| standing.lost = Some(error));
    }

    /// Records that the engine is reachable again. If it was ever given weights, it is behind.
    pub(super) fn mark_found(&self, place: usize) {
        self.mark(place, |standing| {
            if standing.lost.take().is_some() {
                standing.doubtful |= standing.served.is_some();
            }
        });
    }

    /// Withholds work from engines that serve an older version.
    pub(super) fn require(&self, version: Version) {
        self.change(|standings| standings.required = Some(version));
    }

    /// Records that a sync of these weights has started: engines may sample with them before they
    /// are verified.
    pub(super) fn offer(&self, update: &Arc<Update>) {
        self.shared.standings.send_if_modified(|standings| {
            standings.offered = Some(update.clone());
            false
        });
    }

    pub(super) fn offered(&self) -> Option<Arc<Update>> {
        self.shared.standings.borrow().offered.clone()
    }

    /// State of each engine's sync. It is locked during a sync.
    pub(super) fn last_syncs(&self) -> &[Arc<Mutex<LastSync>>] {
        &self.shared.last_syncs
    }

    /// Newest version that an engine serves, must serve or is loading.
    pub(super) fn newest(&self) -> Option<Version> {
        let standings = self.shared.standings.borrow();
        let served = standings.engines.iter().filter_map(|standing| Some(standing.served.as_ref()?.version)).max();
        served.max(standings.required).max(standings.offered.as_ref().map(|update| update.version))
    }

    pub(super) fn changes(&self) -> watch::Receiver<Standings> {
        self.shared.standings.subscribe()
    }

    fn of<T>(&self, place: usize, read: impl FnOnce(&Standing) -> Option<T>) -> Option<T> {
        self.shared.standings.borrow().engines.get(place).and_then(read)
    }

    fn mark(&self, place: usize, mark: impl FnOnce(&mut Standing)) {
        self.change(|standings| {
            if let Some(standing) = standings.engines.get_mut(place) {
                mark(standing);
            }
        });
    }

    fn change(&self, change: impl FnOnce(&mut Standings)) {
        self.shared.standings.send_modify(change);
        self.record(|meter| {
            for place in 0..self.engines().len() {
                meter.stands(place, self.state(place), self.served(place).map(|served| served.version));
            }
        });
    }
}

impl fmt::Debug for FleetHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let states = (0..self.engines().len()).map(|place| (self.engines()[place].name(), self.state(place)));
        f.debug_map().entries(states).finish()
    }
}
