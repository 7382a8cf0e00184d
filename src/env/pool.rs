//! A bounded pool of threads for blocking calls of environments, each with a deadline.
//!
//! A job that exceeds its deadline is abandoned at that instant, and another thread replaces its own,
//! so that one slow environment does not stall the others. The stuck thread ends when its job returns.
//! If [`MOST_STUCK`] times the pool's size are stuck, jobs are rejected.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, unbounded};
use parking_lot::{Condvar, Mutex};

use super::EnvError;
use crate::flow::caught;
use crate::net;

/// Most stuck threads per thread of the pool.
const MOST_STUCK: usize = 8;
/// Longest wait for running jobs when the pool is dropped.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(1);

/// Runs jobs on its own threads and returns each outcome with the key of its job.
pub struct Pool<T> {
    shared: Arc<Shared<T>>,
    results: Receiver<Outcome<T>>,
    pending: usize,
}

/// Key and result of a job.
type Outcome<T> = (u64, Result<T, EnvError>);

struct Job<T> {
    key: u64,
    time: Duration,
    work: Box<dyn FnOnce(Instant) -> T + Send>,
}

struct Running {
    key: u64,
    time: Duration,
    deadline: Instant,
}

struct State<T> {
    queue: VecDeque<Job<T>>,
    running: BTreeMap<u64, Running>,
    next: u64,
    /// Threads that take jobs; `stuck` are those whose job was abandoned.
    workers: usize,
    idle: usize,
    stuck: usize,
    closed: bool,
}

struct Shared<T> {
    most: usize,
    state: Mutex<State<T>>,
    changed: Condvar,
    results: Sender<Outcome<T>>,
}

impl<T: Send + 'static> Pool<T> {
    /// Creates a pool for at most `threads` jobs at a time. Threads start as they are needed.
    pub fn new(threads: usize) -> Self {
        let (sender, results) = unbounded();
        let state =
            State { queue: VecDeque::new(), running: BTreeMap::new(), next: 0, workers: 0, idle: 0, stuck: 0, closed: false };
        let (most, state) = (threads.max(1), Mutex::new(state));
        let shared = Arc::new(Shared { most, state, changed: Condvar::new(), results: sender });
        let watched = shared.clone();
        std::thread::spawn(move || watched.watch());
        Pool { shared, results, pending: 0 }
    }

    /// Submits a job with a time limit of `time` from its start.
    pub fn submit(&mut self, key: u64, time: Duration, work: impl FnOnce(Instant) -> T + Send + 'static) {
        self.pending += 1;
        let mut state = self.shared.state.lock();
        state.queue.push_back(Job { key, time, work: Box::new(work) });
        self.shared.staff(&mut state);
        self.shared.changed.notify_all();
    }

    /// Returns the number of jobs whose outcome was not taken yet.
    pub fn pending(&self) -> usize {
        self.pending
    }

    /// Returns the next outcome, waiting up to `wait`; none if there is none by then.
    pub fn next(&mut self, wait: Duration) -> Option<Outcome<T>> {
        let outcome = if wait.is_zero() { self.results.try_recv().ok() } else { self.results.recv_timeout(wait).ok() };
        self.pending -= usize::from(outcome.is_some());
        outcome
    }
}

impl<T: Send + 'static> Shared<T> {
    fn tell(&self, key: u64, outcome: Result<T, EnvError>) {
        // The receiver is gone if the pool was dropped.
        drop(self.results.send((key, outcome)));
    }

    /// Starts a thread if one is needed and allowed; rejects queued jobs if none can run.
    fn staff(self: &Arc<Self>, state: &mut State<T>) {
        if state.queue.len() > state.idle && state.workers < self.most && state.stuck < self.most * MOST_STUCK {
            state.workers += 1;
            let shared = self.clone();
            std::thread::spawn(move || shared.work());
        }
        if state.workers == 0 {
            let exhausted = format!(
                "{} threads are stuck in jobs that were given up long ago, so that no more are started; make the environment heed its deadline",
                state.stuck
            );
            state.queue.drain(..).for_each(|job| self.tell(job.key, Err(EnvError::new(&exhausted))));
        }
    }

    fn work(self: Arc<Self>) {
        let mut state = self.state.lock();
        loop {
            let Some(Job { key, time, work }) = state.queue.pop_front() else {
                if state.closed {
                    state.workers -= 1;
                    return;
                }
                state.idle += 1;
                self.changed.wait(&mut state);
                state.idle -= 1;
                continue;
            };
            let deadline = net::deadline(time);
            let id = state.next;
            state.next += 1;
            state.running.insert(id, Running { key, time, deadline });
            self.changed.notify_all();
            drop(state);
            let outcome = caught(|| work(deadline)).map_err(|panic| EnvError::new(format!("it panicked: {panic}")));
            state = self.state.lock();
            if state.running.remove(&id).is_none() {
                // The job was abandoned and this thread replaced.
                state.stuck -= 1;
                return;
            }
            self.tell(key, outcome);
            self.changed.notify_all();
        }
    }

    /// Abandons overdue jobs.
    fn watch(self: Arc<Self>) {
        let mut state = self.state.lock();
        while !state.closed {
            let now = Instant::now();
            let overdue = state.running.extract_if(.., |_, running| running.deadline <= now).collect::<Vec<_>>();
            for (_, Running { key, time, .. }) in overdue {
                state.workers -= 1;
                state.stuck += 1;
                let text =
                    format!("it took longer than {time:?} and was given up; raise the time limit, or find out what it waits for");
                self.tell(key, Err(EnvError::late(text)));
                self.staff(&mut state);
            }
            let left = |running: &Running| running.deadline.saturating_duration_since(Instant::now());
            let next = state.running.values().map(left).min().unwrap_or(Duration::MAX);
            match next {
                Duration::MAX => self.changed.wait(&mut state),
                next => {
                    self.changed.wait_for(&mut state, next);
                }
            }
        }
    }
}

impl<T> Drop for Pool<T> {
    /// Starts no further jobs and waits up to a second for running ones.
    fn drop(&mut self) {
        let until = Instant::now() + SHUTDOWN_TIMEOUT;
        let mut state = self.shared.state.lock();
        state.closed = true;
        state.queue.clear();
        self.shared.changed.notify_all();
        while !state.running.is_empty() && Instant::now() < until {
            let left = until.saturating_duration_since(Instant::now());
            self.shared.changed.wait_for(&mut state, left);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn a_job_that_never_returns_is_given_up_and_stalls_no_other() {
        let mut pool = Pool::new(1);
        let (hold, held) = mpsc::channel::<()>();
        pool.submit(0, Duration::from_millis(10), move |_| held.recv().is_ok());
        (1..4).for_each(|key| pool.submit(key, LONG, |_| true));
        let mut outcomes: Vec<_> = (0..4).map(|_| pool.next(LONG).unwrap()).collect();
        outcomes.sort_by_key(|(key, _)| *key);
        let late = outcomes[0].1.as_ref().unwrap_err();
        assert!(late.is_late() && late.to_string().starts_with("it took longer than 10ms "), "{late}");
        assert!(outcomes[1..].iter().all(|(_, outcome)| *outcome == Ok(true)), "{outcomes:?}");
        assert_eq!(pool.pending(), 0);
        drop(hold);
    }

    #[test]
    fn a_panic_is_the_outcome_of_its_job_alone() {
        let mut pool = Pool::new(2);
        pool.submit(7, LONG, |_| -> u32 { panic!("no such map") });
        assert_eq!(pool.next(LONG), Some((7, Err(EnvError::new("it panicked: no such map")))));
        pool.submit(8, LONG, |_| 3);
        assert_eq!(pool.next(LONG), Some((8, Ok(3))));
    }

    #[test]
    fn a_pool_whose_threads_are_all_stuck_refuses_rather_than_grows() {
        let mut pool = Pool::new(1);
        let (hold, held) = crossbeam_channel::bounded::<()>(0);
        for key in 0..=MOST_STUCK as u64 {
            let held = held.clone();
            pool.submit(key, Duration::ZERO, move |_| assert!(held.recv().is_err()));
        }
        let outcomes: Vec<_> = (0..=MOST_STUCK).map(|_| pool.next(LONG).unwrap().1.unwrap_err()).collect();
        let last = outcomes[MOST_STUCK].to_string();
        assert!(last.starts_with(&format!("{MOST_STUCK} threads are stuck")), "{last}");
        drop(hold);
    }
}
