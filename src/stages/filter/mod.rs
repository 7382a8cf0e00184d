//! Group filters.

mod by;

pub use by::{Fallback, Filter, FilterPanicked};
