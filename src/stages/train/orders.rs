//! Orders to a running trainer: a pause, and a checkpoint out of turn.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::watch;

/// Gives orders to a trainer ([`Trainer::ordered_by`](super::Trainer::ordered_by)) from any thread. Clones
/// give them to the same one.
///
/// Orders take effect between two steps. They change no number of any step.
#[derive(Clone, Debug, Default)]
pub struct Orders(Arc<Given>);

#[derive(Debug, Default)]
struct Given {
    paused: watch::Sender<bool>,
    save: AtomicBool,
}

impl Orders {
    /// Takes no step from now on. Other stages work until the bounds of what is in flight. A run that is
    /// drained or stopped continues to its end.
    pub fn pause(&self) {
        self.0.paused.send_replace(true);
    }

    /// Ends a pause.
    pub fn resume(&self) {
        self.0.paused.send_replace(false);
    }

    /// True between [`Orders::pause`] and [`Orders::resume`].
    pub fn is_paused(&self) -> bool {
        *self.0.paused.borrow()
    }

    /// Saves a checkpoint of the newest step, or of the next if that one is saved already.
    pub fn save_checkpoint(&self) {
        self.0.save.store(true, Ordering::Relaxed);
        // Also during a pause.
        self.0.paused.send_modify(|_| ());
    }

    pub(super) fn pauses(&self) -> watch::Receiver<bool> {
        self.0.paused.subscribe()
    }

    /// Returns true once for an order to save.
    pub(super) fn takes_save(&self) -> bool {
        self.0.save.swap(false, Ordering::Relaxed)
    }
}
