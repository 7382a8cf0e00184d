//! Where weights are made.

mod saving;
mod stale;
mod step;
mod trainer;

pub use saving::Resumed;
pub use stale::{OnStale, StaleSample, staleness, within_bound};
pub use trainer::{Trained, Trainer};
