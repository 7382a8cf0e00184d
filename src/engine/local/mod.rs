//! Engine in this process: continuous batching over the slots of a KV cache.

mod draw;
mod engine;
mod generate;
mod sequence;

pub use engine::LocalEngine;
pub use generate::{batch_generate, generate};
