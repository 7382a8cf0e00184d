//! Exact number of a run's active workers, to detect a stall (law F7).
//!
//! A worker is active from before it starts until it is gone, except while it waits. It waits when
//! its thread or task has only a wait of the engine left: for input, room, credit or weights. A
//! wake-up makes it active again before it takes effect. So the count is 0 only when every worker
//! waits and none was woken.
//!
//! A task may await more than the engine's waits, such as a timer or a socket alongside a receive.
//! Whatever can wake it holds a clone of its waker. The engine's own waits get another waker
//! ([`Presence`]), so a clone of the task's ([`Outer`]) belongs to something else, and the task
//! counts as active.
//!
//! Cost: a few atomic operations a wait; none if an item or room is available.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::task::{Context, Wake, Waker};

use parking_lot::Mutex;

use super::sync::point;

/// Count of a run's active workers.
pub(crate) struct Crew {
    active: AtomicUsize,
    wakeups: AtomicU64,
    /// Called by the worker that leaves none active. May run inside a wake-up, so it must not
    /// block.
    idle: Box<dyn Fn() + Send + Sync>,
}

impl Crew {
    pub(crate) fn new(idle: impl Fn() + Send + Sync + 'static) -> Arc<Self> {
        Arc::new(Crew { active: AtomicUsize::new(0), wakeups: AtomicU64::new(0), idle: Box::new(idle) })
    }

    /// Returns true if no worker is active.
    pub(crate) fn is_idle(&self) -> bool {
        self.active.load(SeqCst) == 0
    }

    /// Number of times that a worker became active. Two idle readings with equal numbers: idle in
    /// between.
    pub(crate) fn wakeups(&self) -> u64 {
        self.wakeups.load(SeqCst)
    }

    fn arrive(&self) {
        self.active.fetch_add(1, SeqCst);
        self.wakeups.fetch_add(1, SeqCst);
    }

    fn depart(&self) {
        if self.active.fetch_sub(1, SeqCst) == 1 {
            (self.idle)();
        }
    }
}

const ACTIVE: u8 = 0;
/// Active: woken after its last poll.
const WOKEN: u8 = 1;
const WAITING: u8 = 2;
const GONE: u8 = 3;

/// Part of one worker in its crew, and the waker of the engine's own waits.
pub(crate) struct Presence {
    crew: Arc<Crew>,
    state: AtomicU8,
    /// True if the newest poll left a wait of the engine pending.
    waits: AtomicBool,
    /// Data of the waker in that poll.
    given: AtomicPtr<()>,
    /// Wakes the thread or task.
    sleeper: Mutex<Option<Waker>>,
}

/// Waker for a worker's whole future.
struct Outer(Arc<Presence>);

impl Presence {
    /// Adds an active worker.
    pub(crate) fn new(crew: &Arc<Crew>) -> Arc<Self> {
        crew.arrive();
        Arc::new(Presence {
            crew: Arc::clone(crew),
            state: AtomicU8::new(ACTIVE),
            waits: AtomicBool::new(false),
            given: AtomicPtr::default(),
            sleeper: Mutex::default(),
        })
    }

    /// Removes the worker, after its ends were dropped.
    pub(crate) fn leave(&self) {
        *self.sleeper.lock() = None;
        if self.state.swap(GONE, SeqCst) != WAITING {
            self.crew.depart();
        }
    }

    /// Awaits the whole body of a task, or one wait of a thread.
    pub(crate) async fn attend<F: Future>(self: &Arc<Self>, future: F) -> F::Output {
        let mut future = pin!(future);
        let outer = Arc::new(Outer(Arc::clone(self)));
        let waker = Waker::from(Arc::clone(&outer));
        poll_fn(|context| {
            self.begin_poll(context.waker(), &waker);
            let polled = future.as_mut().poll(&mut Context::from_waker(&waker));
            // This function holds two.
            let alone = Arc::strong_count(&outer) == 2;
            if polled.is_pending() && alone && self.waits.load(SeqCst) {
                self.wait();
            }
            polled
        })
        .await
    }

    /// Marks `future` as a wait of the engine.
    pub(crate) async fn wait_for<F: Future>(self: &Arc<Self>, future: F) -> F::Output {
        let mut future = pin!(future);
        let waker = Waker::from(Arc::clone(self));
        poll_fn(|context| {
            // A combinator of the stage polls in between, such as a set of futures: its own waker must get each wake-up.
            if context.waker().data() != self.given.load(SeqCst).cast_const() {
                return future.as_mut().poll(context);
            }
            let polled = future.as_mut().poll(&mut Context::from_waker(&waker));
            if polled.is_pending() {
                self.waits.store(true, SeqCst);
            }
            polled
        })
        .await
    }

    fn begin_poll(&self, sleeper: &Waker, given: &Waker) {
        if self.state.swap(ACTIVE, SeqCst) == WAITING {
            // Polled without a wake-up of the engine.
            self.crew.arrive();
        }
        self.waits.store(false, SeqCst);
        self.given.store(given.data().cast_mut(), SeqCst);
        let mut known = self.sleeper.lock();
        if known.as_ref().is_none_or(|known| !known.will_wake(sleeper)) {
            *known = Some(sleeper.clone());
        }
    }

    fn wait(&self) {
        point();
        if self.state.compare_exchange(ACTIVE, WAITING, SeqCst, SeqCst).is_ok() {
            point();
            self.crew.depart();
        }
    }

    fn wake_up(&self) {
        // Counted first, so that the worker that wakes this one may wait right after.
        self.crew.arrive();
        let woken = |state| (state != GONE).then_some(WOKEN);
        if self.state.fetch_update(SeqCst, SeqCst, woken) != Ok(WAITING) {
            self.crew.depart();
        }
        let sleeper = self.sleeper.lock().clone();
        sleeper.into_iter().for_each(Waker::wake);
    }
}

impl Wake for Presence {
    fn wake(self: Arc<Self>) {
        self.wake_up();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.wake_up();
    }
}

impl Wake for Outer {
    fn wake(self: Arc<Self>) {
        self.0.wake_up();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.0.wake_up();
    }
}

impl std::fmt::Debug for Presence {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Presence").field("state", &self.state).finish_non_exhaustive()
    }
}
