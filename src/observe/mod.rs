//! What a run shows: metrics for Prometheus, logs that outlive it, lines on the console, the progress line and the final report.
//!
//! Every number has one declaration, a [`Metric`] of the catalogue, and one way in, [`Metrics`] or a [`logs::MetricsLogger`]. There is
//! no global recorder: two runs in one process do not see each other's numbers, and when a run ends nothing of it is left (law F3).

pub mod catalog;
pub mod chart;
pub mod console;
pub mod logs;
pub mod progress;
pub mod recorder;
pub mod report;
pub mod run_report;
pub mod serve;
pub mod server;
pub mod stage_sampler;

pub use catalog::Metric;
pub use console::Console;
pub use logs::{MetricsLogger, StepMetrics};
pub use recorder::{Metrics, Series};
pub use serve::ServedMetrics;
pub use server::MetricsServer;
pub use stage_sampler::StageSampler;
