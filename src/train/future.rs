//! The answer to a submitted training command, waited for by blocking or by `await`.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, Shared};

use super::TrainError;
use crate::flow::block_on;

/// Result of a backend's command. Clones are cheap and share the result. As any future, it must not be
/// polled again after it is ready: to wait more than once, wait for a clone.
#[derive(Clone)]
pub struct TrainFuture<T>(Shared<BoxFuture<'static, Result<T, TrainError>>>);

/// A future and the function that fulfils it, which returns true if the future still exists. If that
/// function is dropped uncalled, the future resolves to [`TrainError::Ended`].
pub fn promise<T: Clone + Send + 'static>() -> (impl FnOnce(Result<T, TrainError>) -> bool, TrainFuture<T>) {
    let (sender, receiver) = flume::bounded(1);
    let answer = receiver.into_recv_async().map(|answer| answer.unwrap_or(Err(TrainError::Ended)));
    (move |answer| sender.send(answer).is_ok(), TrainFuture(answer.boxed().shared()))
}

impl<T: Clone + Send + 'static> TrainFuture<T> {
    /// An answer that is there already.
    pub fn ready(answer: Result<T, TrainError>) -> Self {
        let (fulfil, future) = promise();
        fulfil(answer);
        future
    }

    /// Blocks until the answer is there. Not for async code: `.await` instead.
    pub fn wait(&self) -> Result<T, TrainError> {
        block_on(self.clone())
    }
}

impl<T: Clone> Future for TrainFuture<T> {
    type Output = Result<T, TrainError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context) -> Poll<Self::Output> {
        self.0.poll_unpin(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn every_wait_gives_the_same_answer_by_blocking_and_by_await() {
        let (fulfil, future) = promise();
        assert!(future.clone().now_or_never().is_none());
        let (task, blocked) = (tokio::spawn(future.clone()), future.clone());
        let blocked = std::thread::spawn(move || blocked.wait());
        std::thread::spawn(move || fulfil(Ok(7)));
        assert_eq!((task.await.unwrap().unwrap(), blocked.join().unwrap().unwrap()), (7, 7));
        let (fulfil, dropped) = promise::<u8>();
        drop(fulfil);
        assert!(matches!(dropped.wait(), Err(TrainError::Ended)), "law F3: the backend ended");
    }
}
