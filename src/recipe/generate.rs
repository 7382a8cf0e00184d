//! `[generate]` and `[filter]`: how prompts become groups worth training on.

use super::model::DeviceName;
pub use crate::engine::OnNewWeights;
use crate::engine::SamplingParams;
use crate::settings::declare::{section, tagged};
use crate::settings::params::Custom;
use crate::settings::setting::{FINITE, NOT_NEGATIVE, POSITIVE, SHARE, SOME, SOME_IF_GIVEN, UP_TO_ONE};

section! {
    /// Sampling of completions.
    pub struct Generate {
        /// Completions per prompt: the group whose rewards are compared.
        group_size: usize = 8, SOME;
        /// Longest completion, in tokens, the end-of-text token included.
        max_new_tokens: usize = 256, SOME;
        /// Divisor of the logits; 0 takes the likeliest token.
        temperature: f64 = 1.0, NOT_NEGATIVE;
        /// Total probability of the likeliest tokens that are kept; 1 keeps all.
        top_p: f64 = 1.0, SHARE;
        /// Number of likeliest tokens that are kept; 0 keeps all.
        top_k: usize = 0;
        /// Smallest probability that is kept, relative to the likeliest token; 0 keeps all.
        min_p: f64 = 0.0, UP_TO_ONE;
        /// Divides positive scores of tokens that prompt or completion have, and multiplies others; 1
        /// changes none, and above 1 repetitions are less likely.
        repetition_penalty: f64 = 1.0, POSITIVE;
        /// Strings that end a completion, in addition to the end-of-text token.
        stop: Vec<String> = Vec::new();
        /// If true, the end-of-text token does not end a completion, so that every completion has
        /// `max_new_tokens`: for measurements.
        ignore_eos: bool = false;
        /// Sequences decoded at the same time; 0 chooses by measuring. Left out with servers: `flow.window` ×
        /// `group_size`, all that may be in flight.
        #[formerly(slots)]
        max_num_seqs: usize = 64;
        /// Policy for completions in flight when new weights arrive.
        on_new_weights: OnNewWeights = OnNewWeights::default();
        /// If true, only tokens sampled by the newest weights of a completion are trained on.
        #[formerly(mask_older)]
        mask_older_versions: bool = false;
        /// Engines that generate in parallel and share the slots. A synchronous run
        /// (`flow.max_staleness = 0`) takes one.
        workers: usize = 1, SOME;
        /// Threads of each engine. Left out: one for a small model, and up to all of the machine's for larger ones
        /// and in a synchronous run.
        threads: Option<usize> = None, SOME_IF_GIVEN;
        /// Room in the engines' caches, together, for so many sequences more than are decoded. With any, prompts
        /// and ended sequences are remembered while their memory is not needed: of a turn or prompt that
        /// begins alike, under the same weights, only the rest is computed, also among prompts that are read
        /// at the same time. Left out: with an environment a quarter of `max_num_seqs`, else 0. Models with gated
        /// delta nets remember their states after so many prompts, ended sequences and beginnings that several
        /// share, of whole pages of 32 tokens.
        prefix_cache: Option<usize> = None;
        /// Most tokens of the engines' caches, together. Sequences take them in pages of 32, and share those of what
        /// they begin with. Where a cache is full, its youngest sample waits, and continues from its tokens
        /// later. Left out: what all sequences take at their longest; then none waits.
        cache_tokens: Option<usize> = None, SOME_IF_GIVEN;
        /// Longest draft of a completion's next tokens, taken from its own text and checked in one pass; 0
        /// drafts none. Completions stay the same. A pass has at most 16 rows, so that engines with
        /// more sequences draft none, nor do models with gated delta nets, nor engines on GPUs.
        draft_tokens: usize = 0;
        /// Devices of the engines, assigned in turn. Left out: `model.device`.
        devices: Vec<DeviceName> = Vec::new();
    }
}

impl Generate {
    /// Divisor of the logits when completions are scored. The likeliest token is scored at 1, as engines do.
    pub fn scoring_temperature(&self) -> f64 {
        if self.temperature == 0.0 { 1.0 } else { self.temperature }
    }

    /// How completions are sampled.
    pub fn sampling(&self) -> SamplingParams {
        SamplingParams {
            temperature: self.temperature as f32,
            top_p: self.top_p as f32,
            top_k: self.top_k,
            min_p: self.min_p as f32,
            repetition_penalty: self.repetition_penalty as f32,
            max_new_tokens: self.max_new_tokens,
            stop: self.stop.clone(),
            ignore_eos: self.ignore_eos,
            ..SamplingParams::default()
        }
    }
}

tagged! {
    /// Condition that a group must meet to be trained on. `[[filter]]` may be repeated; all
    /// conditions must hold.
    pub enum Filter {
        /// the rewards of the group differ.
        "nonzero_std" => NonzeroStd {
            /// The standard deviation must be above this.
            threshold: f64 = 0.0, NOT_NEGATIVE;
        },
        /// some reward is above a threshold.
        "min_reward" => MinReward {
            /// Some reward must be above this.
            threshold: f64 = 0.5, FINITE;
        },
        /// enough of the completions are different texts.
        "diversity" => Diversity {
            /// Least share of different completions.
            min_unique_ratio: f64 = 0.5, SHARE;
        },
        /// every completion's length is within bounds.
        "length" => Length {
            /// Shortest completion, in tokens.
            min: usize = 10;
            /// Longest completion, in tokens.
            max: usize = 2048, SOME;
        },
        /// some completion ended by itself.
        "any_success" => AnySuccess,
        /// a filter that was registered by a name keeps it.
        "custom" => Custom(Custom),
    }
}

impl Filter {
    /// Returns true if it looks at rewards.
    pub(crate) fn compares_rewards(&self) -> bool {
        matches!(self, Filter::NonzeroStd { .. } | Filter::MinReward { .. })
    }
}
