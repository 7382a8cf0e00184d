//! `[generate]` and `[filter]`: how prompts become groups worth training on.

use super::model::DeviceName;
pub use crate::engine::OnNewWeights;
use crate::settings::declare::{section, tagged};
use crate::settings::params::Custom;
use crate::settings::section::NoKeys;
use crate::settings::setting::{FINITE, NOT_NEGATIVE, SHARE, SOME, UP_TO_ONE};

section! {
    /// How answers are sampled.
    pub struct Generate {
        /// Answers per prompt: the group whose rewards are compared.
        group_size: usize = 8, SOME;
        /// Longest answer, in tokens, end of text included.
        max_new_tokens: usize = 256, SOME;
        /// Divides the logits; 0 takes the likeliest token.
        temperature: f64 = 1.0, NOT_NEGATIVE;
        /// Keeps the likeliest tokens up to this total probability; 1 keeps all.
        top_p: f64 = 1.0, SHARE;
        /// Keeps this many likeliest tokens; 0 keeps all.
        top_k: usize = 0;
        /// Keeps tokens at least this likely relative to the likeliest; 0 keeps all.
        min_p: f64 = 0.0, UP_TO_ONE;
        /// Texts that end an answer, besides end of text.
        stop: Vec<String> = Vec::new();
        /// Whether end of text is a token like any other, so that every answer has all its tokens: for measurements.
        ignore_eos: bool = false;
        /// Sequences decoded at the same time; 0 finds out by measuring how many are worth it.
        slots: usize = 64;
        /// What becomes of answers under way when new weights arrive.
        on_new_weights: OnNewWeights = OnNewWeights::default();
        /// Whether only what the newest of an answer's weights sampled is trained.
        mask_older: bool = false;
        /// Engines beside each other, which share the slots. A synchronous run (`flow.max_staleness = 0`) takes one.
        workers: usize = 1, SOME;
        /// Threads of each of them.
        threads: usize = 1, SOME;
        /// Devices that they compute on, in turn. None: `model.device`.
        devices: Vec<DeviceName> = Vec::new();
    }
}

tagged! {
    /// A condition that a group must meet to be trained on; `[[filter]]` may stand several times, and all must hold.
    pub enum Filter {
        /// the rewards of the group differ.
        "nonzero_std" => NonzeroStd(NonzeroStd),
        /// some reward is above a threshold.
        "min_reward" => MinReward(MinReward),
        /// enough of the answers are different texts.
        "diversity" => Diversity(Diversity),
        /// every answer's length is within bounds.
        "length" => Length(LengthFilter),
        /// some answer ended by itself.
        "any_success" => AnySuccess(NoKeys),
        /// a filter keeps it that was registered by a name.
        "custom" => Custom(Custom),
    }
}

section! {
    /// Drops groups that teach nothing because their rewards are equal.
    pub struct NonzeroStd {
        /// The standard deviation must be above this.
        threshold: f64 = 0.0, NOT_NEGATIVE;
    }
}

section! {
    /// Drops groups without success.
    pub struct MinReward {
        /// Some reward must be above this.
        threshold: f64 = 0.5, FINITE;
    }
}

section! {
    /// Drops groups that repeat themselves.
    pub struct Diversity {
        /// Least share of different answers.
        min_unique_ratio: f64 = 0.5, SHARE;
    }
}

section! {
    /// Drops groups with answers that are too short or too long.
    pub struct LengthFilter {
        /// Shortest answer, in tokens.
        min: usize = 10;
        /// Longest answer, in tokens.
        max: usize = 2048, SOME;
    }
}
