//! `metrics.jsonl`: one JSON object a step, the file that every later reader starts from.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::{Map, Value};

use super::lines::read_whole_lines;
use super::{JsonLines, MetricsLogger, StepMetrics};
use crate::data::number;
use crate::observe::ObserveError;

/// Appends each step's row to `metrics.jsonl`: `{"step":12,"grad_norm":0.8,"loss":0.02,…}`, with
/// keys in alphabetical order after `step`. A metric named `step` would hide the step's number and is
/// dropped.
///
/// Numbers that JSON lacks are the strings `"NaN"`, `"inf"` and `"-inf"`. One line is one write; a
/// crash loses at most the last line.
#[derive(Debug)]
pub struct JsonlLogger(JsonLines<Value>);

impl JsonlLogger {
    /// Appends to `metrics.jsonl` in `folder`, making both when missing.
    pub fn new(folder: impl AsRef<Path>) -> Result<Self, ObserveError> {
        JsonlLogger::at(folder.as_ref().join("metrics.jsonl"))
    }

    /// Appends to another file of such rows.
    pub fn at(path: impl Into<PathBuf>) -> Result<Self, ObserveError> {
        JsonLines::append(path).map(JsonlLogger)
    }

    /// The file it writes.
    pub fn path(&self) -> &Path {
        self.0.path()
    }
}

impl MetricsLogger for JsonlLogger {
    fn log(&mut self, step: u64, metrics: &StepMetrics) -> Result<(), ObserveError> {
        let mut row = Map::from_iter([("step".to_owned(), step.into())]);
        for (key, &value) in metrics {
            row.entry(key.as_str()).or_insert_with(|| number::to_json(value));
        }
        self.0.write(&Value::Object(row))
    }

    fn finish(&mut self) -> Result<(), ObserveError> {
        self.0.sync()
    }
}

/// Reads a `metrics.jsonl` lazily, in constant memory: each step's number and row. Empty lines are
/// skipped, and so is a last line that a crash truncated.
pub fn metrics_rows(
    path: impl Into<PathBuf>,
) -> Result<impl Iterator<Item = Result<(u64, StepMetrics), ObserveError>>, ObserveError> {
    Ok(read_whole_lines::<NumberRow>(path)?.map(|row| Ok(row?.stepped())))
}

/// One line of such a file as the step's number and row.
///
/// # Errors
/// The line is no JSON object of numbers.
pub fn metrics_row(line: &[u8]) -> Result<(u64, StepMetrics), serde_json::Error> {
    serde_json::from_slice::<NumberRow>(line).map(NumberRow::stepped)
}

#[derive(Deserialize)]
#[serde(transparent)]
struct NumberRow(BTreeMap<String, number::Number>);

impl NumberRow {
    fn stepped(self) -> (u64, StepMetrics) {
        let mut row: StepMetrics = self.0.into_iter().map(|(key, number)| (key, number.0)).collect();
        (row.remove("step").unwrap_or_default() as u64, row)
    }
}
