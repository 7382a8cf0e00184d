//! `[[task.sources]]`, `[[sft.sources]]`: data sets, and how much of each is drawn.

use std::path::PathBuf;

use crate::data::source::{Columns, DataSpec, Split};
use crate::settings::declare::section;
use crate::settings::setting::{Limit, POSITIVE_IF_GIVEN, SOME_IF_GIVEN, SOME_STEPS};

const SPLIT: Limit<String> =
    Limit { text: "a split, as in \"train\", \"train[:10%]\" or \"test[100:200]\"", holds: |text| text.parse::<Split>().is_ok() };

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
        weight: Option<f64> = None, POSITIVE_IF_GIVEN;
        /// Name in metrics. Left out: the end of `data`.
        name: Option<String> = None;
        /// Names of fields, where they are not recognised.
        columns: Option<Columns> = None;
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

impl Source {
    /// All of a data set's split `train`.
    pub fn of(data: impl Into<PathBuf>) -> Self {
        Source { data: data.into(), ..Source::default() }
    }

    /// Returns the data set to open.
    pub fn spec(&self) -> DataSpec {
        DataSpec {
            subset: self.subset.clone(),
            split: self.split.clone(),
            max_samples: self.max_samples,
            repeat: self.repeat,
            weight: self.weight,
            columns: self.columns.clone().unwrap_or_default(),
            name: self.name.clone(),
            ..DataSpec::new(&self.data)
        }
    }
}
