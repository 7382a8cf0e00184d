//! The process's one tokio runtime for HTTP, and groups of tasks on it that end with their owner.
//!
//! Clients send on it and servers listen on it; both wait, so two threads carry them. Code that
//! computes or blocks runs elsewhere: on the thread that calls [`Tasks::block_on`], or on tokio's
//! pool for blocking work. A task that a run declares as a stage runs on a runtime of that run (law
//! F3), because a stage may hold its thread up.
//!
//! The runtime starts with its first user and is shut down with its last. The one static of the
//! library is the weak reference by which users find it; it holds no state that one run could see
//! of another.

use std::fmt;
use std::future::Future;
use std::io;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::task::AbortHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

const THREADS: usize = 2;

/// Longest wait for tasks that were told to end, and for threads in a call that cannot be
/// interrupted, such as a lookup of a host's name.
const ENDING: Duration = Duration::from_secs(2);

static SHARED: Mutex<Weak<SharedRuntime>> = Mutex::new(Weak::new());

#[derive(Debug)]
pub(super) struct SharedRuntime {
    handle: Handle,
    /// Taken when the last user is gone.
    runtime: Option<Runtime>,
}

impl SharedRuntime {
    /// The process's runtime, which is started if nothing uses it yet.
    pub(super) fn get() -> io::Result<Arc<Self>> {
        let mut shared = SHARED.lock();
        if let Some(shared) = shared.upgrade() {
            return Ok(shared);
        }
        let runtime = Builder::new_multi_thread().worker_threads(THREADS).thread_name("net").enable_all().build()?;
        let started = Arc::new(SharedRuntime { handle: runtime.handle().clone(), runtime: Some(runtime) });
        *shared = Arc::downgrade(&started);
        Ok(started)
    }

    /// Runs `future` on the runtime, whatever runtime the caller is on, until it is done or the
    /// caller drops this.
    pub(super) async fn run<F: Future<Output: Send> + Send + 'static>(&self, future: F) -> F::Output {
        // A task of it saves a hop to another thread.
        if Handle::try_current().is_ok_and(|current| current.id() == self.handle.id()) {
            return future.await;
        }
        match AbortOnDropHandle::new(self.handle.spawn(future)).await {
            Ok(done) => done,
            Err(error) => std::panic::resume_unwind(error.into_panic()),
        }
    }
}

impl Drop for SharedRuntime {
    fn drop(&mut self) {
        let Some(runtime) = self.runtime.take() else { return };
        match Handle::try_current() {
            Ok(_) => runtime.shutdown_background(),
            Err(_) => runtime.shutdown_timeout(ENDING),
        }
    }
}

/// Time on the runtime that the caller is a task of, which may be simulated; elsewhere the clock's.
pub fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

/// Tasks on the process's one runtime for HTTP. Dropping the group ends them all, and waits until
/// they have ended unless it is dropped in a task. The tasks must not block.
pub struct Tasks {
    group: Group,
    runtime: Arc<SharedRuntime>,
}

/// Membership of tasks in a group: what ends them, and their count.
#[derive(Clone)]
pub(super) struct Group {
    stop: CancellationToken,
    running: TaskTracker,
}

impl Group {
    /// `future` as a member of the group, which ends with it.
    pub(super) fn member<F: Future<Output = ()>>(&self, future: F) -> impl Future<Output = ()> + use<F> {
        let stop = self.stop.clone();
        self.running.track_future(async move {
            tokio::select! {
                biased;
                () = stop.cancelled() => {}
                () = future => {}
            }
        })
    }

    /// Returns true if no member is running.
    pub(super) fn is_empty(&self) -> bool {
        self.running.is_empty()
    }

    /// Ends the members, and waits until they have ended unless the caller is in a task. After
    /// [`ENDING`], a member that blocks is left to the runtime, whose timers it may block, too.
    fn end(&self) {
        self.stop.cancel();
        let until = Instant::now() + ENDING;
        while Handle::try_current().is_err() && !self.running.is_empty() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Tasks {
    /// An empty group.
    ///
    /// # Errors
    /// That of the machine, if it gives the runtime no threads.
    pub fn new() -> io::Result<Self> {
        let group = Group { stop: CancellationToken::new(), running: TaskTracker::new() };
        Ok(Tasks { group, runtime: SharedRuntime::get()? })
    }

    /// An empty group on the runtime that the caller is a task of, such as one with simulated time.
    ///
    /// # Panics
    /// Outside of a runtime.
    pub fn on_current() -> Self {
        let group = Group { stop: CancellationToken::new(), running: TaskTracker::new() };
        Tasks { group, runtime: Arc::new(SharedRuntime { handle: Handle::current(), runtime: None }) }
    }

    /// Starts `future` as a task of the group. The handle ends it alone.
    pub fn spawn(&self, future: impl Future<Output = ()> + Send + 'static) -> AbortHandle {
        self.runtime.handle.spawn(self.group.member(future)).abort_handle()
    }

    /// Runs `future` on the calling thread, which may block, with the runtime's timers and sockets.
    ///
    /// # Panics
    /// In a task, which must not wait.
    pub fn block_on<F: Future>(&self, future: F) -> F::Output {
        self.runtime.handle.block_on(future)
    }

    /// For tasks that tasks of the group start.
    pub(super) fn group(&self) -> &Group {
        &self.group
    }

    /// The runtime's context, for making sockets and timers of it.
    pub(super) fn enter(&self) -> tokio::runtime::EnterGuard<'_> {
        self.runtime.handle.enter()
    }
}

impl Drop for Tasks {
    fn drop(&mut self) {
        self.group.end();
    }
}

impl fmt::Debug for Tasks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tasks").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc::{RecvTimeoutError, channel};

    use super::*;

    #[test]
    fn all_groups_share_one_runtime() {
        let (one, other) = (Tasks::new().unwrap(), Tasks::new().unwrap());
        assert!(Arc::ptr_eq(&one.runtime, &other.runtime));
    }

    #[test]
    fn a_group_ends_its_tasks_before_its_drop_returns_and_no_others() {
        struct Ends(Arc<AtomicBool>);
        impl Drop for Ends {
            fn drop(&mut self) {
                self.0.store(true, Ordering::SeqCst);
            }
        }
        let start = |tasks: &Tasks| {
            let (ended, (begun, begins)) = (Arc::new(AtomicBool::new(false)), channel());
            let ends = Ends(ended.clone());
            tasks.spawn(async move {
                let _ends = ends;
                begun.send(()).unwrap();
                std::future::pending().await
            });
            begins.recv().unwrap();
            ended
        };
        let (one, other) = (Tasks::new().unwrap(), Tasks::new().unwrap());
        let (first, second, kept) = (start(&one), start(&one), start(&other));
        drop(one);
        let ended = [first, second, kept].map(|ended| ended.load(Ordering::SeqCst));
        assert_eq!(ended, [true, true, false]);
    }

    #[test]
    fn a_member_that_blocks_every_thread_of_its_runtime_is_left_after_a_while() {
        // Not that of the process: other tests need the threads of the process's runtime.
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let group = Group { stop: CancellationToken::new(), running: TaskTracker::new() };
        let ((begun, begins), (release, released)) = (channel(), channel::<()>());
        runtime.spawn(group.member(async move {
            begun.send(()).unwrap();
            released.recv().ok();
        }));
        begins.recv().unwrap();
        let started = Instant::now();
        group.end();
        assert!(started.elapsed() >= ENDING);
        drop(release);
    }

    #[test]
    fn the_last_user_may_be_dropped_in_a_task() {
        let tasks = Tasks::new().unwrap();
        let inner = Tasks::new().unwrap();
        let (done, ends) = channel::<()>();
        tasks.block_on(async move { drop(inner) });
        let inner = Tasks::new().unwrap();
        inner.spawn(async move { drop(done) });
        assert_eq!(ends.recv_timeout(ENDING), Err(RecvTimeoutError::Disconnected));
    }
}
