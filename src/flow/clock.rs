//! Time accounting of workers (law F4).
//!
//! A [`Meter`] is always in one [`State`]. A change of state reads the clock once and books the
//! time since the last change, so the sum of the states equals wall-clock time to the nanosecond.
//! An item that arrives without a wait costs no clock read.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use parking_lot::{Mutex, MutexGuard};
use serde::Serialize;

use super::Simulation;
use super::crew::Presence;
use super::wait::block_on;

/// State of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// In the stage's own code: it computes, or waits for something outside the engine.
    Busy,
    /// Waiting for input.
    Starved,
    /// Waiting for room downstream, or for its turn in an ordered stage.
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

/// Clock of a run, in nanoseconds since its begin, and the way its workers wait: on this machine or
/// a simulated one.
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

    /// Books simulated work. Called before a worker waits, and when it ends.
    fn settle(&self) {
        if let Clock::Simulated(simulation) = self {
            simulation.settle();
        }
    }

    /// Adds the simulated time of one item.
    pub(crate) fn work(&self, stage: &str, tokens: impl FnOnce() -> usize) {
        if let Clock::Simulated(simulation) = self {
            simulation.work(stage, tokens);
        }
    }
}

/// Counters and time of one worker. Only the worker writes them; any thread reads them.
#[derive(Debug)]
pub(crate) struct Meter {
    pub(crate) clock: Clock,
    /// Part in the crew; none on a simulated machine, which tracks waits itself.
    presence: Option<Arc<Presence>>,
    ledger: Mutex<Ledger>,
    /// Version of weights in its last wait.
    wanted: AtomicU64,
    pub(crate) items_in: AtomicU64,
    pub(crate) items_out: AtomicU64,
    pub(crate) tokens_in: AtomicU64,
    pub(crate) tokens_out: AtomicU64,
}

#[derive(Debug, Default)]
struct Ledger {
    /// None before the worker begins and after it ended.
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

    /// Starts the worker's time, in the state busy.
    pub(crate) fn begin(&self) {
        let mut ledger = self.ledger();
        let now = self.clock.now();
        *ledger = Ledger { state: Some(State::Busy), began: now, since: now, spent: Times::default() };
    }

    /// Ends the worker's time.
    pub(crate) fn end(&self) {
        self.clock.settle();
        let mut ledger = self.ledger();
        ledger.book(self.clock.now());
        ledger.state = None;
    }

    /// Awaits `future` in `state`; the worker is busy again afterwards.
    pub(crate) async fn wait<F: Future>(&self, state: State, future: F) -> F::Output {
        self.clock.settle();
        self.enter(state);
        let _waiting = Waiting(self);
        match &self.presence {
            Some(presence) => presence.wait_for(future).await,
            None => future.await,
        }
    }

    /// Awaits weights of version `at_least` or newer.
    pub(crate) async fn wait_weights<F: Future>(&self, at_least: u64, future: F) -> F::Output {
        self.wanted.store(at_least, Relaxed);
        self.wait(State::Weights, future).await
    }

    /// Blocks the worker's thread on a wait.
    pub(crate) fn block_on<F: Future>(&self, future: F) -> F::Output {
        match &self.presence {
            Some(presence) => block_on(presence.attend(future)),
            None => self.clock.block_on(future),
        }
    }

    /// Awaits the whole body of a task.
    pub(crate) async fn attend<F: Future>(&self, future: F) -> F::Output {
        match &self.presence {
            Some(presence) => presence.attend(future).await,
            None => future.await,
        }
    }

    /// Removes the worker from the crew, after its ends were dropped.
    pub(crate) fn leave(&self) {
        self.presence.iter().for_each(|presence| presence.leave());
    }

    /// Present state; none before the worker begins and after it ended.
    pub(crate) fn state(&self) -> Option<State> {
        self.ledger().state
    }

    /// Version of weights that it waits for, or waited for last.
    pub(crate) fn wanted(&self) -> u64 {
        self.wanted.load(Relaxed)
    }

    fn enter(&self, state: State) {
        let mut ledger = self.ledger();
        ledger.book(self.clock.now());
        ledger.state = Some(state);
    }

    /// Wall-clock time and time by state until now. Their sums agree exactly, also while the worker
    /// runs.
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
        self.ledger.lock()
    }
}

/// Sets its worker back to busy, also when the waiting future is dropped.
struct Waiting<'a>(&'a Meter);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.enter(State::Busy);
    }
}
