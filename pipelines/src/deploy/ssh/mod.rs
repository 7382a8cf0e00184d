//! Runs on hosts that are reached by ssh.

mod bundle;
mod control;
mod host;
mod start;

pub use control::{Place, State};
pub use host::Host;
pub use start::{Task, start, tasks};
