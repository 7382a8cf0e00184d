//! Jobs: one per worker, each owning its ends.
//!
//! A job settles before it drops its ends: a failure is reported, and the run stopped, before
//! neighbours can see an edge close. So the first failure that reaches the runner is the root cause
//! (law F3).

use std::any::Any;
use std::error::Error;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::thread;

use crossbeam_channel::Sender;

use super::StageError;
use super::control::Signal;
use super::io::Seat;
use super::runner::{Event, StageFailure};

/// Connection of a worker to the runner.
#[derive(Clone)]
pub(crate) struct Post {
    pub(crate) seat: Seat,
    pub(crate) events: Sender<Event>,
    pub(crate) worker: usize,
}

impl Post {
    /// Name of the worker's thread.
    pub(crate) fn name(&self) -> String {
        match self.worker {
            0 => self.seat.stage.to_string(),
            worker => format!("{}-{worker}", self.seat.stage),
        }
    }

    /// Records how a worker's code ended, while it still holds its ends. `ended`: it received the
    /// end of its input, or has none.
    pub(crate) fn settle(&self, result: thread::Result<Result<(), StageError>>, ended: bool) {
        let failed = match result {
            Ok(Ok(())) => None,
            Ok(Err(error)) => error.into_cause().map(|cause| self.fail(false, cause)),
            Err(panic) => {
                self.fail(true, panic_message(panic.as_ref()).into());
                Some(())
            }
        };
        if failed.is_none() && !ended {
            // This worker's input has no consumer any more, which a source that waits for admission can't detect.
            self.seat.control.raise(Signal::Drain);
        }
    }

    pub(crate) fn fail(&self, panicked: bool, cause: Box<dyn Error + Send + Sync>) {
        let failure = StageFailure { stage: self.seat.stage.to_string(), worker: self.worker, panicked, cause };
        self.events.send(Event::Failed(failure)).expect("the runner receives until every worker is gone");
        self.seat.control.raise(Signal::Stop);
    }
}

/// Calls a user's closure; an error is the message of its panic.
pub(crate) fn caught<T>(call: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(call)).map_err(|panic| panic_message(panic.as_ref()))
}

pub(crate) fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| text.to_string());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "a panic without a message".into())
}

/// Work of one worker.
pub(crate) enum Job {
    Thread(Box<dyn FnOnce(Post) + Send>),
    Task(Box<dyn FnOnce(Post) -> TaskFuture + Send>),
}

type TaskFuture = Pin<Box<dyn Future<Output = ()> + Send>>;

impl Job {
    pub(crate) fn thread(body: impl FnOnce(Post) + Send + 'static) -> Self {
        Job::Thread(Box::new(body))
    }

    pub(crate) fn task<F: Future<Output = ()> + Send + 'static>(body: impl FnOnce(Post) -> F + Send + 'static) -> Self {
        Job::Task(Box::new(|post| Box::pin(body(post))))
    }
}
