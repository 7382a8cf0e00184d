//! How many groups make an optimizer step, and which.

mod draft;
mod groups;

pub use groups::{Batcher, over_sampled};
