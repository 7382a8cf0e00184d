//! Port: a typed handle on an output, and the slot for the ends of its edge.

use std::sync::Arc;

use parking_lot::Mutex;

use super::edge::{Gauge, Rx, Tap, Tx, edge};
use super::{Capacity, Message};

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
