//! Environments of multi-turn rollouts, their tools, and parsers of tool calls.
//!
//! An [`Environment`] is a task, such as a [`Toolbox`] or a [`PythonEnvironment`];
//! `examples/environments` shows how to write one. It is driven by
//! [`Generator::environment`](crate::stages::generate::Generator::environment).

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
pub use execute::{Functions, ToolExecutor, ToolUse, execute_tools};
pub use parse::{Called, Malformed, ToolFormat, ToolParser, extract_tool_calls};
pub(crate) use pool::{Pool, PoolError};
#[cfg(unix)]
pub use python::PythonEnvironment;
use schema::check_arguments;
pub use served::{ServedConfig, ServedEnvironment};
pub use tool::{ToolCall, ToolResult, ToolSpec};
pub use toolbox::Toolbox;
