//! Algorithm of a batch: loss and off-policy correction.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::algo::{Loss, OffPolicy};

/// A loss with its correction for off-policy tokens. A batch may carry one
/// ([`TrainBatch::algorithm`](super::TrainBatch)) instead of the backend's, so that algorithms can
/// change from step to step.
#[derive(Clone)]
pub struct Algorithm {
    /// Loss function.
    pub loss: Arc<dyn Loss>,
    /// Centre of the trust region, and correction of off-policy tokens.
    pub off_policy: OffPolicy,
    /// Place in the recipe, by which other ranks make the same algorithm; `None` outside recipes.
    pub key: Option<AlgorithmKey>,
}

/// Place of an algorithm in a recipe.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum AlgorithmKey {
    /// The policy's, at this step.
    Step(u64),
    /// That of samples mixed into steps.
    Mixed,
}

impl Algorithm {
    /// A loss without corrections.
    pub fn new(loss: impl Loss + 'static) -> Self {
        Algorithm { loss: Arc::new(loss), off_policy: OffPolicy::default(), key: None }
    }

    /// Sets its place in the recipe.
    pub fn keyed(self, key: AlgorithmKey) -> Self {
        Algorithm { key: Some(key), ..self }
    }

    /// Returns true if it needs the whole optimizer batch in one call.
    pub fn whole_batch(&self) -> bool {
        self.loss.whole_batch() || self.off_policy.whole_batch()
    }

    /// Returns true if a batch may arrive in parts ([`Loss::is_sum`]).
    pub fn takes_parts(&self) -> bool {
        self.loss.is_sum() && !self.off_policy.whole_batch()
    }

    /// Returns true if sequences with zero advantage may be skipped. A mean over the whole batch
    /// includes them.
    pub fn ignores_zero_advantage(&self) -> bool {
        self.loss.ignores_zero_advantage() && !self.off_policy.whole_batch()
    }
}

impl fmt::Debug for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Algorithm").field("loss", &self.loss.name()).field("off_policy", &self.off_policy).finish()
    }
}
