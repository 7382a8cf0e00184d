//! Group filters.

mod by;

pub use by::{Exhausted, Fallback, Filter, FilterPanicked};
