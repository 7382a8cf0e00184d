//! Hold of a version on engines that serve both training and evaluation, while an evaluation lasts.

use std::sync::Arc;

use tokio::sync::watch;

/// Hold shared by the sync stage and the evaluation stage of the same engines. The sync passes a
/// due step on once its version is verified, and syncs no further version until the evaluation has
/// passed that step on.
#[derive(Clone)]
pub struct EvaluationHold {
    due: Arc<dyn Fn(u64) -> bool + Send + Sync>,
    /// Number of messages that the evaluation has passed on.
    passed: watch::Sender<u64>,
}

impl EvaluationHold {
    /// Returns a hold for evaluations at the steps that are `due`; step 0 is the message before the
    /// first step.
    pub fn new(due: impl Fn(u64) -> bool + Send + Sync + 'static) -> Self {
        EvaluationHold { due: Arc::new(due), passed: watch::Sender::new(0) }
    }

    /// Returns true if this step is evaluated.
    pub(super) fn is_due(&self, step: u64) -> bool {
        (self.due)(step)
    }

    /// Counts a message that the evaluation has passed on.
    pub(crate) fn pass(&self) {
        self.passed.send_modify(|count| *count += 1);
    }

    /// Waits until `count` messages were passed on. Cancel-safe.
    pub(super) async fn passed(&self, count: u64) {
        // Can't fail: the sender lives in `self`.
        drop(self.passed.subscribe().wait_for(|passed| *passed >= count).await);
    }
}
