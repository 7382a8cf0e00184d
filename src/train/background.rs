//! Background work: jobs in order, on one lasting thread, while their owner computes.
//!
//! The thread starts with the first job and ends with its owner: a thread per job would leave its
//! allocator's arena with each.

use std::thread::{Builder, JoinHandle};

use crossbeam_channel::{Receiver, Sender, unbounded};

use super::TrainError;
use crate::flow::caught;

type Done = Result<(), TrainError>;
type Job = Box<dyn FnOnce() -> Done + Send>;

/// The thread `checkpoint`, and the jobs whose results were not taken. Dropping it waits for them and
/// logs their errors.
pub(crate) struct Background {
    thread: Option<(Sender<Job>, JoinHandle<()>)>,
    done: (Sender<Done>, Receiver<Done>),
    /// Number of jobs whose results were not taken.
    open: usize,
}

impl Default for Background {
    fn default() -> Self {
        Background { thread: None, done: unbounded(), open: 0 }
    }
}

impl Background {
    /// Starts a job after those before it. If no thread can start, the job runs here.
    pub fn start(&mut self, job: impl FnOnce() -> Done + Send + 'static) {
        self.open += 1;
        let unsent = match self.jobs() {
            Some(jobs) => jobs.send(Box::new(job)).err().map(|unsent| unsent.0),
            None => Some(Box::new(job) as Job),
        };
        unsent.into_iter().for_each(|job| run(job, &self.done.0));
    }

    /// Waits until all jobs have ended, and returns their first error.
    pub fn wait(&mut self) -> Done {
        let mut first = Ok(());
        while self.open > 0 {
            self.open -= 1;
            first = first.and(self.done.1.recv().unwrap_or(Err(TrainError::Ended)));
        }
        first
    }

    /// Returns the error of a job that has failed. Does not wait.
    pub fn check(&mut self) -> Done {
        while let Ok(done) = self.done.1.try_recv() {
            self.open -= 1;
            done?;
        }
        Ok(())
    }

    fn jobs(&mut self) -> Option<&Sender<Job>> {
        if self.thread.is_none() {
            let (jobs, queue) = unbounded::<Job>();
            let done = self.done.0.clone();
            let body = move || queue.into_iter().for_each(|job| run(job, &done));
            self.thread = Builder::new().name("checkpoint".into()).spawn(body).ok().map(|thread| (jobs, thread));
        }
        self.thread.as_ref().map(|(jobs, _)| jobs)
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        if let Err(error) = self.wait() {
            tracing::error!("{error}");
        }
        if let Some((jobs, thread)) = self.thread.take() {
            drop(jobs);
            // Panics of jobs are errors of jobs.
            drop(thread.join());
        }
    }
}

fn run(job: Job, to: &Sender<Done>) {
    let done = caught(job).unwrap_or_else(|message| Err(TrainError::Tensor(message)));
    // The receiver outlives the thread.
    drop(to.send(done));
}

#[cfg(test)]
mod tests {
    use std::thread::{ThreadId, current};

    use super::*;

    #[test]
    fn jobs_run_in_order_on_one_thread_and_their_first_error_is_returned_once() {
        let mut background = Background::default();
        let (seen, order) = unbounded::<(usize, ThreadId)>();
        for at in 0..4 {
            let seen = seen.clone();
            background.start(move || {
                seen.send((at, current().id())).unwrap();
                assert!(at != 2, "job {at}");
                if at == 1 { Err(TrainError::NoGradient) } else { Ok(()) }
            });
        }
        assert!(matches!(background.wait(), Err(TrainError::NoGradient)));
        assert!(background.wait().is_ok() && background.check().is_ok());
        background.start(|| panic!("job 4"));
        assert!(matches!(background.wait(), Err(TrainError::Tensor(message)) if message == "job 4"));
        drop((seen, background));
        let (order, threads): (Vec<_>, Vec<_>) = order.iter().unzip();
        assert_eq!(order, [0, 1, 2, 3]);
        assert!(threads[0] != current().id() && threads.iter().all(|thread| *thread == threads[0]));
    }
}
