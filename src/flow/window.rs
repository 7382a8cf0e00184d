//! Admission window: the number of items that a source may send in total.
//!
//! The source takes credit before each item. Stages or other code raise the limit, which never
//! falls.

use std::sync::Arc;

use super::control::{Control, Signal};
use super::sync::watch;

/// Shared admission window. A source declares it with
/// [`StageSpec::window`](super::StageSpec::window); a clone raises it.
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
    /// Returns a window that admits `limit` items until it is raised.
    pub fn new(limit: u64) -> Self {
        Window { count: Arc::new(watch::Sender::new(Count { admitted: 0, limit })), raised_by: None, only_stages: false }
    }

    /// Declares the calls that raise the window, for the error of a stalled run.
    pub fn raised_by(self, who: &'static str) -> Self {
        Window { raised_by: Some(who), ..self }
    }

    /// Declares that only stages of the graph raise the window: a graph without such a stage is
    /// rejected.
    pub fn raised_by_stages(self) -> Self {
        Window { only_stages: true, ..self }
    }

    pub(crate) fn only_stages_raise(&self) -> bool {
        self.only_stages
    }

    pub(crate) fn who_raises(&self) -> Option<&'static str> {
        self.raised_by
    }

    /// Returns true if both are clones of one window.
    pub(crate) fn is_same(&self, other: &Window) -> bool {
        Arc::ptr_eq(&self.count, &other.count)
    }

    /// Raises the limit by `more` items.
    pub fn raise(&self, more: u64) {
        self.count.send_modify(|count| count.limit = count.limit.saturating_add(more));
    }

    /// Raises the limit to `total` items since the start of the run. A total below the present
    /// limit has no effect.
    pub fn limit_to(&self, total: u64) {
        self.count.send_if_modified(|count| {
            let rises = total > count.limit;
            count.limit = count.limit.max(total);
            rises
        });
    }

    /// Counts `total` items as admitted, for a resumed run.
    pub fn start_at(&self, total: u64) {
        self.count.send_modify(|count| count.admitted = total);
    }

    /// Number of items admitted.
    pub fn admitted(&self) -> u64 {
        self.count.borrow().admitted
    }

    /// Present limit: the number of items admitted in total.
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

    /// Returns the credit of an item that the source did not make.
    pub(crate) fn give_back(&self) {
        self.count.send_modify(|count| count.admitted = count.admitted.saturating_sub(1));
    }

    /// Takes one credit, waiting for it; false when the run drains or stops first. Cancel-safe.
    pub(crate) async fn admit(&self, control: &Control) -> bool {
        let mut count = self.count.subscribe();
        while !self.try_admit() {
            // Both are `watch` cells: the one that loses the race is read again.
            tokio::select! {
                biased;
                () = control.reached(Signal::Drain) => return false,
                _ = count.wait_for(|count| count.admitted < count.limit) => {}
            }
        }
        true
    }
}
