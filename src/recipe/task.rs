//! `[task]`: what is asked. `[sft]`: what is imitated before.

pub use crate::data::packing::Packing;
pub use crate::data::packing::TooLong;
use std::path::PathBuf;

use super::data::{DataTask, RolloutsTask, Source};
use super::defaults::{IMITATION, REWARD_MODEL};
use super::train::Optimization;
use crate::settings::declare::{choices, section, tagged};
use crate::settings::error::RecipeErrors;
use crate::settings::setting::{
    BELOW_ONE, Limit, NOT_NEGATIVE, POSITIVE, POSITIVE_IF_GIVEN, SHARE, SOME, SOME_IF_GIVEN, SOME_STEPS,
};

const FEW_DIGITS: Limit<u32> = Limit { text: "1 to 9", holds: |digits| (1..=9).contains(digits) };

section! {
    /// The prompts, and the order they come in.
    pub struct Task {
        first data: TaskData;
        /// Whether the first epoch is shuffled too; later ones always are.
        shuffle: bool = true;
    }
}

tagged! {
    /// Where the prompts come from.
    pub enum TaskData {
        /// sums such as `7+5=`, made on the spot.
        "arithmetic" => Arithmetic(Arithmetic),
        /// data sets on disk, in the formats and layouts that docs/data.md lists: one, or a mixture.
        "data" => Data(DataTask) by [data, sources],
        /// rollouts that were recorded, for `pipeline = "grpo_offline"`.
        "rollouts" => Rollouts(RolloutsTask) by [path],
    }
}

section! {
    /// Sums of two numbers.
    pub struct Arithmetic {
        /// Most digits of each number.
        digits: u32 = 1, FEW_DIGITS;
        /// How many sums to draw by the seed; without it, every one: 100 for one digit, 10000 for two.
        count: Option<usize> = None, SOME_IF_GIVEN;
    }
}

impl Task {
    /// How many different prompts there are, if that is known without reading files.
    pub fn known_prompts(&self) -> Option<usize> {
        match &self.data {
            TaskData::Arithmetic(Arithmetic { count: Some(count), .. }) => Some(*count),
            TaskData::Arithmetic(Arithmetic { digits, .. }) => 100_usize.checked_pow(*digits),
            TaskData::Data(_) | TaskData::Rollouts(_) => None,
        }
    }
}

section! {
    /// Supervised training: all of the `sft` pipeline, the warm-up of `grpo`. Left out, `grpo` starts with the model as it is.
    pub struct Sft {
        /// Optimizer steps.
        steps: u64 = 40, SOME_STEPS;
        /// Passes over the samples, instead of `steps`, which follow from them and are rounded up.
        epochs: Option<f64> = None, POSITIVE_IF_GIVEN;
        /// Pairs or conversations per step; rows, where they are packed.
        batch: usize = 64, SOME;
        /// In place of `batch`: a step takes as many in turn as have no more tokens than this together, so that steps cost about the same.
        batch_tokens: Option<usize> = None, SOME_IF_GIVEN;
        /// Peak learning rate. Left out, it follows from the model: 2e-5 for a Hugging Face model (as TRL's `SFTConfig`; half of it for presets of
        /// 2 billion parameters or more), 2e-4 for its adapters (as TRL's `sft.py`), 1e-3 for a small random model.
        lr: f64 = IMITATION.random, POSITIVE;
        /// Most tokens of a sample, and of a row where samples are packed; without it, as many as the model reads.
        max_length: Option<usize> = None, SOME_IF_GIVEN;
        /// What becomes of longer samples.
        too_long: TooLong = TooLong::default();
        /// How samples share rows of `max_length` tokens.
        packing: Packing = Packing::default();
        /// Share of the sums of an `arithmetic` task that may be seen, chosen by the seed.
        fraction: f64 = 1.0, SHARE;
        /// What is imitated: a data set of pairs, conversations or texts, as `data` of a source; without it and `sources`, the task's own prompts and
        /// answers.
        data: Option<PathBuf> = None;
        /// Several data sets in the place of one, or one with more to say of it.
        sources: Vec<Source> = Vec::new();
        /// How a conversation of several turns is learned from.
        turns: Turns = Turns::default();
        last optimization: Optimization;
    }
}

choices! {
    /// How a conversation of several turns is learned from.
    pub enum Turns {
        /// in one sample, in which each turn of the assistant is trained.
        "together" => Together,
        /// in a sample for each turn of the assistant, with what came before as the model would be shown it.
        "apart" => Apart,
    }
}

section! {
    /// Supervised training that goes on beside reinforcement, with the pairs of `[sft]`: its gradient is added to that of the step.
    pub struct Mix {
        /// What its loss, the mean over its tokens, counts beside the policy's.
        weight: f64 = 0.1, POSITIVE;
        /// Only every so many steps; 1 is all of them.
        every: u64 = 1, SOME_STEPS;
        /// Pairs of each.
        batch: usize = 16, SOME;
    }
}

section! {
    /// Training of a reward model on pairs of answers: all of the `reward_model` pipeline. Pairs are the records of a `data` task, with
    /// the fields `chosen` and `rejected` or those that its `columns` name, or sums of the `arithmetic` task against wrong ones, 64 for each.
    pub struct RewardModel {
        /// Optimizer steps.
        steps: u64 = 200, SOME_STEPS;
        /// Passes over the pairs that are trained on, instead of `steps`, which follow from them and are rounded up.
        epochs: Option<f64> = None, POSITIVE_IF_GIVEN;
        /// Pairs per step.
        batch: usize = 64, SOME;
        /// Peak learning rate. Left out, it follows from the model: 1e-5 for a Hugging Face model, 1e-4 for its adapters (as TRL's
        /// `reward_modeling.py`), 1e-3 for a small random model.
        lr: f64 = REWARD_MODEL.random, POSITIVE;
        /// Share of the task's prompts whose pairs are not trained but judged at the end.
        held_out: f64 = 0.1, BELOW_ONE;
        /// How strongly scores are kept around 0; 0.01 is common.
        center: f64 = 0.0, NOT_NEGATIVE;
        last optimization: Optimization;
    }
}

impl Sft {
    /// The data sets; none where the task's own pairs are imitated.
    pub fn sources(&self) -> Vec<Source> {
        if self.sources.is_empty() { self.data.iter().map(Source::of).collect() } else { self.sources.clone() }
    }

    /// Whether a step takes something else than so many samples.
    pub fn packs(&self) -> bool {
        self.batch_tokens.is_some() || self.packing != Packing::Apart
    }

    /// Supervised training with defaults for all but the essentials, checked.
    pub fn new(steps: u64, batch: usize, lr: f64) -> Result<Self, RecipeErrors> {
        super::checks::validated(Sft { steps, batch, lr, ..Sft::default() })
    }
}
