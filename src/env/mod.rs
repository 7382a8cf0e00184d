//! Environments of multi-turn rollouts, their tools, and parsers of tool calls.
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
pub use execute::{Functions, ToolExecutor, ToolUse, execute_tools};
pub use parse::{Called, Malformed, ToolFormat, ToolParser, extract_tool_calls};
pub use pool::{MOST_STUCK, Outcome, Pool, PoolError};
#[cfg(unix)]
pub use python::PythonEnvironment;
pub use schema::check_arguments;
pub use served::{ServedConfig, ServedEnvironment};
pub use tool::{ToolCall, ToolResult, ToolSpec};
pub use toolbox::Toolbox;
