//! A bounded pool of threads for blocking calls of environments, each with a deadline.
//!
//! A job's time limit counts from its call of [`Begin`]. One that exceeds it is abandoned, and another
//! thread replaces its own, so that one slow environment does not stall the others. The stuck thread
//! ends when its job returns. If [`MOST_STUCK`] times the pool's size are stuck, jobs are rejected.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, unbounded};

use super::EnvError;
use crate::flow::caught;
use crate::net;

/// Most stuck threads per thread of the pool.
const MOST_STUCK: usize = 8;
/// Longest wait for running jobs when the pool is dropped.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(1);

/// Runs jobs on its own threads and returns each outcome with the key of its job. The owner's calls
/// of [`Pool::next`] keep the deadlines.
pub struct Pool<T: Send + 'static> {
    most: usize,
    queue: (Sender<Job<T>>, Receiver<Job<T>>),
    events: (Sender<Event<T>>, Receiver<Event<T>>),
    /// Jobs that began, by key.
    running: BTreeMap<u64, Running>,
    pending: usize,
    /// Threads that take jobs.
    workers: usize,
    /// Threads whose job was abandoned and did not return yet.
    stuck: Arc<AtomicUsize>,
}

/// Starts a job's time limit and returns its end. Fails if the pool is gone.
pub type Begin<'a> = &'a dyn Fn() -> Result<Instant, EnvError>;

/// Key and result of a job.
type Outcome<T> = (u64, Result<T, EnvError>);

struct Job<T> {
    key: u64,
    time: Duration,
    work: Box<dyn FnOnce(Begin) -> T + Send>,
}

struct Running {
    time: Duration,
    deadline: Instant,
    /// Set by the job's end or by its abandonment, whichever is first.
    settled: Arc<AtomicBool>,
}

/// Event of a thread.
enum Event<T> {
    Began(u64, Running),
    Ended(Outcome<T>),
}

impl<T: Send + 'static> Pool<T> {
    /// Creates a pool for at most `threads` jobs at a time. Threads start with the first jobs.
    pub fn new(threads: usize) -> Self {
        let (queue, events, running) = (unbounded(), unbounded(), BTreeMap::new());
        Pool { most: threads.max(1), queue, events, running, pending: 0, workers: 0, stuck: Arc::default() }
    }

    /// Submits a job with a time limit of `time` from its call of [`Begin`]. No two jobs have the same key.
    pub fn submit(&mut self, key: u64, time: Duration, work: impl FnOnce(Begin) -> T + Send + 'static) {
        self.pending += 1;
        // The pool itself receives, so the queue is open.
        drop(self.queue.0.send(Job { key, time, work: Box::new(work) }));
        self.staff();
    }

    /// Returns the number of jobs whose outcome was not taken yet.
    pub fn pending(&self) -> usize {
        self.pending
    }

    /// Returns the next outcome, waiting up to `wait`; none if there is none by then.
    pub fn next(&mut self, wait: Duration) -> Option<Outcome<T>> {
        let until = net::deadline(wait);
        loop {
            let first = self.running.iter().min_by_key(|(_, running)| running.deadline);
            let (first, due) = first.map_or((None, until), |(key, running)| (Some(*key), running.deadline));
            match self.events.1.recv_deadline(due.min(until)) {
                Ok(Event::Began(key, running)) => drop(self.running.insert(key, running)),
                Ok(Event::Ended(outcome)) => {
                    self.running.remove(&outcome.0);
                    self.pending -= 1;
                    return Some(outcome);
                }
                Err(_) if due <= Instant::now() => {
                    let key = first?;
                    let Running { time, settled, .. } = self.running.remove(&key)?;
                    // Counted before, because the thread counts itself out as soon as it sees `settled`.
                    self.stuck.fetch_add(1, Ordering::AcqRel);
                    if settled.swap(true, Ordering::AcqRel) {
                        self.stuck.fetch_sub(1, Ordering::AcqRel);
                        continue;
                    }
                    (self.workers, self.pending) = (self.workers - 1, self.pending - 1);
                    self.staff();
                    return Some((key, Err(late(time))));
                }
                Err(_) => return None,
            }
        }
    }

    /// Starts a thread if one is allowed; rejects queued jobs if none can run.
    fn staff(&mut self) {
        let (jobs, events, stuck) = (&self.queue.1, &self.events.0, self.stuck.load(Ordering::Acquire));
        if self.workers < self.most && stuck < self.most * MOST_STUCK && !jobs.is_empty() {
            self.workers += 1;
            let (jobs, events, stuck) = (jobs.clone(), events.clone(), self.stuck.clone());
            std::thread::spawn(move || work(&jobs, &events, &stuck));
        }
        if self.workers == 0 {
            let exhausted = EnvError::new(format!(
                "{stuck} threads are stuck in jobs that were given up long ago, so that no more are started; make the environment heed its deadline"
            ));
            let refuse = |job: Job<T>| drop(events.send(Event::Ended((job.key, Err(exhausted.clone())))));
            jobs.try_iter().for_each(refuse);
        }
    }
}

/// Runs jobs until the pool is dropped, or this thread's job was abandoned.
fn work<T>(jobs: &Receiver<Job<T>>, events: &Sender<Event<T>>, stuck: &AtomicUsize) {
    for Job { key, time, work } in jobs {
        let (due, settled) = (Cell::new(None), Arc::new(AtomicBool::new(false)));
        let begin = || {
            let deadline = net::deadline(time);
            due.set(Some(deadline));
            let began = events.send(Event::Began(key, Running { time, deadline, settled: settled.clone() }));
            began.map(|()| deadline).map_err(|_| EnvError::new("the run ends"))
        };
        let outcome = caught(|| work(&begin)).map_err(|panic| EnvError::new(format!("it panicked: {panic}")));
        if settled.swap(true, Ordering::AcqRel) {
            stuck.fetch_sub(1, Ordering::AcqRel);
            return;
        }
        let outcome = if due.get().is_some_and(|due| Instant::now() >= due) { Err(late(time)) } else { outcome };
        drop(events.send(Event::Ended((key, outcome))));
    }
}

fn late(time: Duration) -> EnvError {
    EnvError::late(format!("it took longer than {time:?} and was given up; raise the time limit, or find out what it waits for"))
}

impl<T: Send + 'static> Drop for Pool<T> {
    /// Starts no further jobs and waits up to a second for running ones.
    fn drop(&mut self) {
        let until = net::deadline(SHUTDOWN_TIMEOUT);
        self.pending -= self.queue.1.try_iter().count();
        while self.pending > 0 && self.next(until.saturating_duration_since(Instant::now())).is_some() {}
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
        pool.submit(0, Duration::from_millis(10), move |begin| begin().is_ok() && held.recv().is_ok());
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
    fn what_a_job_waits_for_before_it_begins_takes_none_of_its_time() {
        let mut pool = Pool::new(1);
        let (allow, allowed) = mpsc::channel::<()>();
        pool.submit(0, Duration::ZERO, move |begin| allowed.recv().is_ok() && begin().is_ok());
        assert_eq!(pool.next(Duration::from_millis(20)), None, "it has not begun");
        allow.send(()).unwrap();
        assert!(pool.next(LONG).unwrap().1.unwrap_err().is_late(), "now it has");
    }

    #[test]
    fn a_job_that_waits_when_its_pool_ends_never_begins() {
        let mut pool = Pool::new(1);
        let ((allow, allowed), (tell, told)) = (mpsc::channel::<()>(), mpsc::channel());
        pool.submit(0, LONG, move |begin| {
            tell.send("waits").unwrap();
            allowed.recv().unwrap();
            tell.send(if begin().is_err() { "ends" } else { "begins" }).unwrap();
        });
        assert_eq!(told.recv(), Ok("waits"));
        drop(pool);
        allow.send(()).unwrap();
        assert_eq!(told.recv(), Ok("ends"));
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
            pool.submit(key, Duration::ZERO, move |begin| assert!(begin().is_ok() && held.recv().is_err()));
        }
        let outcomes: Vec<_> = (0..=MOST_STUCK).map(|_| pool.next(LONG).unwrap().1.unwrap_err()).collect();
        let last = outcomes[MOST_STUCK].to_string();
        assert!(last.starts_with(&format!("{MOST_STUCK} threads are stuck")), "{last}");
        drop(hold);
        // Threads that returned while no outcome was awaited take no room from later jobs.
        while pool.stuck.load(Ordering::Acquire) > 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        pool.submit(100, LONG, |_| ());
        assert_eq!(pool.next(LONG), Some((100, Ok(()))));
    }
}
