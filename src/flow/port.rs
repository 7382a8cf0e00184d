//! A typed handle on an output, and the place where its edge's ends wait until the run builds them.

use std::sync::Arc;

use parking_lot::Mutex;

use super::edge::{Gauge, Rx, Tap, Tx, edge};
use super::{Capacity, Message};

/// An output that waits to be consumed: by exactly one stage, sink, tee or merge.
#[must_use = "a port that nothing consumes is an error"]
pub struct Port<T> {
    pub(crate) edge: usize,
    /// The flow that it belongs to.
    pub(crate) flow: Arc<()>,
    pub(crate) slot: Arc<Slot<T>>,
}

/// Where an edge's ends wait for the nodes that take them, and taps for the edge.
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

    /// Leaves nothing behind, or the edge would never be seen to close.
    pub(crate) fn rx(&self) -> Rx<T> {
        let ends = self.ends.lock().take();
        ends.expect("edges are built before jobs, and have one consumer").1
    }
}
