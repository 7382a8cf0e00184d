//! How new weights reach the generators.

mod in_process;

pub use in_process::WeightSync;
