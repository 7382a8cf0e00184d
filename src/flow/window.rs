//! Admission: how many items a source may have put into the graph so far.
//!
//! The source takes credit before each item; others raise the limit, for instance as groups are trained. The limit never falls.

use std::sync::Arc;

use super::control::{Control, Signal};
use super::sync::watch;

/// A shared admission window. Attach it to a source with [`StageSpec::window`](super::StageSpec::window); keep a clone to raise it.
#[derive(Clone, Debug)]
pub struct Window {
    count: Arc<watch::Sender<Count>>,
    raised_by: Option<&'static str>,
    only_stages: bool,
}

#[derive(Debug)]
struct Count {
    admitted: u64,
    limit: u64,
}

impl Window {
    /// A window that admits `limit` items until it is raised.
    pub fn new(limit: u64) -> Self {
        Window { count: Arc::new(watch::Sender::new(Count { admitted: 0, limit })), raised_by: None, only_stages: false }
    }

    /// Says who raises the window, for the error of a run that waits for that in vain.
    pub fn raised_by(self, who: &'static str) -> Self {
        Window { raised_by: Some(who), ..self }
    }

    /// Declares that only stages of the graph raise the window: a graph without such a stage is rejected.
    pub fn raised_by_stages(self) -> Self {
        Window { only_stages: true, ..self }
    }

    pub(crate) fn only_stages_raise(&self) -> bool {
        self.only_stages
    }

    pub(crate) fn who_raises(&self) -> Option<&'static str> {
        self.raised_by
    }

    /// Whether both are clones of one window.
    pub(crate) fn is_same(&self, other: &Window) -> bool {
        Arc::ptr_eq(&self.count, &other.count)
    }

    /// Admits `more` items on top of the present limit.
    pub fn raise(&self, more: u64) {
        self.count.send_modify(|count| count.limit = count.limit.saturating_add(more));
    }

    /// Admits `total` items, counted from the start of the run. A total below the present limit changes nothing.
    pub fn limit_to(&self, total: u64) {
        self.count.send_if_modified(|count| {
            let rises = total > count.limit;
            count.limit = count.limit.max(total);
            rises
        });
    }

    /// Counts `total` items as admitted already, as when a run is resumed.
    pub fn start_at(&self, total: u64) {
        self.count.send_modify(|count| count.admitted = total);
    }

    /// Items that were admitted.
    pub fn admitted(&self) -> u64 {
        self.count.borrow().admitted
    }

    /// Items that may be admitted in total, as of now.
    pub fn limit(&self) -> u64 {
        self.count.borrow().limit
    }

    /// Takes one credit if there is one.
    pub(crate) fn try_admit(&self) -> bool {
        self.count.send_if_modified(|count| {
            let free = count.admitted < count.limit;
            count.admitted += u64::from(free);
            free
        })
    }

    /// Gives back the credit of an item that never came to be.
    pub(crate) fn give_back(&self) {
        self.count.send_modify(|count| count.admitted = count.admitted.saturating_sub(1));
    }

    /// Takes one credit, waiting for it; false when the run drains or stops first. Cancel-safe.
    pub(crate) async fn admit(&self, control: &Control) -> bool {
        let mut count = self.count.subscribe();
        while !self.try_admit() {
            // Two `watch` cells, no channel end: whichever loses the race is only looked at again.
            tokio::select! {
                biased;
                () = control.reached(Signal::Drain) => return false,
                _ = count.wait_for(|count| count.admitted < count.limit) => {}
            }
        }
        true
    }
}
