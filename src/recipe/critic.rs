//! `[critic]`: the critic of PPO.

use std::path::PathBuf;

use super::defaults::CRITIC;
use super::train::{BOUND, Optimization};
use crate::settings::declare::section;
use crate::settings::setting::{POSITIVE, UP_TO_ONE};

section! {
    /// A second model that learns the expected return after each token. With it, advantages are
    /// PPO's (GAE) instead of `train.advantage`, and `train.kl_reward` is applied token by token.
    /// It is updated in turn with the policy, on the same batches.
    pub struct Critic {
        /// A Hugging Face folder of a model with the same vocabulary, with a score head or a
        /// language-model head. Left out: the policy as it is when reinforcement begins. A new
        /// score head starts at 0.
        path: Option<PathBuf> = None;
        /// Peak learning rate of the critic. Left out, it follows from the model: 1e-5 for a
        /// Hugging Face model (as verl), 5e-4 for a small random model.
        lr: f64 = CRITIC.random, POSITIVE;
        /// Clip range of values: a value gains nothing by moving further than this in a step.
        value_clip: f64 = 0.5, BOUND;
        /// Discount factor per token.
        gamma: f64 = 1.0, UP_TO_ONE;
        /// GAE λ: 0 looks ahead to the next value, 1 to the end of the completion.
        lambda: f64 = 1.0, UP_TO_ONE;
        /// If true, advantages are normalised to mean 0 and deviation 1 over the step's tokens.
        whiten: bool = true;
        /// First steps, in which the critic learns and the policy does not change.
        warmup_steps: u64 = 0;
        last optimization: Optimization;
    }
}
