//! Environments: what a model acts on in several turns, the tools it calls there, and how its calls are read. No tensors, no stages.
//!
//! An [`Environment`] is a task; [`CalculatorEnvironment`], [`GuessEnvironment`], [`SearchEnvironment`] and [`Toolbox`] are some. The loop that
//! drives them is [`Generator::environment`](crate::stages::generate::Generator::environment).

mod environment;
mod execute;
mod parse;
mod pool;
#[cfg(unix)]
pub mod proxy;
#[cfg(unix)]
mod python;
mod schema;
mod served;
mod tool;
mod toolbox;

pub use environment::{Action, Deadline, EnvError, Environment, Episode, Grade, MakeEnvironment, Step, TEXT};
pub use execute::{
    Functions, ToolExecutor, ToolTracker, ToolUse, count_tools, execute_and_track_tools, execute_tools, track_tool_calls,
};
pub use parse::{Called, Malformed, ToolFormat, ToolParser, extract_tool_calls};
pub use pool::{MOST_STUCK, Outcome, Pool, PoolError};
#[cfg(unix)]
pub use python::PythonEnvironment;
pub use schema::check_arguments;
pub use served::{ServedConfig, ServedEnvironment};
pub use tool::{ToolCall, ToolResult, ToolSpec};
pub use toolbox::Toolbox;
