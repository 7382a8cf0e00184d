//! Generation: what is asked for, how a token is chosen, and the engine that runs in this process.
//!
//! Laws held here: D1 and D3 (tokens in, tokens out, each with its log-probability and version), N2 (randomness is keyed, never
//! drawn from a shared stream), V5 (what happens to a cache when weights change is said, see [`OnNewWeights`]).
//!
//! The request types, the choice of a token and that of how many samples to compute at a time ([`Concurrency`]) build without libtorch.

mod concurrency;
mod error;
#[cfg(feature = "torch")]
pub mod local;
pub mod remote;
mod request;
pub mod sampling;
mod scheduler;
mod simulated;
mod slots;
mod stop;
mod token_engine;
mod waiting;

pub use concurrency::Concurrency;
pub use error::EngineError;
#[cfg(feature = "torch")]
pub use local::{Generation, LocalEngine, batch_generate, generate};
pub use request::{FinishReason, Finished, Request, SamplingParams};
pub use simulated::{DecodeTimes, SimulatedEngine};
pub use token_engine::{Load, OnNewWeights, TokenEngine};
