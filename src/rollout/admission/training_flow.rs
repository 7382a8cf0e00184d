//! Settings of a training loop on its [`Flow`].

use super::Admission;
use crate::flow::Flow;
use crate::observe::Metrics;

/// Settings of a training loop, which its stages take from the flow. Call them before adding
/// stages.
pub trait TrainingFlow {
    /// Bounds the token lag by `versions`. 0 is the synchronous run, bit for bit on CPUs.
    ///
    /// The batcher and the trainer of the flow determine how many groups each version trains.
    fn max_staleness(self, versions: u64) -> Self;

    /// Paces prompts by this admission.
    fn admission(self, admission: &Admission) -> Self;

    /// Reports to these metrics.
    fn metrics(self, metrics: &Metrics) -> Self;
}

impl TrainingFlow for Flow {
    fn max_staleness(self, versions: u64) -> Self {
        self.share_as("max_staleness", Admission::paced_by_stages(versions))
    }

    fn admission(self, admission: &Admission) -> Self {
        self.share_as("admission", admission.clone())
    }

    fn metrics(self, metrics: &Metrics) -> Self {
        self.share_as("metrics", metrics.clone())
    }
}
