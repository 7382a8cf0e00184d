//! Which groups are worth a training step.

mod by;

pub use by::{Exhausted, Fallback, Filter, FilterPanicked};
