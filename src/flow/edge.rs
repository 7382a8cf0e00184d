//! Edge: a bounded queue of items, each with token credit (law F1), and the port that wires it.
//!
//! A producer takes as much credit as its item has tokens, then a place in the queue, and waits for
//! either. The credit returns when the item is popped, or dropped unread because the consumer is
//! gone. An item larger than the whole capacity takes all of it, so it travels alone. When the last
//! consumer is gone, the queue disconnects and the credit closes, so no producer waits in vain.
//!
//! The queue is a flume channel, which serves async tasks and OS threads alike. Only this file and
//! `sync` depend on it.

use std::sync::Arc;
use std::task::Poll;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::sync::atomic::{AtomicU64, Ordering};
use super::sync::{OwnedSemaphorePermit, Semaphore, TryAcquireError, flume};
use super::{Message, StageError};

/// Capacity of an edge. Both limits apply; a single item is admitted whatever its size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capacity {
    /// Items in the queue, at least 1. Default: 8.
    pub items: usize,
    /// Tokens in the queue, by [`Message::tokens`], at least 1. Default: 2^20.
    pub tokens: usize,
}

impl Capacity {
    /// Capacity of `items` items with at most 2^20 tokens in total.
    pub const fn items(items: usize) -> Self {
        Capacity { items, tokens: 1 << 20 }
    }

    /// Limits the tokens in the queue.
    pub const fn tokens(self, tokens: usize) -> Self {
        Capacity { tokens, ..self }
    }
}

impl Default for Capacity {
    /// Eight items: enough to hide jitter, few enough to keep what is in flight fresh.
    fn default() -> Self {
        Capacity::items(8)
    }
}

/// Function called with every n-th item of an edge, in its producer.
pub(crate) struct Tap<T> {
    pub(crate) every: u64,
    pub(crate) seen: u64,
    pub(crate) look: Box<dyn FnMut(&T) + Send>,
}

/// Counters of an edge. A depth is a difference, read in an order that never overstates it.
#[derive(Debug)]
pub(crate) struct Gauge {
    pub(crate) capacity: Capacity,
    credit: Arc<Semaphore>,
    sent: AtomicU64,
    received: AtomicU64,
    tokens_sent: AtomicU64,
    tokens_received: AtomicU64,
}

/// Reading of an edge's counters.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Flowed {
    pub(crate) sent: u64,
    pub(crate) received: u64,
    pub(crate) tokens_sent: u64,
    pub(crate) tokens_received: u64,
    pub(crate) credit_out: usize,
}

impl Gauge {
    pub(crate) fn read(&self) -> Flowed {
        let (sent, tokens_sent) = (self.sent.load(Ordering::Acquire), self.tokens_sent.load(Ordering::Acquire));
        let (received, tokens_received) = (self.received.load(Ordering::Acquire), self.tokens_received.load(Ordering::Acquire));
        let credit_out = self.budget() as usize - self.credit.available_permits();
        Flowed { sent, received, tokens_sent, tokens_received, credit_out }
    }

    /// Token capacity in the semaphore's 32 bits.
    fn budget(&self) -> u32 {
        u32::try_from(self.capacity.tokens).unwrap_or(u32::MAX)
    }

    fn price(&self, tokens: usize) -> u32 {
        u32::try_from(tokens).unwrap_or(u32::MAX).min(self.budget())
    }
}

/// Item in a queue, with its tokens and its credit.
pub(crate) struct Parcel<T> {
    item: T,
    pub(crate) tokens: usize,
    credit: Option<OwnedSemaphorePermit>,
}

/// Result of a send without a wait.
pub(crate) enum Offer<T> {
    /// In the queue, with this many tokens.
    Sent(usize),
    Closed,
    Full(Parcel<T>),
}

/// Producing end of an edge; clones share the edge.
pub(crate) struct Tx<T> {
    queue: flume::Sender<Parcel<T>>,
    gauge: Arc<Gauge>,
    taps: Option<Arc<Mutex<Vec<Tap<T>>>>>,
}

/// Consuming end of an edge; clones share the items.
pub(crate) struct Rx<T> {
    queue: flume::Receiver<Parcel<T>>,
    gauge: Arc<Gauge>,
    _close: Arc<CloseCredit>,
}

/// Closes the credit when the last clone of a consumer is dropped.
struct CloseCredit(Arc<Semaphore>);

impl Drop for CloseCredit {
    fn drop(&mut self) {
        self.0.close();
    }
}

pub(crate) fn edge<T: Message>(capacity: Capacity, taps: Vec<Tap<T>>) -> (Tx<T>, Rx<T>, Arc<Gauge>) {
    let (sender, receiver) = flume::bounded(capacity.items);
    let credit = Arc::new(Semaphore::new(capacity.tokens.min(u32::MAX as usize)));
    let gauge = Arc::new(Gauge {
        capacity,
        credit: Arc::clone(&credit),
        sent: AtomicU64::new(0),
        received: AtomicU64::new(0),
        tokens_sent: AtomicU64::new(0),
        tokens_received: AtomicU64::new(0),
    });
    let taps = (!taps.is_empty()).then(|| Arc::new(Mutex::new(taps)));
    let rx = Rx { queue: receiver, gauge: Arc::clone(&gauge), _close: Arc::new(CloseCredit(credit)) };
    (Tx { queue: sender, gauge: Arc::clone(&gauge), taps }, rx, gauge)
}

impl<T: Message> Tx<T> {
    /// Sends without a wait, or returns the parcel for [`Tx::push`].
    pub(crate) fn offer(&self, item: T) -> Offer<T> {
        self.show(&item);
        let tokens = item.tokens();
        let mut parcel = Parcel { item, tokens, credit: None };
        if tokens > 0 {
            match Arc::clone(&self.gauge.credit).try_acquire_many_owned(self.gauge.price(tokens)) {
                Ok(credit) => parcel.credit = Some(credit),
                Err(TryAcquireError::NoPermits) => return Offer::Full(parcel),
                Err(TryAcquireError::Closed) => return Offer::Closed,
            }
        }
        match self.queue.try_send(parcel) {
            Ok(()) => {
                self.sent(tokens);
                Offer::Sent(tokens)
            }
            Err(flume::TrySendError::Full(parcel)) => Offer::Full(parcel),
            Err(flume::TrySendError::Disconnected(_)) => Offer::Closed,
        }
    }

    /// Waits for credit and room; fails when the consumer is gone. Not cancel-safe: a dropped future
    /// drops the item.
    pub(crate) async fn push(&self, mut parcel: Parcel<T>) -> Result<(), StageError> {
        let tokens = parcel.tokens;
        if tokens > 0 && parcel.credit.is_none() {
            let credit = Arc::clone(&self.gauge.credit).acquire_many_owned(self.gauge.price(tokens));
            parcel.credit = Some(credit.await.map_err(|_| StageError::closed())?);
        }
        self.queue.send_async(parcel).await.map_err(|_| StageError::closed())?;
        self.sent(tokens);
        Ok(())
    }

    fn sent(&self, tokens: usize) {
        self.gauge.sent.fetch_add(1, Ordering::Release);
        self.gauge.tokens_sent.fetch_add(tokens as u64, Ordering::Release);
    }

    fn show(&self, item: &T) {
        let Some(taps) = &self.taps else { return };
        for tap in taps.lock().iter_mut() {
            if tap.seen.is_multiple_of(tap.every) {
                (tap.look)(item);
            }
            tap.seen += 1;
        }
    }
}

impl<T: Message> Rx<T> {
    /// Takes the next item and its tokens, if it is there; `None` at the end, as [`Rx::pop`].
    pub(crate) fn try_pop(&self) -> Poll<Option<(T, usize)>> {
        match self.queue.try_recv() {
            Ok(parcel) => Poll::Ready(Some(self.open(parcel))),
            Err(flume::TryRecvError::Empty) => Poll::Pending,
            Err(flume::TryRecvError::Disconnected) => Poll::Ready(None),
        }
    }

    /// Waits for the next item and its tokens; `None` when all producers are gone and the queue is empty.
    pub(crate) async fn pop(&self) -> Option<(T, usize)> {
        self.queue.recv_async().await.ok().map(|parcel| self.open(parcel))
    }

    /// Takes the item out of its parcel, which returns the credit.
    fn open(&self, parcel: Parcel<T>) -> (T, usize) {
        self.gauge.received.fetch_add(1, Ordering::Release);
        self.gauge.tokens_received.fetch_add(parcel.tokens as u64, Ordering::Release);
        (parcel.item, parcel.tokens)
    }
}

impl<T> Clone for Tx<T> {
    fn clone(&self) -> Self {
        Tx { queue: self.queue.clone(), gauge: Arc::clone(&self.gauge), taps: self.taps.clone() }
    }
}

impl<T> Clone for Rx<T> {
    fn clone(&self) -> Self {
        Rx { queue: self.queue.clone(), gauge: Arc::clone(&self.gauge), _close: Arc::clone(&self._close) }
    }
}

/// Output of a node, to be consumed by exactly one stage, sink, tee or merge.
#[must_use = "a port that nothing consumes is an error"]
pub struct Port<T> {
    pub(crate) edge: usize,
    /// Identity of its flow.
    pub(crate) flow: Arc<()>,
    pub(crate) slot: Arc<Slot<T>>,
}

/// Ends of an edge until its nodes take them, and taps for the edge.
pub(crate) struct Slot<T> {
    pub(crate) taps: Mutex<Vec<Tap<T>>>,
    ends: Mutex<Option<(Tx<T>, Rx<T>)>>,
}

impl<T: Message> Slot<T> {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Slot { taps: Mutex::default(), ends: Mutex::default() })
    }

    pub(crate) fn build(&self, capacity: Capacity) -> Arc<Gauge> {
        let taps = std::mem::take(&mut *self.taps.lock());
        let (tx, rx, gauge) = edge(capacity, taps);
        *self.ends.lock() = Some((tx, rx));
        gauge
    }

    pub(crate) fn tx(&self) -> Tx<T> {
        let ends = self.ends.lock();
        ends.as_ref().expect("edges are built before jobs, and their producers come first").0.clone()
    }

    /// Takes the consuming end out: a copy left here would keep the edge open.
    pub(crate) fn rx(&self) -> Rx<T> {
        let ends = self.ends.lock().take();
        ends.expect("edges are built before jobs, and have one consumer").1
    }
}
