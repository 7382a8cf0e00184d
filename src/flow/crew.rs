//! How many of a run's workers can go on, known exactly (law F7).
//!
//! A worker is active from before it starts until it is gone, except while it waits. It waits when its thread or task is left with nothing
//! but a wait of the engine: for input, for room, for credit or for weights. A wake-up makes it active again before it takes effect. So
//! the count is 0 only when each worker waits and none was woken.
//!
//! A task may await more than the engine's waits, such as a timer or a socket beside a receive. Everything that can wake it holds a clone
//! of its waker. The engine's own waits get another waker ([`Presence`]), so that a clone of the task's ([`Outer`]) means something else.
//! Then the task counts as active.
//!
//! Cost: a few atomic operations a wait, and none where an item or room is there.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::task::{Context, Wake, Waker};

use parking_lot::{Mutex, MutexGuard};

use super::sync::point;

/// The workers of a run, as a number.
pub(crate) struct Crew {
    active: AtomicUsize,
    wakeups: AtomicU64,
    /// Called by the worker that leaves none active. It may run inside a wake-up, so it must not block.
    idle: Box<dyn Fn() + Send + Sync>,
}

impl Crew {
    pub(crate) fn new(idle: impl Fn() + Send + Sync + 'static) -> Arc<Self> {
        Arc::new(Crew { active: AtomicUsize::new(0), wakeups: AtomicU64::new(0), idle: Box::new(idle) })
    }

    /// Whether no worker can go on.
    pub(crate) fn is_idle(&self) -> bool {
        self.active.load(SeqCst) == 0
    }

    /// How often a worker became active. The same number twice, and idle both times: idle in between.
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
/// Active, since it was woken after it was polled last.
const WOKEN: u8 = 1;
const WAITING: u8 = 2;
const GONE: u8 = 3;

/// One worker's part in its crew. As a waker, that of the engine's own waits.
pub(crate) struct Presence {
    crew: Arc<Crew>,
    state: AtomicU8,
    /// Whether a wait of the engine was left pending by the newest poll.
    waits: AtomicBool,
    /// Which waker that poll was given, by its data.
    given: AtomicPtr<()>,
    /// Wakes the thread or task.
    sleeper: Mutex<Option<Waker>>,
}

/// What a worker's future is polled with.
struct Outer(Arc<Presence>);

impl Presence {
    /// One more worker, active.
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

    /// The worker is gone, after it let go of its ends.
    pub(crate) fn leave(&self) {
        *self.sleeper() = None;
        if self.state.swap(GONE, SeqCst) != WAITING {
            self.crew.depart();
        }
    }

    /// Awaits all that a worker's thread or task awaits at a time: a task's whole body, a thread's one wait.
    pub(crate) async fn attend<F: Future>(self: &Arc<Self>, future: F) -> F::Output {
        let mut future = pin!(future);
        let outer = Arc::new(Outer(Arc::clone(self)));
        let waker = Waker::from(Arc::clone(&outer));
        poll_fn(|context| {
            self.begin_poll(context.waker(), &waker);
            let polled = future.as_mut().poll(&mut Context::from_waker(&waker));
            // Two of them are held here.
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
            // Where something of the stage's polls in between, such as a set of futures, it must hear of each wake-up itself.
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
            // Polled without a wake-up of ours.
            self.crew.arrive();
        }
        self.waits.store(false, SeqCst);
        self.given.store(given.data().cast_mut(), SeqCst);
        let mut known = self.sleeper();
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
        // Counted before it shows, so that whoever wakes another may wait right after.
        self.crew.arrive();
        let woken = |state| (state != GONE).then_some(WOKEN);
        if self.state.fetch_update(SeqCst, SeqCst, woken) != Ok(WAITING) {
            self.crew.depart();
        }
        let sleeper = self.sleeper().clone();
        sleeper.into_iter().for_each(Waker::wake);
    }

    fn sleeper(&self) -> MutexGuard<'_, Option<Waker>> {
        self.sleeper.lock()
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
