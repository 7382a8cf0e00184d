//! Goal of a run.

use std::sync::Arc;

/// Goal at which a run ends.
#[derive(Clone)]
pub struct Until(pub(crate) Goal);

#[derive(Clone)]
pub(crate) enum Goal {
    Finished,
    Items(String, u64),
    When(Arc<dyn Fn() -> bool + Send + Sync>),
}

impl Until {
    /// Ends after the sources, once everything was delivered.
    pub fn finished() -> Self {
        Until(Goal::Finished)
    }

    /// Ends when the named sink has taken exactly `n` items. Items in flight are dropped.
    pub fn items(sink: impl Into<String>, n: u64) -> Self {
        Until(Goal::Items(sink.into(), n))
    }

    /// Ends each sink when `reached` returns true after one of its items. Items in flight are
    /// dropped.
    pub fn when(reached: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        Until(Goal::When(Arc::new(reached)))
    }

    /// Returns true if this sink is done after `taken` items.
    pub(crate) fn is_reached(&self, taken: u64, sink: &str) -> bool {
        match &self.0 {
            Goal::Finished => false,
            Goal::Items(name, n) => name == sink && taken >= *n,
            Goal::When(reached) => reached(),
        }
    }
}
