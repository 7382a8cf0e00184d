//! The answer to a submitted training command, waited for by blocking or by `await`.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::TrainError;

/// Result of a backend's command. Clones are cheap and share the result.
pub struct TrainFuture<T>(Arc<Slot<T>>);

/// Sender of the result. If it is dropped unfulfilled, the future resolves to an error.
pub struct Promise<T>(Arc<Slot<T>>);

struct Slot<T> {
    state: Mutex<State<T>>,
    answered: Condvar,
}

enum State<T> {
    Pending(Vec<Waker>),
    Done(Result<T, TrainError>),
}

impl<T> Slot<T> {
    /// A panic elsewhere leaves either state whole.
    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock()
    }
}

/// A future and the promise that fulfils it.
pub fn promise<T>() -> (Promise<T>, TrainFuture<T>) {
    let slot = Arc::new(Slot { state: Mutex::new(State::Pending(Vec::new())), answered: Condvar::new() });
    (Promise(slot.clone()), TrainFuture(slot))
}

impl<T> Promise<T> {
    /// Delivers the result and wakes all waiters.
    pub fn fulfil(self, answer: Result<T, TrainError>) {
        self.answer(answer);
    }

    fn answer(&self, answer: Result<T, TrainError>) {
        let mut state = self.0.lock();
        if let State::Pending(wakers) = &mut *state {
            let wakers = std::mem::take(wakers);
            *state = State::Done(answer);
            drop(state);
            self.0.answered.notify_all();
            wakers.into_iter().for_each(Waker::wake);
        }
    }
}

impl<T> Drop for Promise<T> {
    fn drop(&mut self) {
        self.answer(Err(TrainError::Ended));
    }
}

impl<T> TrainFuture<T> {
    /// An answer that is there already.
    pub fn ready(answer: Result<T, TrainError>) -> Self {
        TrainFuture(Arc::new(Slot { state: Mutex::new(State::Done(answer)), answered: Condvar::new() }))
    }

    /// Returns true if the result is there.
    pub fn done(&self) -> bool {
        matches!(&*self.0.lock(), State::Done(_))
    }
}

impl<T: Clone> TrainFuture<T> {
    /// Blocks until the answer is there. Not for async code: `.await` instead.
    pub fn wait(&self) -> Result<T, TrainError> {
        let mut state = self.0.lock();
        loop {
            match &*state {
                State::Done(answer) => return answer.clone(),
                State::Pending(_) => self.0.answered.wait(&mut state),
            }
        }
    }
}

impl<T> Clone for TrainFuture<T> {
    fn clone(&self) -> Self {
        TrainFuture(self.0.clone())
    }
}

impl<T: Clone> Future for TrainFuture<T> {
    type Output = Result<T, TrainError>;

    fn poll(self: Pin<&mut Self>, context: &mut Context) -> Poll<Self::Output> {
        match &mut *self.0.lock() {
            State::Done(answer) => Poll::Ready(answer.clone()),
            State::Pending(wakers) => {
                if !wakers.iter().any(|waker| waker.will_wake(context.waker())) {
                    wakers.push(context.waker().clone());
                }
                Poll::Pending
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_wait_gives_the_same_answer() {
        let (promise, future) = promise();
        assert!(!future.done());
        let waiter = std::thread::spawn({
            let future = future.clone();
            move || future.wait()
        });
        promise.fulfil(Ok(7));
        assert_eq!(waiter.join().unwrap().unwrap(), 7);
        assert!(future.done());
        assert_eq!((future.wait().unwrap(), future.wait().unwrap()), (7, 7));
    }

    #[tokio::test]
    async fn awaiting_wakes_and_may_be_repeated() {
        let (promise, future) = promise();
        let task = tokio::spawn(future.clone());
        std::thread::spawn(move || promise.fulfil(Ok("done")));
        assert_eq!(task.await.unwrap().unwrap(), "done");
        assert_eq!(future.clone().await.unwrap(), "done");
        assert_eq!(future.await.unwrap(), "done");
    }

    #[test]
    fn a_dropped_promise_answers_that_the_backend_ended() {
        let (promise, future) = promise::<u8>();
        drop(promise);
        assert!(matches!(future.wait(), Err(TrainError::Ended)));
    }
}
