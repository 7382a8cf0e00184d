//! Sources of prompts and samples.

mod feed;
mod prompts;
mod recorded;
mod supervised;

pub use prompts::Prompts;
pub use recorded::RecordedGroups;
pub use supervised::Supervised;

use crate::data::source::{DataSet, Mixed};
use crate::observe::{Metric, Metrics};

/// Reports for each data set the number of records used, and of records skipped by reason.
fn announce_data<T>(data: &Mixed<T>, metrics: Option<&Metrics>) {
    data.sets().iter().map(DataSet::describe).for_each(|line| tracing::info!("Data: {line}"));
    let Some(metrics) = metrics else { return };
    for set in data.sets() {
        metrics.set(Metric::DataRecords, &[set.name()], set.len() as f64);
        for (reason, count) in set.skips().iter() {
            metrics.set(Metric::DataSkipped, &[set.name(), reason], count as f64);
        }
    }
}
