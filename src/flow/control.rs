//! End, drain, stop (law F5).
//!
//! Nothing waits for a signal at a channel: signals travel in band, as ends of edges. *Drain* makes
//! the sources end; *stop* makes every stage see the end of its input at its next receive. Then
//! ends cascade: stages downstream find their input closed, stages upstream find their output
//! closed.
//!
//! Why no wait outlives a stop, by induction over the acyclic data graph (law F2):
//! - A sink never sends. At its next receive its input has ended, or it waits at an empty edge.
//! - A stage blocked in a send waits at a full edge, so its consumer will not wait for input: it
//!   returns to a receive, or waits in a send itself, further down, where the same holds. Each
//!   ends, and a send whose consumer is gone fails.
//! - A stage waiting at an empty edge has producers that are not blocked there; the sources among
//!   them end, and with them the edge.
//! - Waits for admission and for weights are on `watch` cells, which the signal wakes.
//!
//! What remains is a stage's own code, which must come back to a receive, a send or its end by
//! itself.

use std::sync::Arc;

use super::sync::atomic::{AtomicU8, Ordering};
use super::sync::watch;

/// Request to a run. It only rises.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Signal {
    /// Continue.
    #[default]
    Run,
    /// Sources end; items in flight are finished.
    Drain,
    /// Every stage ends at its next receive; items in flight are dropped.
    Stop,
}

/// Level of a stop for the reason that no stage could make progress.
const STALLED: u8 = Signal::Stop as u8 + 1;

/// Handle that ends a run from any thread. Clones control the same run.
#[derive(Clone, Debug)]
pub struct Control(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    signal: watch::Sender<Signal>,
    /// Copy of `signal`, for one cheap load per receive; [`STALLED`] is a stop, too.
    level: AtomicU8,
    /// Requests from outside; the engine itself raises `signal` too.
    asked: watch::Sender<Signal>,
}

impl Control {
    pub(crate) fn new() -> Self {
        let (signal, asked) = (watch::Sender::default(), watch::Sender::default());
        Control(Arc::new(Shared { signal, level: AtomicU8::new(0), asked }))
    }

    /// Ends the sources, also those that wait for admission. Items in flight are finished.
    pub fn drain(&self) {
        self.ask(Signal::Drain);
    }

    /// Ends every stage at its next receive or wait. Items in flight are dropped and counted.
    pub fn stop(&self) {
        self.ask(Signal::Stop);
    }

    /// Present request.
    pub fn signal(&self) -> Signal {
        match self.0.level.load(Ordering::Acquire) {
            0 => Signal::Run,
            1 => Signal::Drain,
            _ => Signal::Stop,
        }
    }

    /// Highest request by [`Control::drain`] or [`Control::stop`].
    pub(crate) fn asked(&self) -> Signal {
        *self.0.asked.borrow()
    }

    /// Raises the request for a reason of the engine: a failure, a stage that returned early, no
    /// sink left.
    pub(crate) fn raise(&self, to: Signal) {
        self.0.level.fetch_max(to as u8, Ordering::AcqRel);
        self.0.signal.send_if_modified(|signal| {
            let rises = to > *signal;
            *signal = to.max(*signal);
            rises
        });
    }

    /// Stops a run in which no stage can make progress (law F7).
    pub(crate) fn stall(&self) {
        self.0.level.fetch_max(STALLED, Ordering::AcqRel);
        self.raise(Signal::Stop);
    }

    /// Returns true if the run was stopped because no stage could make progress.
    pub(crate) fn is_stalled(&self) -> bool {
        self.0.level.load(Ordering::Acquire) == STALLED
    }

    /// Waits for `at_least`. Cancel-safe.
    pub(crate) async fn reached(&self, at_least: Signal) {
        let mut signal = self.0.signal.subscribe();
        signal.wait_for(|signal| *signal >= at_least).await.expect("the sender lives in self");
    }

    fn ask(&self, to: Signal) {
        self.0.asked.send_modify(|asked| *asked = to.max(*asked));
        self.raise(to);
    }
}
