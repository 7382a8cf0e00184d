//! Where a worker's time goes, exactly (law F4).
//!
//! A [`Meter`] is always in one [`State`]. Changing it reads the clock once and books the time since the last change, so the
//! states' sum is the wall-clock to the nanosecond, by construction. An item that is there without waiting costs no clock read.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use parking_lot::{Mutex, MutexGuard};
use serde::Serialize;

use super::Simulation;
use super::crew::Presence;
use super::wait::block_on;

/// What a worker is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// In the stage's own code: computing, or waiting for something that the engine does not know of.
    Busy,
    /// Waiting for input.
    Starved,
    /// Waiting for room downstream, or for its turn where order is restored.
    Blocked,
    /// A source waiting for admission.
    Credit,
    /// Waiting for weights.
    Weights,
}

impl State {
    /// All states, in the order of reports.
    pub const ALL: [State; 5] = [State::Busy, State::Starved, State::Blocked, State::Credit, State::Weights];

    /// The state's name in lower case.
    pub fn name(self) -> &'static str {
        match self {
            State::Busy => "busy",
            State::Starved => "starved",
            State::Blocked => "blocked",
            State::Credit => "credit",
            State::Weights => "weights",
        }
    }
}

/// Nanoseconds by state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Times {
    /// Nanoseconds in [`State::Busy`].
    pub busy: u64,
    /// Nanoseconds in [`State::Starved`].
    pub starved: u64,
    /// Nanoseconds in [`State::Blocked`].
    pub blocked: u64,
    /// Nanoseconds in [`State::Credit`].
    pub credit: u64,
    /// Nanoseconds in [`State::Weights`].
    pub weights: u64,
}

impl Times {
    /// Nanoseconds in `state`.
    pub fn of(&self, state: State) -> u64 {
        match state {
            State::Busy => self.busy,
            State::Starved => self.starved,
            State::Blocked => self.blocked,
            State::Credit => self.credit,
            State::Weights => self.weights,
        }
    }

    /// The sum of all states.
    pub fn total(&self) -> u64 {
        State::ALL.iter().map(|&state| self.of(state)).sum()
    }

    /// Books `nanos` to `state`.
    pub(crate) fn add(&mut self, state: State, nanos: u64) {
        *match state {
            State::Busy => &mut self.busy,
            State::Starved => &mut self.starved,
            State::Blocked => &mut self.blocked,
            State::Credit => &mut self.credit,
            State::Weights => &mut self.weights,
        } += nanos;
    }
}

/// The run's time in nanoseconds since it began, and how its workers wait: on this machine or on a simulated one.
#[derive(Clone, Debug)]
pub(crate) enum Clock {
    Machine(Instant),
    Simulated(Simulation),
}

impl Clock {
    pub(crate) fn start() -> Self {
        Clock::Machine(Instant::now())
    }

    pub(crate) fn now(&self) -> u64 {
        match self {
            Clock::Machine(began) => u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX),
            Clock::Simulated(simulation) => simulation.time(),
        }
    }

    pub(crate) fn is_simulated(&self) -> bool {
        matches!(self, Clock::Simulated(_))
    }

    /// Waits for a future on the worker's thread.
    pub(crate) fn block_on<F: Future>(&self, future: F) -> F::Output {
        match self {
            Clock::Machine(_) => block_on(future),
            Clock::Simulated(simulation) => simulation.block_on(future),
        }
    }

    /// Before a worker waits, and when it ends.
    fn settle(&self) {
        if let Clock::Simulated(simulation) = self {
            simulation.settle();
        }
    }

    /// What a stage takes for an item, where that has to be said.
    pub(crate) fn work(&self, stage: &str, tokens: impl FnOnce() -> usize) {
        if let Clock::Simulated(simulation) = self {
            simulation.work(stage, tokens);
        }
    }
}

/// One worker's counters and time. Written by the worker alone, read by anyone at any time.
#[derive(Debug)]
pub(crate) struct Meter {
    pub(crate) clock: Clock,
    /// Its part in the crew; on a simulated machine, the machine knows who waits.
    presence: Option<Arc<Presence>>,
    ledger: Mutex<Ledger>,
    /// The version of weights that it waited for last.
    wanted: AtomicU64,
    pub(crate) items_in: AtomicU64,
    pub(crate) items_out: AtomicU64,
    pub(crate) tokens_in: AtomicU64,
    pub(crate) tokens_out: AtomicU64,
}

#[derive(Debug, Default)]
struct Ledger {
    /// `None` before the worker begins and after it ended.
    state: Option<State>,
    began: u64,
    since: u64,
    spent: Times,
}

impl Ledger {
    fn book(&mut self, now: u64) {
        if let Some(state) = self.state {
            self.spent.add(state, now - self.since);
        }
        self.since = now;
    }
}

impl Meter {
    pub(crate) fn new(clock: Clock, presence: Option<Arc<Presence>>) -> Self {
        Meter {
            clock,
            presence,
            ledger: Mutex::default(),
            wanted: AtomicU64::new(0),
            items_in: AtomicU64::new(0),
            items_out: AtomicU64::new(0),
            tokens_in: AtomicU64::new(0),
            tokens_out: AtomicU64::new(0),
        }
    }

    /// The worker's time begins, busy.
    pub(crate) fn begin(&self) {
        let mut ledger = self.ledger();
        let now = self.clock.now();
        *ledger = Ledger { state: Some(State::Busy), began: now, since: now, spent: Times::default() };
    }

    /// The worker's time ends.
    pub(crate) fn end(&self) {
        self.clock.settle();
        let mut ledger = self.ledger();
        ledger.book(self.clock.now());
        ledger.state = None;
    }

    /// Awaits `future` in `state`, busy again afterwards.
    pub(crate) async fn wait<F: Future>(&self, state: State, future: F) -> F::Output {
        self.clock.settle();
        self.enter(state);
        let _waiting = Waiting(self);
        match &self.presence {
            Some(presence) => presence.wait_for(future).await,
            None => future.await,
        }
    }

    /// The same for weights of this version or a newer one.
    pub(crate) async fn wait_weights<F: Future>(&self, at_least: u64, future: F) -> F::Output {
        self.wanted.store(at_least, Relaxed);
        self.wait(State::Weights, future).await
    }

    /// Awaits a wait on the worker's thread.
    pub(crate) fn block_on<F: Future>(&self, future: F) -> F::Output {
        match &self.presence {
            Some(presence) => block_on(presence.attend(future)),
            None => self.clock.block_on(future),
        }
    }

    /// Awaits all of a task.
    pub(crate) async fn attend<F: Future>(&self, future: F) -> F::Output {
        match &self.presence {
            Some(presence) => presence.attend(future).await,
            None => future.await,
        }
    }

    /// The worker is gone, and with it its ends.
    pub(crate) fn leave(&self) {
        self.presence.iter().for_each(|presence| presence.leave());
    }

    /// What the worker does now; `None` before it begins and after it ended.
    pub(crate) fn state(&self) -> Option<State> {
        self.ledger().state
    }

    /// The version of weights that it waits for, where it does.
    pub(crate) fn wanted(&self) -> u64 {
        self.wanted.load(Relaxed)
    }

    fn enter(&self, state: State) {
        let mut ledger = self.ledger();
        ledger.book(self.clock.now());
        ledger.state = Some(state);
    }

    /// Wall-clock and time by state until now. The two agree exactly, also while the worker runs.
    pub(crate) fn read(&self) -> (u64, Times) {
        let ledger = self.ledger();
        let mut spent = ledger.spent;
        let until = match ledger.state {
            Some(state) => {
                let now = self.clock.now();
                spent.add(state, now - ledger.since);
                now
            }
            None => ledger.since,
        };
        (until - ledger.began, spent)
    }

    pub(crate) fn took(&self, tokens: usize) {
        self.items_in.fetch_add(1, Relaxed);
        self.tokens_in.fetch_add(tokens as u64, Relaxed);
    }

    pub(crate) fn gave(&self, tokens: usize) {
        self.items_out.fetch_add(1, Relaxed);
        self.tokens_out.fetch_add(tokens as u64, Relaxed);
    }

    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        // Nothing panics while the lock is held.
        self.ledger.lock()
    }
}

/// Brings its worker back to busy, also when the waiting future is dropped.
struct Waiting<'a>(&'a Meter);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.enter(State::Busy);
    }
}
