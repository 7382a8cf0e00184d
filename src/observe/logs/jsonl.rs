//! `metrics.jsonl`: one JSON object a step, the file that every later reader starts from.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::{JsonLines, MetricsLogger, StepMetrics, read_lines};
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
/// skipped.
pub fn metrics_rows(
    path: impl Into<PathBuf>,
) -> Result<impl Iterator<Item = Result<(u64, StepMetrics), ObserveError>>, ObserveError> {
    let rows = read_lines::<BTreeMap<String, number::Number>>(path)?;
    Ok(rows.map(|row| {
        let mut row: StepMetrics = row?.into_iter().map(|(key, number)| (key, number.0)).collect();
        Ok((row.remove("step").unwrap_or_default() as u64, row))
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metrics(pairs: &[(&str, f64)]) -> StepMetrics {
        pairs.iter().map(|&(key, value)| (key.to_owned(), value)).collect()
    }

    #[test]
    fn non_finite_numbers_are_named_strings_and_a_row_is_in_the_file_when_log_returns() {
        let folder = tempfile::tempdir().unwrap();
        let mut logger = JsonlLogger::new(folder.path().join("deep/run")).unwrap();
        let row = metrics(&[("loss", f64::NAN), ("grad_norm", f64::INFINITY), ("a", f64::NEG_INFINITY), ("b", 0.5)]);
        logger.log(3, &row).unwrap();
        let written = std::fs::read_to_string(logger.path()).unwrap();
        assert_eq!(written, "{\"step\":3,\"a\":\"-inf\",\"b\":0.5,\"grad_norm\":\"inf\",\"loss\":\"NaN\"}\n");
        let (step, read) = metrics_rows(logger.path()).unwrap().next().unwrap().unwrap();
        assert_eq!((step, read["a"], read["b"], read["loss"].is_nan()), (3, f64::NEG_INFINITY, 0.5, true));
    }

    #[test]
    fn a_torn_last_line_is_removed_before_the_next_one() {
        let folder = tempfile::tempdir().unwrap();
        let mut logger = JsonlLogger::new(folder.path()).unwrap();
        logger.log(0, &metrics(&[("loss", 1.0)])).unwrap();
        let path = logger.path().to_owned();
        drop(logger);
        // Longer than a block of the backward search.
        let torn = format!("{}{{\"step\":1,\"lo{}", std::fs::read_to_string(&path).unwrap(), "s".repeat(10_000));
        std::fs::write(&path, torn).unwrap();

        let mut logger = JsonlLogger::new(folder.path()).unwrap();
        logger.log(1, &metrics(&[("loss", 0.5)])).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "{\"step\":0,\"loss\":1.0}\n{\"step\":1,\"loss\":0.5}\n");
    }

    #[test]
    fn an_unwritable_folder_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        std::fs::write(&file, "").unwrap();
        let error = JsonlLogger::new(&file).unwrap_err().to_string();
        assert!(error.contains(&file.join("metrics.jsonl").display().to_string()), "{error}");
    }
}
