//! `[[task.sources]]`, `[[sft.sources]]`: data sets, and how much of each is drawn.

use std::path::PathBuf;

use crate::data::source::{Columns, DataSpec, Share, Split};
use crate::settings::declare::section;
use crate::settings::setting::{Limit, SOME_IF_GIVEN, SOME_STEPS};

const SPLIT: Limit<String> =
    Limit { text: "a split, as in \"train\", \"train[:10%]\" or \"test[100:200]\"", holds: |text| text.parse::<Split>().is_ok() };
const WEIGHT: Limit<Option<f64>> =
    Limit { text: "above 0", holds: |weight| weight.is_none_or(|weight| weight > 0.0 && weight.is_finite()) };

section! {
    /// A data set: JSON lines, JSON, Parquet or text, recognised by the names of its fields
    /// (docs/how_to/data.md).
    pub struct Source {
        /// A file, a folder of files, or the id of a data set on the Hugging Face hub, such as
        /// "openai/gsm8k", or "openai/gsm8k@COMMIT" for one revision; ids are fetched on first use.
        /// Paths are relative to where the command runs.
        data: PathBuf = PathBuf::new();
        /// Subset (configuration) of a data set that has several.
        subset: Option<String> = None;
        /// Split, optionally with a range of records, such as `train[:10%]` or `test[100:200]`.
        split: String = "train".to_owned(), SPLIT;
        /// Most usable records, from the start. Left out: all.
        max_samples: Option<usize> = None, SOME_IF_GIVEN;
        /// Repetitions of each record per epoch.
        repeat: u64 = 1, SOME_STEPS;
        /// Share of the stream relative to the other sources' weights, instead of `repeat`: all
        /// sources have a weight, or none.
        weight: Option<f64> = None, WEIGHT;
        /// Name in metrics. Left out: the end of `data`.
        name: Option<String> = None;
        /// Names of fields, where they are not recognised.
        columns: Option<SourceColumns> = None;
    }
}

section! {
    /// Names of fields; a dot leads into an object, such as "reward_model.ground_truth". Fields
    /// that are left out are recognised.
    pub struct SourceColumns {
        /// Prompt: text, or a list of messages.
        prompt: Option<String> = None;
        /// Completion to imitate.
        completion: Option<String> = None;
        /// Reference answer.
        answer: Option<String> = None;
        /// Whole conversation.
        messages: Option<String> = None;
        /// Raw text.
        text: Option<String> = None;
        /// Chosen completion of a pair.
        chosen: Option<String> = None;
        /// Rejected completion of a pair.
        rejected: Option<String> = None;
    }
}

section! {
    /// Data sets, mixed.
    pub struct DataTask {
        first only: Source;
        /// Several data sets instead of one, each with the same keys.
        sources: Vec<Source> = Vec::new();
    }
}

section! {
    /// Recorded rollouts.
    pub struct RolloutsTask {
        /// A `rollouts.jsonl`, or records with `prompt`, `response` and `reward`: a file or a
        /// folder of files, relative to where the command runs.
        path: PathBuf = PathBuf::new(), crate::settings::setting::PATH_GIVEN;
        /// Records to read. Left out: all.
        limit: Option<usize> = None, SOME_IF_GIVEN;
        /// If true, `[reward]` scores the recorded completions before the run, instead of the
        /// recorded rewards.
        rescore: bool = false;
    }
}

impl Source {
    /// All of a data set's split `train`.
    pub fn of(data: impl Into<PathBuf>) -> Self {
        Source { data: data.into(), ..Source::default() }
    }

    /// Returns the data set to open.
    pub fn spec(&self) -> DataSpec {
        let columns = self.columns.clone().map_or_else(Columns::default, |columns| {
            let SourceColumns { prompt, completion, answer, messages, text, chosen, rejected } = columns;
            Columns { prompt, completion, answer, messages, text, chosen, rejected }
        });
        DataSpec {
            subset: self.subset.clone(),
            // Checked with the recipe.
            split: self.split.parse().unwrap_or_default(),
            max_samples: self.max_samples,
            columns,
            name: self.name.clone(),
            ..DataSpec::new(&self.data)
        }
    }

    /// Returns the share of the stream.
    pub fn share(&self) -> Share {
        self.weight.map_or(Share::Repeat(self.repeat), Share::Weight)
    }
}

impl DataTask {
    /// One or several.
    pub fn sources(&self) -> Vec<Source> {
        if self.sources.is_empty() { vec![self.only.clone()] } else { self.sources.clone() }
    }
}
