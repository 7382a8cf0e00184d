//! JSON lines: one JSON object per line, in UTF-8. A byte-order mark, Windows line ends and blank
//! lines are skipped. An error about a line names the file, the line and what was expected.

use std::borrow::Borrow;
use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, Write};
use std::path::Path;

use serde::Serialize;
use serde_json::{Map, Value};

use super::{DataError, Sample};
use crate::util::atomic_file;
use crate::util::reading;

/// Loads samples that [`save_samples`] wrote. Missing fields take their defaults; unknown fields
/// are ignored, so that newer files can be read. Per-token columns of different lengths are an
/// error.
pub fn load_samples(file: &Path) -> Result<Vec<Sample>, DataError> {
    let sample_of = |record| -> Result<Sample, String> {
        let sample: Sample = serde_json::from_value(Value::Object(record)).map_err(|error| error.to_string())?;
        sample.validate().map_err(|error| error.to_string())?;
        Ok(sample)
    };
    let unreadable = DataError::read(file);
    let mut reader = BufReader::new(reading::open(file).map_err(&unreadable)?);
    let (mut samples, mut bytes, mut line) = (Vec::new(), Vec::new(), 0);
    while reader.read_until(b'\n', &mut bytes).map_err(&unreadable)? > 0 {
        line += 1;
        let sample = parse_line(&bytes, line).and_then(|record| record.map(sample_of).transpose());
        samples.extend(sample.map_err(|problem| DataError::in_line(file, line, problem))?);
        bytes.clear();
    }
    Ok(samples)
}

/// Writes samples to a file, one per line, and replaces its contents. [`load_samples`] reads them
/// back unchanged, conversations included.
pub fn save_samples(file: &Path, samples: impl IntoIterator<Item = impl Borrow<Sample> + Serialize>) -> Result<(), DataError> {
    write(file, samples)
}

/// Replaces a file by these values, one per line.
pub(super) fn write(file: &Path, values: impl IntoIterator<Item = impl Serialize>) -> Result<(), DataError> {
    let all = |out: &mut BufWriter<&mut File>| {
        values.into_iter().try_for_each(|value| {
            serde_json::to_writer(&mut *out, &value)?;
            out.write_all(b"\n")
        })
    };
    atomic_file::write_with(file, all).map_err(DataError::write(file))
}

/// The record on a line; `None` for a blank one.
pub(super) fn parse_line(bytes: &[u8], line: usize) -> Result<Option<Map<String, Value>>, String> {
    let text = std::str::from_utf8(bytes).map_err(|error| format!("not UTF-8 ({error}); save the file as UTF-8"))?;
    let text = if line == 1 { text.strip_prefix('\u{feff}').unwrap_or(text) } else { text };
    if text.trim().is_empty() {
        return Ok(None);
    }
    match serde_json::from_str(text) {
        Ok(value) => object(value).map(Some),
        // The file's line is named already; serde's own is always 1 here.
        Err(error) => {
            Err(format!("not JSON: {} (column {}); each line must hold one whole object", bare(&error), error.column()))
        }
    }
}

/// The record in these bytes, which may stand on several lines.
pub(super) fn parse_object(bytes: &[u8]) -> Result<Map<String, Value>, String> {
    let refuse = |error: serde_json::Error| {
        let line = if error.line() > 1 { format!("line {} of the record, ", error.line()) } else { String::new() };
        format!("not JSON: {} ({line}column {})", bare(&error), error.column())
    };
    object(serde_json::from_slice(bytes).map_err(refuse)?)
}

fn object(value: Value) -> Result<Map<String, Value>, String> {
    match value {
        Value::Object(record) => Ok(record),
        other => Err(format!("expected a JSON object like {{\"prompt\": …}}, found {}", kind(&other))),
    }
}

/// The error without its place.
pub(super) fn bare(error: &serde_json::Error) -> String {
    let text = error.to_string();
    text.split(" at line ").next().unwrap_or(&text).to_owned()
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a truth value",
        Value::Number(_) => "a number",
        Value::String(_) => "text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}
