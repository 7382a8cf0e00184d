//! What `src/flow/sync.rs` names, with a step before every operation. The primitives themselves are the real ones.
//!
//! Between two steps nothing else runs, so a lock inside a primitive is never contended, provided that no step is taken while it is
//! held. Wakers are called under such locks: they take none.

use std::sync::Arc;
use std::time::Duration;

pub use shuttle::sync::atomic;
pub use tokio::sync::TryAcquireError;

/// Lets any other thread go first.
fn step() {
    if !std::thread::panicking() {
        // Shuttle's `sleep` is its plain switch; its `yield_now` would lower the thread's priority too.
        shuttle::thread::sleep(Duration::ZERO);
    }
}

/// Lets any other thread go first.
pub fn point() {
    step();
}

/// Parking, by way of shuttle's wakers: its own `unpark` takes a step.
pub mod thread {
    use std::future::poll_fn;
    use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
    use std::sync::{Arc, Mutex};
    use std::task::{Poll, Waker};

    #[derive(Default)]
    struct Token {
        there: AtomicBool,
        parked: Mutex<Option<Waker>>,
    }

    shuttle::thread_local! {
        static TOKEN: Arc<Token> = Arc::default();
    }

    pub struct Thread(Arc<Token>);

    pub fn current() -> Thread {
        Thread(TOKEN.with(Arc::clone))
    }

    impl Thread {
        pub fn unpark(&self) {
            self.0.there.store(true, SeqCst);
            if let Some(parked) = self.0.parked.lock().unwrap().take() {
                parked.wake();
            }
        }
    }

    pub fn park() {
        super::step();
        let token = current().0;
        shuttle::future::block_on(poll_fn(|context| {
            if token.there.swap(false, SeqCst) {
                return Poll::Ready(());
            }
            *token.parked.lock().unwrap() = Some(context.waker().clone());
            Poll::Pending
        }));
    }
}

pub mod flume {
    use super::step;
    use ::flume::SendError;
    pub use ::flume::{RecvError, TryRecvError, TrySendError};

    pub struct Sender<T>(::flume::Sender<T>);
    pub struct Receiver<T>(::flume::Receiver<T>);

    pub fn bounded<T>(capacity: usize) -> (Sender<T>, Receiver<T>) {
        let (sender, receiver) = ::flume::bounded(capacity);
        (Sender(sender), Receiver(receiver))
    }

    impl<T> Sender<T> {
        pub fn try_send(&self, item: T) -> Result<(), TrySendError<T>> {
            step();
            self.0.try_send(item)
        }

        pub async fn send_async(&self, item: T) -> Result<(), SendError<T>> {
            step();
            self.0.send_async(item).await
        }
    }

    impl<T> Receiver<T> {
        pub fn try_recv(&self) -> Result<T, TryRecvError> {
            step();
            self.0.try_recv()
        }

        pub async fn recv_async(&self) -> Result<T, RecvError> {
            step();
            self.0.recv_async().await
        }
    }

    impl<T> Clone for Sender<T> {
        fn clone(&self) -> Self {
            Sender(self.0.clone())
        }
    }

    impl<T> Clone for Receiver<T> {
        fn clone(&self) -> Self {
            Receiver(self.0.clone())
        }
    }

    impl<T> Drop for Sender<T> {
        fn drop(&mut self) {
            step();
        }
    }

    impl<T> Drop for Receiver<T> {
        fn drop(&mut self) {
            step();
        }
    }
}

#[derive(Debug)]
pub struct Semaphore(Arc<tokio::sync::Semaphore>);

#[derive(Debug)]
pub struct OwnedSemaphorePermit {
    _permit: tokio::sync::OwnedSemaphorePermit,
}

impl Semaphore {
    pub fn new(permits: usize) -> Self {
        Semaphore(Arc::new(tokio::sync::Semaphore::new(permits)))
    }

    pub fn available_permits(&self) -> usize {
        step();
        self.0.available_permits()
    }

    pub fn close(&self) {
        step();
        self.0.close();
    }

    pub fn try_acquire_many_owned(self: Arc<Self>, permits: u32) -> Result<OwnedSemaphorePermit, TryAcquireError> {
        step();
        Arc::clone(&self.0).try_acquire_many_owned(permits).map(|_permit| OwnedSemaphorePermit { _permit })
    }

    pub async fn acquire_many_owned(self: Arc<Self>, permits: u32) -> Result<OwnedSemaphorePermit, tokio::sync::AcquireError> {
        step();
        Arc::clone(&self.0).acquire_many_owned(permits).await.map(|_permit| OwnedSemaphorePermit { _permit })
    }
}

impl Drop for OwnedSemaphorePermit {
    fn drop(&mut self) {
        step();
    }
}

#[derive(Debug, Default)]
pub struct Mutex<T>(tokio::sync::Mutex<T>);

pub struct MutexGuard<'a, T>(tokio::sync::MutexGuard<'a, T>);

impl<T> Mutex<T> {
    pub fn try_lock(&self) -> Result<MutexGuard<'_, T>, tokio::sync::TryLockError> {
        step();
        self.0.try_lock().map(MutexGuard)
    }

    pub async fn lock(&self) -> MutexGuard<'_, T> {
        step();
        MutexGuard(self.0.lock().await)
    }
}

impl<T> std::ops::Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> std::ops::DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.0
    }
}

impl<T> Drop for MutexGuard<'_, T> {
    fn drop(&mut self) {
        step();
    }
}

pub mod watch {
    use super::step;
    use tokio::sync::watch::{Ref, error::RecvError};

    #[derive(Debug, Default)]
    pub struct Sender<T>(tokio::sync::watch::Sender<T>);

    #[derive(Clone, Debug)]
    pub struct Receiver<T>(tokio::sync::watch::Receiver<T>);

    pub fn channel<T>(value: T) -> (Sender<T>, Receiver<T>) {
        let (sender, receiver) = tokio::sync::watch::channel(value);
        (Sender(sender), Receiver(receiver))
    }

    impl<T> Sender<T> {
        pub fn new(value: T) -> Self {
            Sender(tokio::sync::watch::Sender::new(value))
        }

        pub fn subscribe(&self) -> Receiver<T> {
            step();
            Receiver(self.0.subscribe())
        }

        pub fn borrow(&self) -> Ref<'_, T> {
            step();
            self.0.borrow()
        }

        pub fn receiver_count(&self) -> usize {
            step();
            self.0.receiver_count()
        }

        pub fn send_modify(&self, change: impl FnOnce(&mut T)) {
            step();
            self.0.send_modify(change);
        }

        pub fn send_if_modified(&self, change: impl FnOnce(&mut T) -> bool) -> bool {
            step();
            self.0.send_if_modified(change)
        }
    }

    impl<T> Receiver<T> {
        pub fn borrow(&self) -> Ref<'_, T> {
            step();
            self.0.borrow()
        }

        pub async fn wait_for(&mut self, reached: impl FnMut(&T) -> bool) -> Result<Ref<'_, T>, RecvError> {
            step();
            self.0.wait_for(reached).await
        }
    }

    impl<T> Drop for Sender<T> {
        fn drop(&mut self) {
            step();
        }
    }
}
