//! Generation: a stage that samples groups of rollouts, in this process or on servers.

mod generator;
#[cfg(feature = "torch")]
mod local;
mod pull;
mod remote;

pub use generator::{EngineSettings, Generator};
pub use pull::{GenerateError, RunningGenerator};
