//! Shared state of a run's engines, for the fleet and the weight sync.
//!
//! Each engine has a *place*, a number that no other engine gets, even after it left. An engine is
//! *serving* and gets work, *behind* and waits for weights, *lost* and waits for a health check, or
//! *leaving* and only finishes its work. The weight sync marks it as serving after verification. A
//! lost engine may have restarted with other weights, so it is behind when it returns, if it was
//! ever given any. Engines of the start that were never given weights are assumed to serve the
//! required ones; an engine that joins later is behind.
//!
//! An engine that resumes under new weights is *on trial* until they are verified. If they are
//! refuted, its tokens of that time are invalid.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use tokio::sync::{Mutex, watch};
use tokio::time::timeout;

use super::meter::Meter;
use super::sync::{LastSync, Update};
use super::{Fault, InferenceEngine, RemoteError};
use crate::data::Version;
use crate::net::now;
use crate::observe::Metrics;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EngineState {
    /// Gets work.
    Serving,
    /// Waits for weights.
    Behind,
    /// Waits for a health check.
    Lost,
    /// Finishes its work and gets no more.
    Leaving,
}

/// Engines of a run. Clones share one state.
#[derive(Clone)]
pub struct FleetHandle {
    shared: Arc<Shared>,
}

struct Shared {
    standings: watch::Sender<Standings>,
    meter: OnceLock<Meter>,
}

/// Engines and their states, by place.
#[derive(Default)]
pub(super) struct Standings {
    members: BTreeMap<usize, Member>,
    /// Place of the next engine.
    next: usize,
    required: Option<Version>,
    /// Newest weights whose sync has started.
    offered: Option<Arc<Update>>,
    /// Number of refuted syncs of each place, also of engines that left.
    refuted: BTreeMap<usize, u64>,
    /// If true, engines are left alone until the next sync, which wakes them.
    asleep: bool,
    /// If true, the run has ended, and no engine is put to sleep until the next sync.
    stays_awake: bool,
}

struct Member {
    engine: Arc<dyn InferenceEngine>,
    name: Arc<str>,
    /// Held during the sync of the engine.
    last_sync: Arc<Mutex<LastSync>>,
    /// Weights that were verified last. Those of an adapter are held by its requests, too.
    served: Option<Arc<Update>>,
    /// If true, the engine may have lost that version.
    doubtful: bool,
    /// If true, the engine samples under unverified weights.
    on_trial: bool,
    /// If true, the engine may sleep, wholly or in part.
    asleep: bool,
    /// Looks in progress that ask the engine whether it restarted.
    looks: usize,
    /// End of its last sync.
    synced: Option<Instant>,
    leaving: bool,
    lost: Option<RemoteError>,
}

impl Standings {
    /// Adds an engine, and returns its place.
    fn add(&mut self, engine: Arc<dyn InferenceEngine>, doubtful: bool) -> usize {
        let (name, place) = (engine.name().into(), self.next);
        let (last_sync, served, synced, lost) = (Arc::default(), None, None, None);
        let (on_trial, asleep, leaving, looks) = (false, false, false, 0);
        let member = Member { engine, name, last_sync, served, doubtful, on_trial, asleep, looks, synced, leaving, lost };
        self.members.insert(place, member);
        self.next += 1;
        place
    }

    fn state(&self, member: &Member) -> EngineState {
        let old = member.served.as_ref().is_some_and(|served| Some(served.version) < self.required);
        match &member.lost {
            _ if member.leaving => EngineState::Leaving,
            Some(_) => EngineState::Lost,
            None if member.doubtful || old => EngineState::Behind,
            None => EngineState::Serving,
        }
    }
}

impl FleetHandle {
    /// Creates a handle of engines that are assumed to be healthy.
    pub fn new(engines: Vec<Arc<dyn InferenceEngine>>) -> Self {
        let mut standings = Standings::default();
        for engine in engines {
            standings.add(engine, false);
        }
        FleetHandle { shared: Arc::new(Shared { standings: watch::Sender::new(standings), meter: OnceLock::new() }) }
    }

    /// Adds an engine, and returns its place. It gets work once the weight sync has brought it the
    /// newest version.
    pub fn join(&self, engine: Arc<dyn InferenceEngine>) -> usize {
        let mut place = 0;
        self.change(|standings| place = standings.add(engine, true));
        place
    }

    /// Withholds work and new weights from an engine, which finishes what it has begun.
    pub fn leave(&self, place: usize) {
        self.mark(place, |member| member.leaving = true);
    }

    /// Removes an engine. Its unfinished samples continue on others. If it is on trial, its tokens of
    /// that time are invalid.
    pub fn remove(&self, place: usize) {
        let name = self.name(place);
        self.change(|standings| {
            if standings.members.remove(&place).is_some_and(|member| member.on_trial) {
                *standings.refuted.entry(place).or_default() += 1;
            }
        });
        if let Some(meter) = self.shared.meter.get()
            && self.read(|standings| standings.members.values().all(|member| member.name != name))
        {
            meter.left(&name);
        }
    }

    /// Reports the engines' activity and states to `metrics`. Only the first call has an effect.
    pub fn observe(&self, metrics: &Metrics) {
        if self.shared.meter.set(Meter::new(metrics)).is_ok() {
            self.change(|_| ());
        }
    }

    /// Records in the metrics of the engine of this name at `place`, if they are observed.
    pub(super) fn record(&self, place: usize, record: impl FnOnce(&Meter, &str)) {
        if let Some(meter) = self.shared.meter.get()
            && let Some(name) = self.of(place, |member| Some(member.name.clone()))
        {
            record(meter, &name);
        }
    }

    /// Engines, by place.
    pub fn engines(&self) -> Vec<Arc<dyn InferenceEngine>> {
        self.read(|standings| standings.members.values().map(|member| member.engine.clone()).collect())
    }

    /// Places of the engines.
    pub fn places(&self) -> Vec<usize> {
        self.read(|standings| standings.members.keys().copied().collect())
    }

    /// The engine at `place`; `None` after it left.
    pub fn engine(&self, place: usize) -> Option<Arc<dyn InferenceEngine>> {
        self.of(place, |member| Some(member.engine.clone()))
    }

    /// Name of the engine at `place`.
    pub(super) fn name(&self, place: usize) -> Arc<str> {
        self.of(place, |member| Some(member.name.clone())).unwrap_or_else(|| "an engine that left".into())
    }

    /// State of the engine at `place`; an engine that left is leaving.
    pub(super) fn state(&self, place: usize) -> EngineState {
        self.read(|standings| standings.members.get(&place).map_or(EngineState::Leaving, |member| standings.state(member)))
    }

    /// Returns true if the engine gets work.
    pub fn is_serving(&self, place: usize) -> bool {
        self.state(place) == EngineState::Serving
    }

    /// Weights that were verified last; those of an adapter if requests to the engine name one.
    pub fn served(&self, place: usize) -> Option<Arc<Update>> {
        self.of(place, |member| member.served.clone())
    }

    /// Error of a lost engine.
    pub fn why_lost(&self, place: usize) -> Option<RemoteError> {
        self.of(place, |member| member.lost.clone())
    }

    /// Places of reachable engines that wait for weights.
    pub fn behind(&self) -> Vec<usize> {
        self.places_that(|state| state == EngineState::Behind)
    }

    /// Places of engines that get work.
    pub(super) fn serving(&self) -> BTreeSet<usize> {
        self.places_that(|state| state == EngineState::Serving).into_iter().collect()
    }

    /// Places of engines that are not leaving.
    pub(super) fn staying(&self) -> Vec<usize> {
        self.places_that(|state| state != EngineState::Leaving)
    }

    /// Places of engines that can be given weights: those that are not lost, if there are any.
    pub(super) fn reachable(&self) -> Vec<usize> {
        let well = self.places_that(|state| matches!(state, EngineState::Serving | EngineState::Behind));
        if well.is_empty() { self.staying() } else { well }
    }

    fn places_that(&self, are: impl Fn(EngineState) -> bool) -> Vec<usize> {
        self.read(|standings| {
            let chosen = standings.members.iter().filter(|(_, member)| are(standings.state(member)));
            chosen.map(|(place, _)| *place).collect()
        })
    }

    pub(super) fn on_trial(&self, place: usize) -> bool {
        self.of(place, |member| Some(member.on_trial)).unwrap_or(false)
    }

    /// Records that the engine is asked whether it restarted, until the result is dropped.
    pub(super) fn begin_look(&self, place: usize) -> Look {
        self.shared.standings.send_if_modified(|standings| {
            standings.members.get_mut(&place).into_iter().for_each(|member| member.looks += 1);
            false
        });
        Look { fleet: self.clone(), place }
    }

    /// Returns true while the engine is asked whether it restarted.
    pub(super) fn is_looked_at(&self, place: usize) -> bool {
        self.of(place, |member| Some(member.looks > 0)).unwrap_or(false)
    }

    pub(super) fn refutations(&self, place: usize) -> u64 {
        self.read(|standings| standings.refuted.get(&place).copied().unwrap_or(0))
    }

    /// Records that the engine was verified to serve these weights.
    pub(super) fn mark_verified(&self, place: usize, weights: Arc<Update>) {
        self.mark(place, |member| {
            (member.served, member.doubtful, member.on_trial) = (Some(weights), false, false);
            member.synced = Some(now());
        });
    }

    /// Withholds work from the engine until its weights are verified. A trial continues.
    pub(super) fn mark_late(&self, place: usize) {
        self.mark(place, |member| member.doubtful = true);
    }

    /// Withholds work from the engine until its weights are verified. On trial, this refutes them.
    pub(super) fn mark_doubtful(&self, place: usize) {
        self.change(|standings| {
            let Some(member) = standings.members.get_mut(&place) else { return };
            member.doubtful = true;
            if std::mem::take(&mut member.on_trial) {
                *standings.refuted.entry(place).or_default() += 1;
            }
        });
    }

    pub(super) fn is_doubtful(&self, place: usize) -> bool {
        self.of(place, |member| Some(member.doubtful)).unwrap_or(false)
    }

    /// Withholds work from the engine, which has lost the weights that it was given: it may have
    /// restarted unnoticed. What it is sampling is invalid.
    pub(super) fn mark_restarted(&self, place: usize) {
        self.change(|standings| {
            let Some(member) = standings.members.get_mut(&place) else { return };
            (member.doubtful, member.on_trial) = (true, false);
            *standings.refuted.entry(place).or_default() += 1;
        });
    }

    /// Records that the engine resumes under unverified weights.
    pub(super) fn start_trial(&self, place: usize) {
        self.mark(place, |member| member.on_trial = true);
    }

    pub(super) fn mark_lost(&self, place: usize, error: RemoteError) {
        self.mark(place, |member| member.lost = Some(error));
    }

    /// Records that the engine is reachable again. If it was ever given weights, it waits for weights.
    pub(super) fn mark_found(&self, place: usize) {
        self.mark(place, |member| {
            if member.lost.take().is_some() {
                member.doubtful |= member.served.is_some();
            }
        });
    }

    /// Waits until the engine is lost, and returns why. Cancel-safe.
    pub(super) async fn until_lost(&self, place: usize) -> RemoteError {
        let mut changes = self.changes();
        let lost = |standings: &Standings| standings.members.get(&place).is_some_and(|member| member.lost.is_some());
        // Can't fail: the sender lives in `self`.
        drop(changes.wait_for(lost).await);
        let gone = || RemoteError::new(self.name(place).as_ref(), Fault::Broke("it is gone".into()));
        self.why_lost(place).unwrap_or_else(gone)
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

    /// Records that the engine at `place` is put to sleep. Returns false if it stays awake.
    pub(super) fn begin_sleep(&self, place: usize) -> bool {
        let mut begins = false;
        self.change(|standings| {
            begins = !standings.stays_awake;
            standings.members.get_mut(&place).into_iter().filter(|_| begins).for_each(|member| member.asleep = true);
        });
        begins
    }

    /// Records whether the engine at `place` may sleep, wholly or in part.
    pub(super) fn mark_asleep(&self, place: usize, asleep: bool) {
        self.mark(place, |member| member.asleep = asleep);
    }

    /// Returns true if the engine at `place` may sleep, wholly or in part.
    pub(super) fn may_sleep(&self, place: usize) -> bool {
        self.of(place, |member| Some(member.asleep)).unwrap_or(false)
    }

    /// Records that the engines are put to sleep, unless they stay awake.
    pub(super) fn set_asleep(&self) {
        self.shared.standings.send_if_modified(|standings| {
            standings.asleep = !standings.stays_awake;
            false
        });
    }

    /// Records that the engines are woken. If `stays_awake` is true, none is put to sleep until the
    /// next call.
    pub(super) fn set_awake(&self, stays_awake: bool) {
        self.shared.standings.send_if_modified(|standings| {
            (standings.asleep, standings.stays_awake) = (false, stays_awake);
            false
        });
    }

    pub(super) fn is_asleep(&self) -> bool {
        self.shared.standings.borrow().asleep
    }

    pub(super) fn offered(&self) -> Option<Arc<Update>> {
        self.shared.standings.borrow().offered.clone()
    }

    /// State of the engine's sync. It is locked during a sync.
    pub(super) fn last_sync(&self, place: usize) -> Option<Arc<Mutex<LastSync>>> {
        self.of(place, |member| Some(member.last_sync.clone()))
    }

    /// Returns true during a sync of the engine, or a look at its label.
    pub(super) fn is_syncing(&self, place: usize) -> bool {
        // The sync's guard holds the lock, too.
        self.of(place, |member| Some(Arc::strong_count(&member.last_sync) > 1)).unwrap_or(false)
    }

    /// Time until which a sync explains the engine's silence: now, or the end of its last sync.
    pub(super) fn synced_until(&self, place: usize) -> Option<Instant> {
        if self.is_syncing(place) { Some(now()) } else { self.of(place, |member| member.synced) }
    }

    /// End of the engine's last sync, by which its weights were verified.
    pub(super) fn verified(&self, place: usize) -> Option<Instant> {
        self.of(place, |member| member.synced)
    }

    /// Newest version that an engine serves, must serve or is loading.
    pub(super) fn newest(&self) -> Option<Version> {
        self.read(|standings| {
            let served = standings.members.values().filter_map(|member| Some(member.served.as_ref()?.version)).max();
            served.max(standings.required).max(standings.offered.as_ref().map(|update| update.version))
        })
    }

    pub(super) fn changes(&self) -> watch::Receiver<Standings> {
        self.shared.standings.subscribe()
    }

    fn read<T>(&self, read: impl FnOnce(&Standings) -> T) -> T {
        read(&self.shared.standings.borrow())
    }

    fn of<T>(&self, place: usize, read: impl FnOnce(&Member) -> Option<T>) -> Option<T> {
        self.read(|standings| standings.members.get(&place).and_then(read))
    }

    fn mark(&self, place: usize, mark: impl FnOnce(&mut Member)) {
        self.shared.standings.send_modify(|standings| {
            if let Some(member) = standings.members.get_mut(&place) {
                mark(member);
            }
        });
        self.report(|of| of == place);
    }

    fn change(&self, change: impl FnOnce(&mut Standings)) {
        self.shared.standings.send_modify(change);
        self.report(|_| true);
    }

    /// Records the states of the engines at places that `changed`.
    fn report(&self, changed: impl Fn(usize) -> bool) {
        let Some(meter) = self.shared.meter.get() else { return };
        self.read(|standings| {
            for (_, member) in standings.members.iter().filter(|(place, _)| changed(**place)) {
                let served = member.served.as_ref().map(|served| served.version);
                meter.stands(&member.name, standings.state(member), served);
            }
            meter.count(standings.members.values().map(|member| standings.state(member)));
        });
    }
}

/// A look at an engine, from [`FleetHandle::begin_look`].
pub(super) struct Look {
    fleet: FleetHandle,
    place: usize,
}

impl Drop for Look {
    fn drop(&mut self) {
        self.fleet.mark(self.place, |member| member.looks -= 1);
    }
}

/// Error of an engine that does not answer a health check within `limit`. Any answer is one, because
/// some servers have no route for it.
pub(super) async fn no_answer(engine: &dyn InferenceEngine, limit: Duration) -> Option<RemoteError> {
    let late = || Fault::Late { what: "a health check".to_owned(), seconds: limit.as_secs_f64() };
    let error = match timeout(limit, engine.healthy(limit)).await {
        Ok(Ok(())) => return None,
        Ok(Err(error)) => error,
        Err(_) => RemoteError::new(engine.name(), late()),
    };
    matches!(error.fault, Fault::Unreachable(_) | Fault::Broke(_) | Fault::Late { .. }).then_some(error)
}

impl fmt::Debug for FleetHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.read(|standings| {
            let states = standings.members.values().map(|member| (&member.name, standings.state(member)));
            f.debug_map().entries(states).finish()
        })
    }
}
