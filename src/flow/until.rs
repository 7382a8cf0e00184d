//! When a run ends by itself.

use std::sync::Arc;

/// When a run ends.
#[derive(Clone)]
pub struct Until(pub(crate) Goal);

#[derive(Clone)]
pub(crate) enum Goal {
    Finished,
    Items(String, u64),
    When(Arc<dyn Fn() -> bool + Send + Sync>),
}

impl Until {
    /// When the sources have, and everything was delivered.
    pub fn finished() -> Self {
        Until(Goal::Finished)
    }

    /// When the named sink has taken exactly `n` items; what is still in flight is dropped.
    pub fn items(sink: impl Into<String>, n: u64) -> Self {
        Until(Goal::Items(sink.into(), n))
    }

    /// When `reached` says so. Every sink asks it after every item and ends if it says yes; what is still in flight is dropped.
    pub fn when(reached: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        Until(Goal::When(Arc::new(reached)))
    }

    /// Whether the sink of this name is done, having taken this many.
    pub(crate) fn is_reached(&self, taken: u64, sink: &str) -> bool {
        match &self.0 {
            Goal::Finished => false,
            Goal::Items(name, n) => name == sink && taken >= *n,
            Goal::When(reached) => reached(),
        }
    }
}
