//! What a batch is learned by, where it is not the backend's own.

use std::fmt;
use std::sync::Arc;

use crate::algo::{Loss, OffPolicy};

/// A loss, and what it does about tokens of another policy. A batch that carries one ([`TrainBatch::algorithm`](super::TrainBatch)) is learned by
/// it, so that a run may change its mind from step to step, and a backend keeps no state of it.
#[derive(Clone)]
pub struct Algorithm {
    /// What is minimised.
    pub loss: Arc<dyn Loss>,
    /// Where its trust region is centred, and how tokens of another policy are corrected.
    pub off_policy: OffPolicy,
}

impl Algorithm {
    /// A loss without corrections.
    pub fn new(loss: impl Loss + 'static) -> Self {
        Algorithm { loss: Arc::new(loss), off_policy: OffPolicy::default() }
    }

    /// Whether it must see the whole optimizer batch at once.
    pub fn whole_batch(&self) -> bool {
        self.loss.whole_batch() || self.off_policy.whole_batch()
    }

    /// Whether a batch may be given in parts as it is gathered ([`Loss::is_sum`]).
    pub fn takes_parts(&self) -> bool {
        self.loss.is_sum() && !self.off_policy.whole_batch()
    }

    /// Whether sequences whose advantages are all zero may be left out: a mean over the whole batch is also over those that have nothing to teach.
    pub fn ignores_zero_advantage(&self) -> bool {
        self.loss.ignores_zero_advantage() && !self.off_policy.whole_batch()
    }
}

impl fmt::Debug for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Algorithm").field("loss", &self.loss.name()).field("off_policy", &self.off_policy).finish()
    }
}

/// The same loss, not an equal one: closures can't be compared.
impl PartialEq for Algorithm {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.loss, &other.loss) && self.off_policy == other.off_policy
    }
}
