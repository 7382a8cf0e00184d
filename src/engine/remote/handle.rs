//! Shared state of a run's engines, for the fleet and the weight sync.
//!
//! An engine is *serving* and gets work, *behind* and waits for weights, or *lost* and waits for a
//! health check. The weight sync calls [`FleetHandle::mark_serving`] after verification. A lost
//! engine may have restarted with other weights, so it is behind when it returns, if it was ever
//! given any. Engines that were never given weights are assumed to serve the required ones.
//!
//! An engine that resumes under new weights is *on trial* until they are verified. If they are
//! refuted, its tokens of that time are invalid.

use std::fmt;
use std::sync::{Arc, OnceLock};

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::watch;

use super::meter::Meter;
use super::sync::Release;
use super::{InferenceEngine, RemoteError};
use crate::data::Version;
use crate::observe::Metrics;

/// State of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineState {
    /// Gets work.
    Serving,
    /// Waits for weights.
    Behind,
    /// Waits for a health check.
    Lost,
}

impl EngineState {
    /// Name in metrics.
    pub fn word(self) -> &'static str {
        match self {
            EngineState::Serving => "serving",
            EngineState::Behind => "behind",
            EngineState::Lost => "lost",
        }
    }
}

/// Engines of a run. Clones share one state.
#[derive(Clone)]
pub struct FleetHandle {
    shared: Arc<Shared>,
}

struct Shared {
    engines: Vec<Arc<dyn InferenceEngine>>,
    state: Mutex<State>,
    changes: watch::Sender<u64>,
    meter: OnceLock<Meter>,
}

#[derive(Default)]
struct State {
    standings: Vec<Standing>,
    required: Option<Version>,
    /// Newest version whose sync has started.
    offered: Option<Version>,
}

#[derive(Clone, Default)]
struct Standing {
    /// Last verified version.
    served: Option<Version>,
    /// Loaded adapter, which requests name.
    adapter: Option<Arc<LoadedAdapter>>,
    /// If true, the engine may have lost that version.
    doubtful: bool,
    /// If true, the engine samples under unverified weights.
    on_trial: bool,
    /// Number of refuted syncs.
    refuted: u64,
    lost: Option<RemoteError>,
}

/// Adapter loaded by one engine. Adapter and folder are kept while this is held.
#[derive(Debug)]
pub struct LoadedAdapter {
    /// Name in requests.
    pub name: String,
    /// Folder of the adapter.
    pub release: Release,
}

impl FleetHandle {
    /// Creates a handle of engines that are assumed to be healthy.
    pub fn new(engines: Vec<Arc<dyn InferenceEngine>>) -> Self {
        let state = State { standings: vec![Standing::default(); engines.len()], required: None, offered: None };
        let changes = watch::Sender::new(0);
        FleetHandle { shared: Arc::new(Shared { engines, state: Mutex::new(state), changes, meter: OnceLock::new() }) }
    }

    /// Reports the engines' activity and states to `metrics`. Only the first call has an effect.
    pub fn observe(&self, metrics: &Metrics) {
        let names = self.engines().iter().map(|engine| engine.name());
        if self.shared.meter.set(Meter::new(metrics, names)).is_ok() {
            self.notify();
        }
    }

    pub(super) fn meter(&self) -> Option<&Meter> {
        self.shared.meter.get()
    }

    /// Engines, by place.
    pub fn engines(&self) -> &[Arc<dyn InferenceEngine>] {
        &self.shared.engines
    }

    /// Counts a failed request.
    pub(super) fn count_failure(&self, place: usize, error: &RemoteError) {
        if let Some(meter) = self.meter() {
            meter.error(place, &error.fault);
        }
    }

    /// State of an engine.
    pub fn state(&self, place: usize) -> EngineState {
        let state = self.lock();
        state.standings.get(place).map_or(EngineState::Lost, |standing| standing.state(state.required))
    }

    /// Last verified version.
    pub fn served(&self, place: usize) -> Option<Version> {
        self.lock().standings.get(place).and_then(|standing| standing.served)
    }

    /// Error of a lost engine.
    pub fn why_lost(&self, place: usize) -> Option<RemoteError> {
        self.lock().standings.get(place).and_then(|standing| standing.lost.clone())
    }

    /// Adapter that requests to the engine name.
    pub fn adapter(&self, place: usize) -> Option<Arc<LoadedAdapter>> {
        self.lock().standings.get(place).and_then(|standing| standing.adapter.clone())
    }

    /// Records that the engine was verified to serve this version.
    pub fn mark_serving(&self, place: usize, version: Version) {
        self.change(place, |standing| standing.verified(version, None));
    }

    /// Records that the engine was verified to serve this adapter.
    pub fn mark_serving_adapter(&self, place: usize, adapter: Arc<LoadedAdapter>) {
        self.change(place, |standing| standing.verified(adapter.release.version(), Some(adapter)));
    }

    /// Withholds work from the engine until [`FleetHandle::mark_serving`]. On trial, this refutes
    /// its weights.
    pub fn mark_doubtful(&self, place: usize) {
        self.change(place, Standing::mark_doubtful);
    }

    /// Records that the engine resumes under unverified weights.
    pub fn start_trial(&self, place: usize) {
        self.change(place, |standing| standing.on_trial = true);
    }

    /// Returns true if the engine samples under unverified weights.
    pub fn on_trial(&self, place: usize) -> bool {
        self.lock().standings.get(place).is_some_and(|standing| standing.on_trial)
    }

    /// Number of refuted syncs of the engine.
    pub fn refutations(&self, place: usize) -> u64 {
        self.lock().standings.get(place).map_or(0, |standing| standing.refuted)
    }

    /// Withholds work from engines that serve an older version.
    pub fn require(&self, version: Version) {
        self.lock().required = Some(version);
        self.notify();
    }

    /// Records that a sync of this version has started: engines may sample with it before
    /// [`FleetHandle::mark_serving`].
    pub fn offer(&self, version: Version) {
        let mut state = self.lock();
        state.offered = state.offered.max(Some(version));
    }

    /// Newest version that an engine serves, must serve or is loading.
    pub fn newest(&self) -> Option<Version> {
        let state = self.lock();
        state.standings.iter().map(|standing| standing.served).max().flatten().max(state.required).max(state.offered)
    }

    /// Records that the engine is unreachable.
    pub fn mark_lost(&self, place: usize, error: RemoteError) {
        self.change(place, |standing| standing.lost = Some(error));
    }

    /// Records that the engine is reachable again. If it was ever given weights, it is behind.
    pub fn mark_found(&self, place: usize) {
        self.change(place, |standing| {
            if standing.lost.take().is_some() {
                standing.doubtful |= standing.served.is_some();
            }
        });
    }

    /// Places of reachable engines that wait for weights.
    pub fn behind(&self) -> Vec<usize> {
        let state = self.lock();
        let standings = state.standings.iter().enumerate();
        standings.filter(|(_, standing)| standing.state(state.required) == EngineState::Behind).map(|(place, _)| place).collect()
    }

    /// Notifies of every change.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.shared.changes.subscribe()
    }

    fn change(&self, place: usize, change: impl FnOnce(&mut Standing)) {
        if let Some(standing) = self.lock().standings.get_mut(place) {
            change(standing);
        }
        self.notify();
    }

    fn notify(&self) {
        if let Some(meter) = self.meter() {
            (0..self.engines().len()).for_each(|place| meter.stands(place, self.state(place), self.served(place)));
        }
        self.shared.changes.send_modify(|count| *count += 1);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock()
    }
}

impl Standing {
    fn verified(&mut self, version: Version, adapter: Option<Arc<LoadedAdapter>>) {
        (self.served, self.adapter, self.doubtful, self.on_trial) = (Some(version), adapter, false, false);
    }

    fn mark_doubtful(&mut self) {
        self.doubtful = true;
        self.refuted += u64::from(std::mem::take(&mut self.on_trial));
    }

    fn state(&self, required: Option<Version>) -> EngineState {
        let old = self.served.is_some_and(|served| required.is_some_and(|required| served < required));
        match &self.lost {
            Some(_) => EngineState::Lost,
            None if self.doubtful || old => EngineState::Behind,
            None => EngineState::Serving,
        }
    }
}

impl fmt::Debug for FleetHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let states = (0..self.engines().len()).map(|place| (self.engines()[place].name(), self.state(place)));
        f.debug_map().entries(states).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Attempt, Ending, Fault, Pending, Tokens};
    use super::*;

    struct Nobody;

    impl InferenceEngine for Nobody {
        fn name(&self) -> String {
            "nobody".into()
        }

        fn generate<'a>(&'a self, _: &'a Attempt, _: &'a Tokens) -> Pending<'a, Ending> {
            Box::pin(async { Err(RemoteError::new("nobody", Fault::Unsupported { what: "anything" })) })
        }
    }

    fn two() -> FleetHandle {
        FleetHandle::new(vec![Arc::new(Nobody), Arc::new(Nobody)])
    }

    #[test]
    fn v4_an_engine_that_comes_back_gets_no_work_before_it_has_the_weights() {
        let fleet = two();
        let error = RemoteError::new("nobody", Fault::Unreachable { why: "gone".into() });
        (0..2).for_each(|place| fleet.mark_serving(place, 3));
        fleet.mark_lost(1, error);
        assert_eq!((fleet.state(0), fleet.state(1)), (EngineState::Serving, EngineState::Lost));
        fleet.mark_found(1);
        fleet.mark_found(0);
        assert_eq!((fleet.behind(), fleet.state(0)), (vec![1], EngineState::Serving));
        fleet.mark_serving(1, 3);
        assert_eq!(fleet.state(1), EngineState::Serving);
    }

    #[test]
    fn weights_are_refuted_where_an_engine_is_doubted_before_they_were_verified() {
        let fleet = two();
        fleet.start_trial(0);
        assert!(fleet.on_trial(0) && !fleet.on_trial(1));
        fleet.mark_serving(0, 1);
        fleet.mark_doubtful(0);
        assert_eq!((fleet.on_trial(0), fleet.refutations(0)), (false, 0), "they were verified before");
        fleet.start_trial(0);
        (0..2).for_each(|_| fleet.mark_doubtful(0));
        assert_eq!((fleet.on_trial(0), fleet.refutations(0)), (false, 1));
    }

    #[test]
    fn engines_that_serve_an_older_version_than_required_are_behind_and_unknown_ones_are_not() {
        let fleet = two();
        fleet.mark_serving(0, 3);
        fleet.require(4);
        assert_eq!((fleet.behind(), fleet.state(1), fleet.newest()), (vec![0], EngineState::Serving, Some(4)));
        fleet.offer(7);
        assert_eq!((fleet.newest(), fleet.state(1)), (Some(7), EngineState::Serving), "what is offered is not required yet");
    }
}
