//! Inspection of a batch by hand: problems, statistics, and one sample as text.

mod check;
mod show;
mod statistics;

pub use check::batch_issues;
pub use show::inspect_sample;
pub use statistics::{BatchStatistics, Spread, batch_statistics};
