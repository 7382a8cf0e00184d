//! Time accounting of workers (law F4).
//!
//! A [`Meter`] is always in one [`State`]. A change of state reads the clock once and books the
//! time since the last change, so the sum of the states equals wall-clock time to the nanosecond.
//! An item that arrives without a wait costs no clock read.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use parking_lot::Mutex;

use super::Simulation;
use super::crew::Presence;
use super::wait::block_on;

/// State of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// In the stage's own code: it computes, or waits for something outside the engine.
    Busy,
    /// Waiting for input.
    Starved,
    /// Waiting for room downstream, or for its turn in an ordered stage.
    Blocked,
    /// A source waiting for admission, or another stage held from outside the graph.
    Credit,
    /// Waiting for weights.
    Weights,
}

impl State {
    /// All states, in the order of reports.
    pub const ALL: [State; 5] = [State::Busy, State::Starved, State::Blocked, State::Credit, State::Weights];

    /// The state's name in lower case.
    pub fn name(self) -> &'static str {
        ["busy", "starved", "blocked", "credit", "weights"][self as usize]
    }
}

/// Time of one worker or of several, in nanoseconds: from begin to end or until now, and by state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Times {
    /// Wall-clock time. Equal to [`Times::total`], to the nanosecond (law F4).
    pub wall: u64,
    by_state: [u64; State::ALL.len()],
}

impl Times {
    /// Time in `state`.
    pub fn of(&self, state: State) -> u64 {
        self.by_state[state as usize]
    }

    /// Sum over all states.
    pub fn total(&self) -> u64 {
        self.by_state.iter().sum()
    }

    /// Books `nanos` to `state`, and not to the wall-clock time.
    pub(crate) fn add(&mut self, state: State, nanos: u64) {
        self.by_state[state as usize] += nanos;
    }
}

impl std::iter::Sum for Times {
    fn sum<I: Iterator<Item = Times>>(all: I) -> Times {
        all.fold(Times::default(), |sum, one| Times {
            wall: sum.wall + one.wall,
            by_state: std::array::from_fn(|state| sum.by_state[state] + one.by_state[state]),
        })
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

#[derive(Clone, Copy, Debug, Default)]
struct Ledger {
    /// None before the worker begins and after it ended.
    state: Option<State>,
    began: u64,
    since: u64,
    spent: Times,
}

impl Ledger {
    /// Books the time since the last change, and changes the state.
    fn enter(&mut self, state: Option<State>, now: u64) {
        if let Some(state) = self.state {
            self.spent.add(state, now - self.since);
        }
        (self.state, self.since) = (state, now);
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
        let now = self.clock.now();
        *self.ledger.lock() = Ledger { state: Some(State::Busy), began: now, since: now, spent: Times::default() };
    }

    /// Ends the worker's time.
    pub(crate) fn end(&self) {
        self.clock.settle();
        self.enter(None);
    }

    /// Awaits `future` in `state`; the worker is busy again afterwards.
    pub(crate) async fn wait<F: Future>(&self, state: State, future: F) -> F::Output {
        self.clock.settle();
        self.enter(Some(state));
        let _waiting = Waiting(self);
        match &self.presence {
            Some(presence) => presence.wait_for(future).await,
            None => future.await,
        }
    }

    /// Awaits in `state` what code outside the graph brings about. The worker counts as active, so that a long
    /// wait is no stall (law F7).
    pub(crate) async fn hold<F: Future>(&self, state: State, future: F) -> F::Output {
        self.clock.settle();
        self.enter(Some(state));
        let _waiting = Waiting(self);
        future.await
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
        self.ledger.lock().state
    }

    /// Version of weights that it waits for, or waited for last.
    pub(crate) fn wanted(&self) -> u64 {
        self.wanted.load(Relaxed)
    }

    fn enter(&self, state: Option<State>) {
        let mut ledger = self.ledger.lock();
        ledger.enter(state, self.clock.now());
    }

    /// Time until now. Its parts sum to the whole exactly, also while the worker runs.
    pub(crate) fn read(&self) -> Times {
        let shared = self.ledger.lock();
        let mut ledger = *shared;
        if let Some(state) = ledger.state {
            ledger.enter(Some(state), self.clock.now());
        }
        Times { wall: ledger.since - ledger.began, ..ledger.spent }
    }

    pub(crate) fn took(&self, tokens: usize) {
        self.items_in.fetch_add(1, Relaxed);
        self.tokens_in.fetch_add(tokens as u64, Relaxed);
    }

    pub(crate) fn gave(&self, tokens: usize) {
        self.items_out.fetch_add(1, Relaxed);
        self.tokens_out.fetch_add(tokens as u64, Relaxed);
    }
}

/// Sets its worker back to busy, also when the waiting future is dropped.
struct Waiting<'a>(&'a Meter);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.enter(Some(State::Busy));
    }
}
