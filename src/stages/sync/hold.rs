//! Engines that serve training and evaluation keep the version that an evaluation asks for as long as it lasts.

use std::sync::Arc;

use tokio::sync::watch;

/// Shared by the stage that gives weights to engines and the one that evaluates on the same engines. The former passes a step that is due when its
/// version was verified, and gives no further version until the latter has passed that step on.
#[derive(Clone)]
pub struct EvaluationHold {
    due: Arc<dyn Fn(u64) -> bool + Send + Sync>,
    /// Messages that the evaluation has passed on.
    passed: watch::Sender<u64>,
}

impl EvaluationHold {
    /// Of evaluations at the steps that are `due`; step 0 is the message before the first step.
    pub fn new(due: impl Fn(u64) -> bool + Send + Sync + 'static) -> Self {
        EvaluationHold { due: Arc::new(due), passed: watch::Sender::new(0) }
    }

    /// Whether this step is evaluated.
    pub(super) fn is_due(&self, step: u64) -> bool {
        (self.due)(step)
    }

    /// One more message is evaluated, if it was to be, and passed on.
    pub(crate) fn pass(&self) {
        self.passed.send_modify(|count| *count += 1);
    }

    /// Returns when so many messages were passed on. Cancel-safe.
    pub(super) async fn passed(&self, count: u64) {
        // It does not fail: this holds the sender.
        drop(self.passed.subscribe().wait_for(|passed| *passed >= count).await);
    }
}
