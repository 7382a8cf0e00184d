//! Where the data comes from.

mod feed;
mod prompts;
mod recorded;
mod supervised;

pub use prompts::Prompts;
pub use recorded::{GroupScorer, RecordedGroups};
pub use supervised::Supervised;

use crate::data::source::Mixed;
use crate::observe::{Metric, Metrics};

/// Says of each data set how many records are used, and how many were left out and why.
fn announce_data<T>(data: &Mixed<T>, metrics: Option<&Metrics>) {
    data.describe().iter().for_each(|line| tracing::info!("Data: {line}"));
    let Some(metrics) = metrics else { return };
    for set in data.sets() {
        metrics.set(Metric::DataRecords, &[set.name()], set.len() as f64);
        for (reason, count) in set.skips().iter() {
            metrics.set(Metric::DataSkipped, &[set.name(), reason], count as f64);
        }
    }
}
