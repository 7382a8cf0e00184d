//! Where weights are made.

mod stale;
mod trainer;

pub use stale::{OnStale, StaleSample, staleness, within_bound};
pub use trainer::{Resumed, Trained, Trainer};
