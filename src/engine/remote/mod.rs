//! Engines elsewhere: servers that make tokens, over HTTP or however one reaches them.
//!
//! [`InferenceEngine`] is what a generator needs of one, [`WeightControl`] what a weight sync needs of one that serves the weights it is given.

mod control_reply;
mod engine;
mod error;
mod fleet;
mod handle;
mod http;

mod sglang_weights;
pub mod sync;
mod vllm_weights;
mod weights;

pub use engine::{Attempt, Capabilities, Chunk, End, Ending, InferenceEngine, Pending, Scored, Tokens, VersionSpan};
pub use error::{Fault, RemoteError};
pub use fleet::Synced;
pub use handle::{EngineState, FleetHandle};
pub use http::{Client, Events};
pub use sglang_weights::SglangWeights;
pub use vllm_weights::VllmWeights;
pub use weights::{PauseMode, WeightControl};
