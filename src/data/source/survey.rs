//! Survey of a data set before a run: every file is found and opened, and a bounded number of its
//! records is judged as in the run.
//!
//! A data set of up to [`WHOLE`] bytes is judged whole. Of a larger one, files of lines are read at
//! their head and at places spread over them, Parquet files likewise by row number; a JSON file
//! that is one list is scanned to its end.

use std::ops::Range;

use super::dataset::{DataSpec, Skips};
use super::locate::Format;
use super::part::Part;
use super::shape::Shape;
use super::split::Split;
use crate::data::DataError;

/// Bytes up to which a data set is judged whole.
const WHOLE: u64 = 32 << 20;
/// Limits for a larger one: bytes at the head of each file of lines, places spread over all files,
/// and bytes or rows at each.
const HEAD: u64 = 1 << 20;
const PLACES: usize = 64;
const BYTES: u64 = 64 << 10;
const ROWS: usize = 128;

/// Result of a survey.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Survey {
    /// Name of the data set.
    pub name: String,
    /// Number of files.
    pub files: usize,
    /// Records that a run would use: counted, or estimated where `exact` is false.
    pub records: u64,
    /// If true, every record was judged.
    pub exact: bool,
    /// Records that were judged.
    pub judged: u64,
    /// Records among them that a run would leave out, by reason.
    pub skips: Skips,
}

/// Surveys the data set of `spec`. `judge` returns `Ok(Err(reason))` for a record that a run leaves
/// out, and an error for one that ends the run, and the survey, with the record's file and line.
pub fn survey<T: Shape>(
    spec: &DataSpec,
    judge: impl Fn(&T) -> Result<Result<(), String>, String> + Sync,
) -> Result<Survey, DataError> {
    let (split, files): (Split, _) = (spec.split.parse()?, spec.files()?);
    let size = |path: &std::path::Path| std::fs::metadata(path).map(|of| of.len()).map_err(DataError::read(path));
    let sizes = files.iter().map(|(path, _)| size(path)).collect::<Result<Vec<_>, _>>()?;
    let whole = sizes.iter().sum::<u64>() <= WHOLE;
    let places = (PLACES / files.len().max(1)).max(1);
    let mut found = Survey { name: spec.name(), files: files.len(), exact: whole, ..Survey::default() };
    let mut parts = Vec::new();
    let mut total = 0.0;
    for (path, format) in &files {
        let (path, sampled) = (path.clone(), !whole && matches!(format, Format::JsonLines | Format::Text));
        let (part, records) = if sampled {
            Part::sample(path, *format, HEAD, places as u64, BYTES)?
        } else {
            let part = Part::index(path, *format, &split.name)?;
            let records = part.len() as f64;
            (part, records)
        };
        total += records;
        parts.push((part, sampled));
    }
    let slice = split.rows(total.round() as usize);
    let (mut before, mut usable) = (0, spec.max_samples);
    for (part, sampled) in &mut parts {
        let inside = |row: usize| row.clamp(before, before + part.len()) - before;
        let ranges = match whole {
            true => std::iter::once(inside(slice.start)..inside(slice.end)).collect(),
            false => spread(part.len(), places, *sampled),
        };
        before += part.len();
        for range in ranges {
            let judge = |record| match T::read(record, &spec.columns) {
                Ok(record) => judge(&record),
                Err(skip) => Ok(Err(skip)),
            };
            part.judge(range, &mut usable, judge, |_, _, _, verdict| {
                found.judged += 1;
                verdict.or_else(|skip| {
                    found.skips.count(skip);
                    Ok(())
                })
            })?;
        }
    }
    let used = found.judged - found.skips.total();
    let share = if found.judged == 0 { 0.0 } else { used as f64 / found.judged as f64 };
    found.records = if whole { used } else { (slice.len() as f64 * share).round() as u64 };
    found.records = found.records.min(spec.max_samples.map_or(u64::MAX, |most| most as u64));
    if used == 0 {
        return Err(spec.nothing(&found.skips, &files));
    }
    Ok(found)
}

/// All of what was sampled already, or so many stretches spread over the records.
fn spread(len: usize, places: usize, sampled: bool) -> Vec<Range<usize>> {
    if sampled || len <= places * ROWS {
        return std::iter::once(0..len).collect();
    }
    let last = len - ROWS;
    (0..places).map(|at| if places == 1 { 0 } else { last * at / (places - 1) }).map(|start| start..start + ROWS).collect()
}
