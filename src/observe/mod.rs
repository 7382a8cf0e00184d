//! Metrics for Prometheus, logs, lines on the console, the progress line and the final report of a
//! run.
//!
//! Every number has one declaration, a [`Metric`] of the catalogue, and is recorded through
//! [`Metrics`] or a [`logs::MetricsLogger`]. There is no global recorder: two runs in one process
//! do not share numbers, and nothing remains after a run (law F3).

pub mod catalog;
pub mod chart;
pub mod console;
pub mod logs;
mod progress;
pub mod recorder;
mod report;
mod run_report;
mod serve;
mod server;
mod stage_sampler;

pub use catalog::Metric;
pub use console::Console;
pub use logs::{MetricsLogger, StepMetrics};
pub use progress::{Progress, duration};
pub use recorder::{Metrics, Series};
pub use report::{HtmlReport, StageShares};
pub use run_report::RunReport;
pub use serve::ServedMetrics;
pub use server::{MetricsServer, ServerError};
pub use stage_sampler::StageSampler;
