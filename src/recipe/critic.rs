//! `[critic]`: what is expected of answers, token by token (PPO).

use std::path::PathBuf;

use super::defaults::CRITIC;
use super::train::{BOUND, Optimization};
use crate::settings::declare::section;
use crate::settings::setting::{POSITIVE, UP_TO_ONE};

section! {
    /// A second model that learns what is still to be earned after each token. With it, advantages are PPO's: token by token against its
    /// values (GAE), in the place of `train.advantage`, and `train.kl_reward` is paid token by token. It learns from the same updates
    /// as the policy, in turns with it.
    pub struct Critic {
        /// A Hugging Face folder of a model with the same vocabulary, which gives one number or words; left out, the policy as it is when
        /// reinforcement begins. A head that gives one number starts at 0 where there was none.
        path: Option<PathBuf> = None;
        /// Peak learning rate of the critic. Left out, it follows from the model: 1e-5 for a Hugging Face model (as verl), 5e-4 for a small random
        /// model.
        lr: f64 = CRITIC.random, POSITIVE;
        /// A value gains nothing by moving further than this in a step.
        value_clip: f64 = 0.5, BOUND;
        /// What a reward is worth one token earlier.
        gamma: f64 = 1.0, UP_TO_ONE;
        /// How far advantages look ahead: at 0 to the next value, at 1 to what was earned.
        lambda: f64 = 1.0, UP_TO_ONE;
        /// Whether advantages get mean 0 and deviation 1 over the step's tokens.
        whiten: bool = true;
        /// First steps, in which it learns alone and the policy stays as it is.
        warmup_steps: u64 = 0;
        last optimization: Optimization;
    }
}
