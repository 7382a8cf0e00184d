//! Background work of a trainer: one job at a time, on another thread, while commands run.

use std::sync::Arc;
use std::thread::{Builder, JoinHandle};

use parking_lot::Mutex;

/// The thread `checkpoint`, while it has work. Dropping it waits for the end of the job.
#[derive(Default)]
pub(super) struct Background(Option<JoinHandle<()>>);

impl Background {
    /// Starts a job after the one before has ended. If no thread can start, the job runs here.
    pub fn start(&mut self, job: impl FnOnce() + Send + 'static) {
        self.wait();
        let job = Arc::new(Mutex::new(Some(job)));
        let there = job.clone();
        match Builder::new().name("checkpoint".into()).spawn(move || run(&there)) {
            Ok(thread) => self.0 = Some(thread),
            Err(_) => run(&job),
        }
    }

    /// Waits for the end of the job.
    pub fn wait(&mut self) {
        if let Some(thread) = self.0.take() {
            // A job reports its own failures.
            drop(thread.join());
        }
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        self.wait();
    }
}

fn run(job: &Mutex<Option<impl FnOnce()>>) {
    let job = job.lock().take();
    job.into_iter().for_each(|job| job());
}
