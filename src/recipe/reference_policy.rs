//! `[reference]`: the reference policy.

use std::path::PathBuf;

use crate::settings::declare::{section, tagged};
use crate::settings::setting::{BELOW_ONE, SOME, SOME_STEPS};

section! {
    /// Reference policy of `train.kl_loss`, `train.kl_reward` or a loss of pairs. Its stage scores
    /// the groups that the filter keeps, in parallel with generator and trainer.
    pub struct Reference {
        first policy: ReferencePolicy;
        /// Threads of its stage.
        threads: usize = 1, SOME;
    }
}

tagged! {
    /// Source of the reference policy.
    pub enum ReferencePolicy {
        /// the policy at the run's start, after the warm-up, or a folder's.
        "frozen" => Frozen {
            /// A Hugging Face folder of a model with the same vocabulary. Left out: the policy at
            /// the start of reinforcement.
            path: Option<PathBuf> = None;
        },
        /// a moving average of the published weights.
        "ema" => Ema {
            /// Share of the old average that is kept at every published version. If versions are
            /// missed, the newest counts for all of them.
            decay: f64 = 0.99, BELOW_ONE;
        },
        /// a copy of the published weights, renewed from time to time.
        "periodic" => Periodic {
            /// Published versions between copies.
            every: u64 = 10, SOME_STEPS;
        },
    }
}

impl ReferencePolicy {
    /// Returns true if it follows the published weights.
    pub fn follows(&self) -> bool {
        !matches!(self, ReferencePolicy::Frozen { .. })
    }
}
