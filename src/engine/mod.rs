//! Engines that generate: requests, sampling, and the engines of this process and of servers.
//!
//! Laws: D1 and D3 (tokens in, tokens out, each with its log-probability and version), N2 (keyed
//! randomness), V5 (an explicit policy for caches under new weights, [`OnNewWeights`]).
//!
//! Everything but `local` builds without libtorch.

mod concurrency;
mod error;
#[cfg(feature = "torch")]
pub mod local;
pub mod penalties;
pub mod remote;
mod request;
pub mod sampling;
pub mod settings;
mod simulated;
mod slots;
mod stop;
mod token_engine;

pub(crate) use concurrency::Concurrency;
pub use error::EngineError;
#[cfg(feature = "torch")]
pub use local::{LocalEngine, batch_generate, generate};
pub use request::{FinishReason, Finished, Request, SamplingParams};
pub use simulated::SimulatedEngine;
pub(crate) use stop::TextStream;
pub use stop::certain_text;
#[cfg(feature = "torch")]
pub use stop::text_before_stop;
pub use token_engine::{Load, OlderVersions, OnNewWeights, TokenEngine};
