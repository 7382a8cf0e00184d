//! `[reference]`: the policy that the trained one is held to.

use std::path::PathBuf;

use crate::settings::declare::{section, tagged};
use crate::settings::setting::{BELOW_ONE, SOME, SOME_STEPS};

section! {
    /// A policy that the trained one is held to, by `train.kl_loss`, `train.kl_reward` or a loss of pairs. Its stage scores what the filter
    /// lets through, beside generator and trainer.
    pub struct Reference {
        first policy: ReferencePolicy;
        /// Threads of its stage.
        threads: usize = 1, SOME;
    }
}

tagged! {
    /// What it is made of.
    pub enum ReferencePolicy {
        /// the policy at the run's start, after the warm-up, or a folder's.
        "frozen" => Frozen(Frozen),
        /// a moving average of the published weights.
        "ema" => Ema(Ema),
        /// a copy of the published weights, now and then.
        "periodic" => Periodic(Periodic),
    }
}

section! {
    /// Stays as it is.
    pub struct Frozen {
        /// A Hugging Face folder of a model with the same vocabulary; left out, the policy as it is when reinforcement begins.
        path: Option<PathBuf> = None;
    }
}

section! {
    /// Follows slowly.
    pub struct Ema {
        /// What it keeps of itself at every published version; of versions that it does not get to see it takes the newest for all.
        decay: f64 = 0.99, BELOW_ONE;
    }
}

section! {
    /// Follows in leaps.
    pub struct Periodic {
        /// Published versions from one copy to the next.
        every: u64 = 10, SOME_STEPS;
    }
}
