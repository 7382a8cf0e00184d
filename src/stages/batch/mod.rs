//! Batches: the groups of one optimizer step.

mod draft;
mod groups;

pub use groups::{Batcher, over_sampled};
