//! Sinks that record a run.

mod lengths;
mod run_log;
mod step_row;

pub use run_log::RunLog;
pub use step_row::step_row;
