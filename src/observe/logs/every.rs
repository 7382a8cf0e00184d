//! How often something is logged.

use std::sync::Arc;

/// Number of steps from one record to the next, which may differ by step. A number is the same in all
/// steps.
#[derive(Clone)]
pub struct Every(Arc<dyn Fn(u64) -> u64 + Send + Sync>);

impl Every {
    /// Asks `every` for the number of a step, each time that a step is logged.
    pub fn by_step(every: impl Fn(u64) -> u64 + Send + Sync + 'static) -> Self {
        Every(Arc::new(every))
    }

    /// The number that `step` has.
    pub fn at(&self, step: u64) -> u64 {
        self.0(step)
    }

    /// Returns true if `step` is recorded: the first step and every n-th, and none if n is 0.
    pub fn records(&self, step: u64) -> bool {
        let every = self.at(step);
        every > 0 && (step.is_multiple_of(every) || step == 1)
    }
}

impl From<u64> for Every {
    fn from(every: u64) -> Self {
        Every::by_step(move |_| every)
    }
}

impl Default for Every {
    fn default() -> Self {
        Every::from(1)
    }
}
