//! Environments of multi-turn rollouts, their tools, and parsers of tool calls.
//!
//! An [`Environment`] is a task, such as a [`Toolbox`] or a [`programming_environment`];
//! `examples/environments` shows how to write one. It is driven by
//! [`Generator::environment`](crate::stages::generate::Generator::environment).

mod environment;
mod parse;
mod pool;
#[cfg(unix)]
mod programming;
#[cfg(unix)]
mod proxy;
mod schema;
mod served;
mod tool;
mod toolbox;

pub(crate) use environment::MakeEnvironment;
pub use environment::{Action, EnvError, Environment, Episode, Grade, Room, Step, TEXT};
pub use parse::{ToolFormat, ToolParser, extract_tool_calls};
pub(crate) use pool::Pool;
#[cfg(unix)]
pub use programming::programming_environment;
#[cfg(unix)]
pub use proxy::AgentProxy;
#[cfg(all(unix, feature = "torch"))]
pub(crate) use proxy::protocol;
pub use served::{python_environment, served_environment};
pub(crate) use tool::ToolUse;
pub use tool::{ToolCall, ToolResult, ToolSpec};
pub use toolbox::{Toolbox, execute_tools};
