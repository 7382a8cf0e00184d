//! `[task]`: prompts. `[sft]` and `[reward_model]`: supervised training.

use std::path::PathBuf;

use super::data::{DataTask, Source};
use super::defaults::{IMITATION, REWARD_MODEL};
use super::train::Optimization;
pub use crate::data::packing::{OverlongPolicy, Packing};
use crate::settings::declare::{choices, section, tagged};
use crate::settings::error::RecipeErrors;
use crate::settings::setting::{
    BELOW_ONE, Limit, NOT_NEGATIVE, PATH_GIVEN, POSITIVE, POSITIVE_IF_GIVEN, SHARE, SOME, SOME_IF_GIVEN, SOME_STEPS,
};

const FEW_DIGITS: Limit<u32> = Limit { text: "1 to 9", holds: |digits| (1..=9).contains(digits) };

section! {
    /// Prompts and their order.
    pub struct Task {
        first data: TaskData;
        /// If true, the first epoch is shuffled too; later ones always are.
        shuffle: bool = true;
    }
}

tagged! {
    /// Source of the prompts.
    pub enum TaskData {
        /// generated sums such as `7+5=`.
        "arithmetic" => Arithmetic {
            /// Most digits of each number.
            digits: u32 = 1, FEW_DIGITS;
            /// Number of sums, drawn by the seed. Left out: every sum, 100 for one digit, 10000 for
            /// two.
            count: Option<usize> = None, SOME_IF_GIVEN;
        },
        /// data sets, in the formats and layouts of docs/how_to/data.md: one, or a mixture.
        "data" => Data(DataTask) by [data, sources],
        /// the prompts that the environment brings, with `environment.kind = "verifiers"` or
        /// `"python"`.
        "environment" => Environment {
            /// Most prompts, the first ones. Left out: all.
            limit: Option<usize> = None, SOME_IF_GIVEN;
        },
        /// recorded rollouts, for `pipeline = "grpo_offline"`.
        "rollouts" => Rollouts {
            /// A `rollouts.jsonl`, or records with `prompt`, `response` and `reward`: a file or a
            /// folder of files, relative to where the command runs.
            path: PathBuf = PathBuf::new(), PATH_GIVEN;
            /// Records to read. Left out: all.
            limit: Option<usize> = None, SOME_IF_GIVEN;
            /// If true, `[reward]` scores the recorded completions before the run, instead of the
            /// recorded rewards.
            rescore: bool = false;
        } by [path],
    }
}

impl TaskData {
    /// Returns the data sets, one or several; none if the task makes its prompts.
    pub fn sources(&self) -> Vec<Source> {
        match self {
            TaskData::Data(of) if of.sources.is_empty() => vec![of.only.clone()],
            TaskData::Data(of) => of.sources.clone(),
            _ => Vec::new(),
        }
    }
}

section! {
    /// Supervised training: all of the `sft` pipeline, and the warm-up of `grpo`. Left out, `grpo`
    /// starts from the model unchanged.
    pub struct Sft {
        /// Optimizer steps.
        steps: u64 = 40, SOME_STEPS;
        /// Passes over the samples, instead of `steps`, which follow from them, rounded up.
        epochs: Option<f64> = None, POSITIVE_IF_GIVEN;
        /// Pairs or conversations per step; rows if they are packed.
        batch: usize = 64, SOME;
        /// Most tokens per step, instead of `batch`: a step takes samples in turn up to this many
        /// tokens, so that steps cost about the same.
        batch_tokens: Option<usize> = None, SOME_IF_GIVEN;
        /// Peak learning rate. Left out, it follows from the model: 2e-5 for a Hugging Face model (as
        /// TRL's `SFTConfig`; half of it for presets of 2 billion parameters or more), 2e-4 for its
        /// adapters (as TRL's `sft.py`), 1e-3 for a small random model.
        lr: f64 = IMITATION.random, POSITIVE;
        /// Sequence length: most tokens of a sample, and of a row if samples are packed. Left out:
        /// what the model reads.
        max_length: Option<usize> = None, SOME_IF_GIVEN;
        /// Policy for samples longer than `max_length`.
        #[formerly(too_long)]
        on_overlong: OverlongPolicy = OverlongPolicy::default();
        /// Sequence packing: how samples share rows of `max_length` tokens.
        packing: Packing = Packing::default();
        /// Share of the sums of an `arithmetic` task that are trained on, chosen by the seed.
        fraction: f64 = 1.0, SHARE;
        /// Data set of pairs, conversations or texts, as `data` of a source. Without it and
        /// `sources`: the task's own prompts and reference answers.
        data: Option<PathBuf> = None;
        /// Several data sets instead of one, or one with more settings.
        sources: Vec<Source> = Vec::new();
        /// Conversion of a conversation of several turns into samples.
        turns: Turns = Turns::default();
        last optimization: Optimization;
    }
}

choices! {
    /// Conversion of a conversation of several turns into samples.
    pub enum Turns {
        /// one sample, in which each turn of the assistant is trained on.
        "together" => Together,
        /// a sample for each turn of the assistant, with the previous turns as the model would be
        /// shown them.
        "apart" => Apart,
    }
}

section! {
    /// Training of a reward model on pairs of completions: all of the `reward_model` pipeline.
    /// Pairs are the records of a `data` task, with the fields `chosen` and `rejected` or those
    /// that its `columns` name, or sums of the `arithmetic` task against wrong ones, 64 for each.
    pub struct RewardModel {
        /// Optimizer steps.
        steps: u64 = 200, SOME_STEPS;
        /// Passes over the training pairs, instead of `steps`, which follow from them, rounded up.
        epochs: Option<f64> = None, POSITIVE_IF_GIVEN;
        /// Pairs per step.
        batch: usize = 64, SOME;
        /// Peak learning rate. Left out, it follows from the model: 1e-5 for a Hugging Face model,
        /// 1e-4 for its adapters (as TRL's `reward_modeling.py`), 1e-3 for a small random model.
        lr: f64 = REWARD_MODEL.random, POSITIVE;
        /// Share of the task's prompts whose pairs are held out, and judged at the end.
        held_out: f64 = 0.1, BELOW_ONE;
        /// Coefficient that keeps scores near 0; 0.01 is common.
        center: f64 = 0.0, NOT_NEGATIVE;
        last optimization: Optimization;
    }
}

impl Sft {
    /// Returns the data sets; none if the task's own pairs are trained on.
    pub fn sources(&self) -> Vec<Source> {
        if self.sources.is_empty() { self.data.iter().map(Source::of).collect() } else { self.sources.clone() }
    }

    /// Returns true if each turn of the assistant becomes a sample.
    pub fn turns_apart(&self) -> bool {
        self.turns == Turns::Apart
    }

    /// Returns true if steps have packed rows or a number of tokens instead of a number of samples.
    pub fn packs(&self) -> bool {
        self.batch_tokens.is_some() || self.packing != Packing::Apart
    }

    /// Creates a section with these values and defaults, and checks it.
    pub fn new(steps: u64, batch: usize, lr: f64) -> Result<Self, RecipeErrors> {
        super::checks::validated(Sft { steps, batch, lr, ..Sft::default() })
    }
}
