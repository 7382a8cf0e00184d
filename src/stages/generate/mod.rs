//! Generation: a stage that samples groups of rollouts, in this process or on servers.

mod generator;
mod pull;

pub use generator::{EngineSettings, Generator};
pub use pull::RunningGenerator;
