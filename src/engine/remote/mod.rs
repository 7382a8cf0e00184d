//! Remote engines: servers over HTTP, and engines of users.
//!
//! [`InferenceEngine`] is the interface for generation, [`WeightControl`] the interface for weight
//! sync.

mod attempt;
mod budget;
mod completions;
mod control_client;
mod engine;
mod fleet;
mod group_request;
mod handle;
mod in_flight;
mod meter;
mod openai;
mod reply;
mod router;
mod server;
mod sglang;
mod sglang_weights;
pub mod sync;
mod throughput;
mod vllm;
mod vllm_weights;
mod weights;

pub use crate::net::{Fault, RemoteError};
pub use engine::{Attempt, Capabilities, Chunk, End, Ending, InferenceEngine, Pending, Tokens, VersionSpan};
pub use fleet::{Fleet, FleetConfig, Synced};
pub(crate) use handle::LoadedAdapter;
pub use handle::{EngineState, FleetHandle};
pub use openai::OpenAiEngine;
pub use server::ServerConfig;
pub use sglang::SglangEngine;
pub use vllm::VllmEngine;
pub use weights::{PauseMode, WeightControl};
