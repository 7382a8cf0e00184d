//! Which engines there are and how they stand: shared by whoever gives them work and whoever gives them weights.
//!
//! An engine is *serving* and gets work, *behind* and waits for weights, or *lost* and waits to be reached again. Whoever gives it weights says
//! [`FleetHandle::mark_serving`] once that was verified. One that was lost may have been started anew, and with whatever weights its folder has: if it was
//! ever given any, it is behind when it comes back. Engines of which nobody ever said what they serve are taken to serve what they should.
//!
//! An engine that goes on under new weights is *on trial* until they were verified. If they are refuted, whatever it made meanwhile is worth nothing.

use std::fmt;
use std::sync::{Arc, OnceLock};

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::watch;

use super::meter::Meter;
use super::sync::Release;
use super::{InferenceEngine, RemoteError};
use crate::data::Version;
use crate::observe::Metrics;

/// How an engine stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineState {
    /// It gets work.
    Serving,
    /// It gets none until it was given the weights that it should have.
    Behind,
    /// It gets none until it can be reached.
    Lost,
}

impl EngineState {
    /// What it is called.
    pub fn word(self) -> &'static str {
        match self {
            EngineState::Serving => "serving",
            EngineState::Behind => "behind",
            EngineState::Lost => "lost",
        }
    }
}

/// The engines of a run. Clones share one state.
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
    /// The newest that was begun to be given.
    offered: Option<Version>,
}

#[derive(Clone, Default)]
struct Standing {
    /// What it was last verified to serve.
    served: Option<Version>,
    /// Where that is an adapter: the one that requests name.
    adapter: Option<Arc<LoadedAdapter>>,
    /// Whether it may have lost that since.
    doubtful: bool,
    /// Whether it samples under weights that nobody has verified yet.
    on_trial: bool,
    /// How often such weights turned out to be wrong.
    refuted: u64,
    lost: Option<RemoteError>,
}

/// An adapter that one engine has loaded. It stays there, and its folder stays, while this is held.
#[derive(Debug)]
pub struct LoadedAdapter {
    /// What requests call it.
    pub name: String,
    /// Where it was loaded from.
    pub release: Release,
}

impl FleetHandle {
    /// Of these engines, none of which is known to be in any trouble.
    pub fn new(engines: Vec<Arc<dyn InferenceEngine>>) -> Self {
        let state = State { standings: vec![Standing::default(); engines.len()], required: None, offered: None };
        let changes = watch::Sender::new(0);
        FleetHandle { shared: Arc::new(Shared { engines, state: Mutex::new(state), changes, meter: OnceLock::new() }) }
    }

    /// Counts there, engine by engine, what they do and how they stand. The first to ask is served.
    pub fn observe(&self, metrics: &Metrics) {
        let names = self.engines().iter().map(|engine| engine.name());
        if self.shared.meter.set(Meter::new(metrics, names)).is_ok() {
            self.notify();
        }
    }

    pub(super) fn meter(&self) -> Option<&Meter> {
        self.shared.meter.get()
    }

    /// The engines. Their places here are what they are named by below.
    pub fn engines(&self) -> &[Arc<dyn InferenceEngine>] {
        &self.shared.engines
    }

    /// A request to it failed, which is counted.
    pub(super) fn count_failure(&self, place: usize, error: &RemoteError) {
        if let Some(meter) = self.meter() {
            meter.error(place, &error.fault);
        }
    }

    /// How one stands.
    pub fn state(&self, place: usize) -> EngineState {
        let state = self.lock();
        state.standings.get(place).map_or(EngineState::Lost, |standing| standing.state(state.required))
    }

    /// The version that it was last verified to serve, if any.
    pub fn served(&self, place: usize) -> Option<Version> {
        self.lock().standings.get(place).and_then(|standing| standing.served)
    }

    /// Why it is lost, if it is.
    pub fn why_lost(&self, place: usize) -> Option<RemoteError> {
        self.lock().standings.get(place).and_then(|standing| standing.lost.clone())
    }

    /// The adapter that requests to it name, if it serves one.
    pub fn adapter(&self, place: usize) -> Option<Arc<LoadedAdapter>> {
        self.lock().standings.get(place).and_then(|standing| standing.adapter.clone())
    }

    /// It was verified to serve this version.
    pub fn mark_serving(&self, place: usize, version: Version) {
        self.change(place, |standing| standing.verified(version, None));
    }

    /// It was verified to serve this adapter to requests that name it.
    pub fn mark_serving_adapter(&self, place: usize, adapter: Arc<LoadedAdapter>) {
        self.change(place, |standing| standing.verified(adapter.release.version(), Some(adapter)));
    }

    /// It may not serve what it should: it gets no work until [`FleetHandle::mark_serving`].
    pub fn mark_doubtful(&self, place: usize) {
        self.change(place, Standing::mark_doubtful);
    }

    /// It is about to go on under weights that nobody has verified yet.
    pub fn start_trial(&self, place: usize) {
        self.change(place, |standing| standing.on_trial = true);
    }

    /// Whether it samples under weights that nobody has verified yet.
    pub fn on_trial(&self, place: usize) -> bool {
        self.lock().standings.get(place).is_some_and(|standing| standing.on_trial)
    }

    /// How often the weights that it went on under turned out to be wrong, which [`FleetHandle::mark_doubtful`] says of one on trial.
    pub fn refutations(&self, place: usize) -> u64 {
        self.lock().standings.get(place).map_or(0, |standing| standing.refuted)
    }

    /// Engines known to serve an older version get no work any more.
    pub fn require(&self, version: Version) {
        self.lock().required = Some(version);
        self.notify();
    }

    /// Engines are being given this version: they may sample with it before [`FleetHandle::mark_serving`] says that it was verified. Versions between it
    /// and the one before may never be given at all.
    pub fn offer(&self, version: Version) {
        let mut state = self.lock();
        state.offered = state.offered.max(Some(version));
    }

    /// The newest version that an engine serves, has to, or is being given.
    pub fn newest(&self) -> Option<Version> {
        let state = self.lock();
        state.standings.iter().map(|standing| standing.served).max().flatten().max(state.required).max(state.offered)
    }

    /// It can't be reached.
    pub fn mark_lost(&self, place: usize, error: RemoteError) {
        self.change(place, |standing| standing.lost = Some(error));
    }

    /// It was reached again. If it was ever given weights it is behind now.
    pub fn mark_found(&self, place: usize) {
        self.change(place, |standing| {
            if standing.lost.take().is_some() {
                standing.doubtful |= standing.served.is_some();
            }
        });
    }

    /// The engines that can be reached and wait for weights.
    pub fn behind(&self) -> Vec<usize> {
        let state = self.lock();
        let standings = state.standings.iter().enumerate();
        standings.filter(|(_, standing)| standing.state(state.required) == EngineState::Behind).map(|(place, _)| place).collect()
    }

    /// Changes whenever anything here does.
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
