//! A backend's thread: commands on a worker that lives there, in the order of their submission.
//!
//! The queue is unbounded; callers bound it by waiting for results.

use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;

use crossbeam_channel::Sender;
use parking_lot::Mutex;

use super::{BackendState, TrainError, TrainFuture, promise};
use crate::flow::caught;

/// State that commands work on.
pub(super) trait Commanded {
    /// Its state after a command.
    fn state(&self) -> BackendState;

    /// Notes that a command panicked with this message.
    fn abandon(&mut self, _message: &str) {}

    /// Called before the thread waits for a command.
    fn rest(&mut self) {}

    /// Ends its work after the last command.
    fn leave(self);
}

type Command<W> = Box<dyn FnOnce(&mut W) + Send>;

/// The queue of a worker's thread. Dropping it completes submitted commands and joins the thread.
pub(super) struct Commands<W> {
    commands: Option<Sender<Command<W>>>,
    state: Arc<Mutex<BackendState>>,
    thread: Option<JoinHandle<()>>,
}

impl<W: Commanded + 'static> Commands<W> {
    /// Starts the thread `name` with the worker that `begin` makes on it.
    ///
    /// # Errors
    /// `begin` failed or panicked, or no thread could be started.
    pub fn start(name: &str, begin: impl FnOnce() -> io::Result<W> + Send + 'static) -> io::Result<Self> {
        let (commands, queue) = crossbeam_channel::unbounded::<Command<W>>();
        let (ready, started) = crossbeam_channel::bounded(1);
        let body = move || {
            // Tensor operations panic, for example on a device without free memory.
            let begun = caught(begin).unwrap_or_else(|message| Err(io::Error::other(message)));
            let mut worker = match begun {
                Ok(worker) => worker,
                Err(error) => return drop(ready.send(Err(error))),
            };
            // The receiver waits right below.
            drop(ready.send(Ok(worker.state())));
            loop {
                let waiting = queue.try_recv().or_else(|_| {
                    worker.rest();
                    queue.recv()
                });
                let Ok(command) = waiting else { break };
                command(&mut worker);
            }
            worker.leave();
        };
        let thread = std::thread::Builder::new().name(name.into()).spawn(body)?;
        let state = started.recv().map_err(|_| io::Error::other("the trainer's thread failed to start"))??;
        Ok(Commands { commands: Some(commands), state: Arc::new(Mutex::new(state)), thread: Some(thread) })
    }

    /// Queues a command with effects. It fails after an earlier failure, and its own failure
    /// poisons the backend.
    pub fn change<T: Clone + Send + 'static>(
        &self,
        command: impl FnOnce(&mut W) -> Result<T, TrainError> + Send + 'static,
    ) -> TrainFuture<T> {
        self.attempt(command, |_, _| false)
    }

    /// Queues a command with effects. Its failure poisons the backend unless `undo` returns true: then
    /// the worker is as if the command had not come.
    pub fn attempt<T: Clone + Send + 'static>(
        &self,
        command: impl FnOnce(&mut W) -> Result<T, TrainError> + Send + 'static,
        undo: impl FnOnce(&mut W, &TrainError) -> bool + Send + 'static,
    ) -> TrainFuture<T> {
        let state = self.state.clone();
        self.submit(move |worker| {
            if let Some(cause) = state.lock().poisoned.clone() {
                return Err(TrainError::Poisoned(Arc::new(cause)));
            }
            let answer = guarded(worker, command);
            let poisoned = answer.as_ref().err().filter(|error| !undo(worker, error)).cloned();
            *state.lock() = BackendState { poisoned, ..worker.state() };
            answer
        })
    }

    /// Queues a command without effects.
    pub fn submit<T: Clone + Send + 'static>(
        &self,
        command: impl FnOnce(&mut W) -> Result<T, TrainError> + Send + 'static,
    ) -> TrainFuture<T> {
        let (fulfil, future) = promise();
        self.send(move |worker| {
            fulfil(guarded(worker, command));
        });
        future
    }

    /// Queues a command that keeps its own promises.
    pub fn send(&self, command: impl FnOnce(&mut W) + Send + 'static) {
        // A terminated thread drops the command, whose promises resolve to `Ended`.
        self.commands.as_ref().map(|commands| commands.send(Box::new(command)).ok());
    }

    /// State after the last change.
    pub fn state(&self) -> BackendState {
        self.state.lock().clone()
    }
}

impl<W> Drop for Commands<W> {
    fn drop(&mut self) {
        self.commands = None;
        if let Some(thread) = self.thread.take() {
            // A panic outside a command was printed by the thread itself.
            drop(thread.join());
        }
    }
}

/// Runs a command; tensor operations report misuse by panicking.
pub(super) fn guarded<W: Commanded, T>(
    worker: &mut W,
    command: impl FnOnce(&mut W) -> Result<T, TrainError>,
) -> Result<T, TrainError> {
    caught(|| command(worker)).unwrap_or_else(|message| {
        worker.abandon(&message);
        Err(TrainError::Tensor(message))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Idle;

    impl Commanded for Idle {
        fn state(&self) -> BackendState {
            BackendState::default()
        }

        fn leave(self) {}
    }

    #[test]
    fn a_panic_while_a_trainer_starts_is_its_error() {
        let started = Commands::<Idle>::start("test", || panic!("CUDA out of memory"));
        assert_eq!(started.err().unwrap().to_string(), "CUDA out of memory");
    }
}
