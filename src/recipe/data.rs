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
    /// A data set: JSON lines, JSON, Parquet or text, recognised by the names of its fields (docs/data.md).
    pub struct Source {
        /// A file, a folder of files, or the id of a data set on the Hugging Face hub, as in "openai/gsm8k" or, of one revision,
        /// "openai/gsm8k@COMMIT", which is fetched on first use. Paths are relative to where the command runs.
        data: PathBuf = PathBuf::new();
        /// One of a data set's subsets (configurations), if it has several.
        subset: Option<String> = None;
        /// The split, and which of its records, as in `train[:10%]` or `test[100:200]`.
        split: String = "train".to_owned(), SPLIT;
        /// The first usable records, at most so many; without it, all.
        max_samples: Option<usize> = None, SOME_IF_GIVEN;
        /// How often each record comes in an epoch.
        repeat: u64 = 1, SOME_STEPS;
        /// Share of the stream in proportion to the other sources' weights, in the place of `repeat`: all sources have a weight, or none.
        weight: Option<f64> = None, WEIGHT;
        /// What it is called in metrics; without it, the end of `data`.
        name: Option<String> = None;
        /// Fields by what they hold, where that is not to be seen from their names.
        columns: Option<SourceColumns> = None;
    }
}

section! {
    /// Names of fields; a dot leads into an object, as in "reward_model.ground_truth". What is left out is recognised.
    pub struct SourceColumns {
        /// What is asked: text or a list of messages.
        prompt: Option<String> = None;
        /// What is to be answered.
        completion: Option<String> = None;
        /// The ground truth.
        answer: Option<String> = None;
        /// A whole conversation.
        messages: Option<String> = None;
        /// Text without question and answer.
        text: Option<String> = None;
        /// Of a pair of answers, the better one.
        chosen: Option<String> = None;
        /// Of a pair of answers, the worse one.
        rejected: Option<String> = None;
    }
}

section! {
    /// Data sets, mixed.
    pub struct DataTask {
        first only: Source;
        /// Several data sets in the place of one; each has the keys that one has.
        sources: Vec<Source> = Vec::new();
    }
}

section! {
    /// Rollouts that were recorded.
    pub struct RolloutsTask {
        /// A `rollouts.jsonl`, or records with `prompt`, `response` and `reward`: a file or a folder of files, relative to where the command runs.
        path: PathBuf = PathBuf::new(), crate::settings::setting::PATH_GIVEN;
        /// Records to read; without it, all.
        limit: Option<usize> = None, SOME_IF_GIVEN;
        /// Whether `[reward]` scores the recorded completions before the run, instead of the rewards that were recorded.
        rescore: bool = false;
    }
}

impl Source {
    /// All of a data set's split `train`.
    pub fn of(data: impl Into<PathBuf>) -> Self {
        Source { data: data.into(), ..Source::default() }
    }

    /// What is to be opened.
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

    /// How much of it is drawn.
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
