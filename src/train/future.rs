//! The answer to a submitted training command, waited for by blocking or by `await`.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use parking_lot::{Condvar, Mutex};

use super::TrainError;

/// Result of a backend's command. Clones are cheap and share the result.
pub struct TrainFuture<T>(Arc<Slot<T>>);

struct Slot<T> {
    state: Mutex<State<T>>,
    answered: Condvar,
}

struct State<T> {
    answer: Option<Result<T, TrainError>>,
    wakers: Vec<Waker>,
}

/// A future and the function that fulfils it. If that function is dropped uncalled, the future
/// resolves to [`TrainError::Ended`].
pub fn promise<T>() -> (impl FnOnce(Result<T, TrainError>), TrainFuture<T>) {
    let state = Mutex::new(State { answer: None, wakers: Vec::new() });
    let slot = Arc::new(Slot { state, answered: Condvar::new() });
    let promise = Promise(slot.clone());
    (move |answer| promise.fulfil(answer), TrainFuture(slot))
}

struct Promise<T>(Arc<Slot<T>>);

impl<T> Promise<T> {
    /// Delivers the result, unless there is one, and wakes all waiters.
    fn fulfil(&self, answer: Result<T, TrainError>) {
        let mut state = self.0.state.lock();
        if state.answer.is_none() {
            state.answer = Some(answer);
            let wakers = std::mem::take(&mut state.wakers);
            drop(state);
            self.0.answered.notify_all();
            wakers.into_iter().for_each(Waker::wake);
        }
    }
}

impl<T> Drop for Promise<T> {
    fn drop(&mut self) {
        self.fulfil(Err(TrainError::Ended));
    }
}

impl<T> TrainFuture<T> {
    /// An answer that is there already.
    pub fn ready(answer: Result<T, TrainError>) -> Self {
        let (fulfil, future) = promise();
        fulfil(answer);
        future
    }

    /// Returns true if the result is there.
    pub fn done(&self) -> bool {
        self.0.state.lock().answer.is_some()
    }
}

impl<T: Clone> TrainFuture<T> {
    /// Blocks until the answer is there. Not for async code: `.await` instead.
    pub fn wait(&self) -> Result<T, TrainError> {
        let mut state = self.0.state.lock();
        loop {
            match &state.answer {
                Some(answer) => return answer.clone(),
                None => self.0.answered.wait(&mut state),
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
        let mut state = self.0.state.lock();
        if let Some(answer) = &state.answer {
            return Poll::Ready(answer.clone());
        }
        if !state.wakers.iter().any(|waker| waker.will_wake(context.waker())) {
            state.wakers.push(context.waker().clone());
        }
        Poll::Pending
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn every_wait_gives_the_same_answer_by_blocking_and_by_await() {
        let (fulfil, future) = promise();
        assert!(!future.done());
        let (task, blocked) = (tokio::spawn(future.clone()), future.clone());
        let blocked = std::thread::spawn(move || blocked.wait());
        std::thread::spawn(move || fulfil(Ok(7)));
        assert_eq!((task.await.unwrap().unwrap(), blocked.join().unwrap().unwrap()), (7, 7));
        assert!(future.done());
        assert_eq!((future.wait().unwrap(), future.clone().await.unwrap(), future.await.unwrap()), (7, 7, 7));
    }

    #[test]
    fn a_dropped_promise_answers_that_the_backend_ended() {
        let (fulfil, future) = promise::<u8>();
        drop(fulfil);
        assert!(matches!(future.wait(), Err(TrainError::Ended)));
    }
}
