//! Environments: what a model acts on in several turns, the tools it calls there, and how its calls are read. No tensors, no stages.

mod environment;
mod pool;
mod tool;

pub use environment::{Action, Deadline, EnvError, Environment, Episode, Grade, MakeEnvironment, Step};
pub use pool::{MOST_STUCK, Outcome, Pool, PoolError};
pub use tool::{ToolCall, ToolResult, ToolSpec};
