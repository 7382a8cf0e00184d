//! Simulated machine: hours of a run pass in seconds, and the outcome depends only on a seed.
//!
//! One worker runs at a time, on its own thread and through the code of a real run. When it waits
//! for an item, room, admission or time, the seed draws the next of the ready workers. If none is
//! ready, the clock jumps to the earliest moment that a worker waits for. Code takes no time by
//! itself: [`Simulation::takes`] sets the time of a stage's items, [`Simulation::pass`] that of
//! other code. If all workers wait for each other, the run ends with
//! [`RunError::Stalled`](super::RunError::Stalled), so a simulation finds deadlocks.
//!
//! Cost: a switch of threads, some microseconds, for each change of turn.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::fmt;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use crate::util::rng;

/// Simulated machine for one run. Clones are the same machine.
#[derive(Clone)]
pub struct Simulation(Arc<Shared>);

struct Shared {
    world: Mutex<World>,
    latencies: Mutex<BTreeMap<String, Latency>>,
    /// Ends a stalled run, once.
    stalled: Mutex<Option<Stalled>>,
}

type Stalled = Box<dyn FnOnce() + Send>;

/// Time that a stage takes for an item of this many tokens.
type Latency = Arc<dyn Fn(usize) -> Duration + Send + Sync>;

struct World {
    now: u64,
    draws: u64,
    running: Option<usize>,
    /// Ready workers. A set, so the order of their wake-ups has no effect.
    ready: BTreeSet<usize>,
    /// Moments that workers wait for.
    timers: BinaryHeap<Reverse<(u64, usize)>>,
    workers: Vec<Worker>,
}

struct Worker {
    name: String,
    /// Woken, and not yet running.
    woken: bool,
    waits: bool,
    /// Set once the thread has started.
    thread: Option<Thread>,
    /// Nanoseconds of its items that have not passed yet.
    debt: u64,
}

/// Wakes one worker.
struct Wakeup {
    machine: Simulation,
    worker: usize,
}

impl Wake for Wakeup {
    fn wake(self: Arc<Self>) {
        self.machine.wake(self.worker);
    }
}

impl Simulation {
    /// Returns a machine at time 0. The seed draws among workers that are ready at the same time.
    pub fn new(seed: u64) -> Self {
        let world =
            World { now: 0, draws: seed, running: None, ready: BTreeSet::new(), timers: BinaryHeap::new(), workers: Vec::new() };
        Simulation(Arc::new(Shared { world: Mutex::new(world), latencies: Mutex::default(), stalled: Mutex::default() }))
    }

    /// Sets the time that a stage takes for every item that it receives, by the item's tokens.
    pub fn takes(&self, stage: &str, latency: impl Fn(usize) -> Duration + Send + Sync + 'static) -> &Self {
        let mut latencies = self.0.latencies.lock();
        latencies.insert(stage.to_owned(), Arc::new(latency));
        self
    }

    /// Time since the run began.
    pub fn now(&self) -> Duration {
        Duration::from_nanos(self.0.world.lock().now)
    }

    /// Lets time pass for the calling worker, while the others continue. Call it on a stage's own
    /// thread.
    pub fn pass(&self, time: Duration) {
        let mut world = self.0.world.lock();
        let Some(worker) = world.running.filter(|_| !time.is_zero()) else { return };
        let at = world.now.saturating_add(nanos(time));
        world.timers.push(Reverse((at, worker)));
        // Another wake-up during this time takes effect at the next wait.
        while world.now < at {
            self.switch(world, worker);
            world = self.0.world.lock();
        }
    }

    /// Present time in nanoseconds.
    pub(crate) fn time(&self) -> u64 {
        self.0.world.lock().now
    }

    /// Adds the time of one item. Short times pass together, once they reach a millisecond or the
    /// worker waits: items are early by less than that, and no thread switches for a microsecond.
    pub(crate) fn work(&self, stage: &str, tokens: impl FnOnce() -> usize) {
        const WORTH_A_SWITCH: u64 = 1_000_000;
        let latency = self.0.latencies.lock().get(stage).cloned();
        let Some(latency) = latency else { return };
        let time = nanos(latency(tokens()));
        let mut world = self.0.world.lock();
        let Some(worker) = world.running else { return };
        world.workers[worker].debt += time;
        if world.workers[worker].debt >= WORTH_A_SWITCH {
            drop(world);
            self.settle();
        }
    }

    /// Lets the added time of the running worker pass.
    pub(crate) fn settle(&self) {
        let mut world = self.0.world.lock();
        let Some(worker) = world.running else { return };
        let debt = std::mem::take(&mut world.workers[worker].debt);
        drop(world);
        self.pass(Duration::from_nanos(debt));
    }

    /// Adds a worker before the run begins; it waits for its turn.
    pub(crate) fn expect(&self, name: String) -> usize {
        let mut world = self.0.world.lock();
        let worker = world.workers.len();
        world.workers.push(Worker { name, woken: false, waits: true, thread: None, debt: 0 });
        world.ready.insert(worker);
        worker
    }

    /// Sets the function that ends a stalled run. It must make a worker ready.
    pub(crate) fn on_stall(&self, end: impl FnOnce() + Send + 'static) {
        *self.0.stalled.lock() = Some(Box::new(end));
    }

    /// Begins the run with the first worker.
    pub(crate) fn begin(&self) {
        let first = self.0.world.lock().next();
        first.iter().for_each(Thread::unpark);
    }

    /// Registers the worker's thread and waits for its turn.
    pub(crate) fn enter(&self, worker: usize) {
        self.0.world.lock().workers[worker].thread = Some(thread::current());
        self.turn(worker);
    }

    /// Removes the worker.
    pub(crate) fn leave(&self, worker: usize) {
        let mut world = self.0.world.lock();
        world.ready.remove(&worker);
        let ran = world.running == Some(worker);
        let mut next = if ran { world.next() } else { None };
        if ran && world.running.is_none() && world.workers.iter().any(|worker| worker.waits) {
            // The last ready worker is gone.
            drop(world);
            self.end_stalled();
            next = self.0.world.lock().next();
        } else {
            drop(world);
        }
        next.iter().for_each(Thread::unpark);
    }

    /// Ends a stalled run; false if that was done before.
    fn end_stalled(&self) -> bool {
        let end = self.0.stalled.lock().take();
        end.map(|end| end()).is_some()
    }

    /// Runs `future` on the thread of the worker whose turn it is.
    ///
    /// # Panics
    /// When a stop leaves workers that wait for each other, which law F5 rules out.
    pub(crate) fn block_on<F: Future>(&self, future: F) -> F::Output {
        let Some(worker) = self.0.world.lock().running else { return super::wait::block_on(future) };
        let waker = Waker::from(Arc::new(Wakeup { machine: self.clone(), worker }));
        let mut future = pin!(future);
        loop {
            self.0.world.lock().workers[worker].woken = false;
            if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
                return output;
            }
            let world = self.0.world.lock();
            if !world.workers[worker].woken {
                self.switch(world, worker);
            }
        }
    }

    fn wake(&self, worker: usize) {
        let mut world = self.0.world.lock();
        let place = &mut world.workers[worker];
        place.woken = true;
        if place.waits {
            world.ready.insert(worker);
        }
    }

    /// Gives the turn to the next worker, and waits to get it back.
    fn switch(&self, mut world: MutexGuard<World>, worker: usize) {
        world.workers[worker].waits = true;
        let next = world.next();
        if world.running.is_none() {
            let waiting = world.workers.iter().filter(|worker| worker.waits).map(|worker| worker.name.as_str());
            let names = waiting.collect::<Vec<_>>().join(", ");
            world.workers[worker].waits = false;
            world.running = Some(worker);
            drop(world);
            assert!(self.end_stalled(), "these workers wait for each other despite a stop: {names}");
            // This worker polls again.
            return;
        }
        let mine = world.running == Some(worker);
        drop(world);
        if !mine {
            next.iter().for_each(Thread::unpark);
            self.turn(worker);
        }
    }

    fn turn(&self, worker: usize) {
        while self.0.world.lock().running != Some(worker) {
            thread::park();
        }
    }
}

impl World {
    /// Gives the turn to a ready worker, after advancing the time if none is ready. No worker runs
    /// if none can. Returns the thread to unpark; a thread that has not started yet checks by
    /// itself.
    fn next(&mut self) -> Option<Thread> {
        if self.ready.is_empty()
            && let Some(Reverse((at, worker))) = self.timers.pop()
        {
            self.now = at;
            self.ready.insert(worker);
            // All workers that wait for this moment are ready.
            while let Some(Reverse((_, worker))) = self.timers.peek().filter(|timer| timer.0.0 == at).copied() {
                self.timers.pop();
                self.ready.insert(worker);
            }
        }
        let at = self.draw(self.ready.len());
        self.running = self.ready.iter().nth(at).copied();
        let worker = self.running?;
        self.ready.remove(&worker);
        self.workers[worker].waits = false;
        self.workers[worker].thread.clone()
    }

    /// Draws a number below `below`.
    fn draw(&mut self, below: usize) -> usize {
        self.draws = rng::state(self.draws, 1);
        (rng::mix(self.draws) % below.max(1) as u64) as usize
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

impl fmt::Debug for Simulation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Simulation").field("now", &self.now()).finish_non_exhaustive()
    }
}
