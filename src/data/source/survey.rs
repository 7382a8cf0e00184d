//! Survey of a data set before a run: every file is found and opened, and a bounded number of its
//! records is judged as in the run.
//!
//! A data set of up to [`WHOLE`] bytes is judged whole. Of a larger one, files of lines are read at
//! their head and at places spread over them, Parquet files likewise by row number; a JSON file
//! that is one list is scanned to its end.

use std::ops::Range;

use rayon::prelude::*;

use super::DataError;
use super::dataset::DataSpec;
use super::locate::{Format, locate};
use super::part::Part;
use super::shape::Shape;
use super::skips::{Skip, Skips};

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

/// Judgement of a record: used, dropped, or an error that ends the run.
pub type Judged = Result<Result<(), Skip>, String>;

/// Surveys the data set of `spec`. If `judge` returns an error for a record, the result is an error
/// with its file and line.
pub fn survey<T: Shape>(spec: &DataSpec, judge: impl Fn(&T) -> Judged + Sync) -> Result<Survey, DataError> {
    let files = locate(&spec.data, spec.subset.as_deref(), &spec.split.name, spec.hub.cache())?;
    let size = |path: &std::path::Path| std::fs::metadata(path).map(|of| of.len()).map_err(DataError::file(path));
    let sizes = files.iter().map(|(path, _)| size(path)).collect::<Result<Vec<_>, _>>()?;
    let whole = sizes.iter().sum::<u64>() <= WHOLE;
    let places = (PLACES / files.len().max(1)).max(1);
    let mut found = Survey { name: spec.name(), files: files.len(), exact: whole, ..Survey::default() };
    let mut parts = Vec::new();
    let mut total = 0.0;
    for (path, format) in files {
        let lines = matches!(format, Format::JsonLines | Format::Text);
        let (part, records) = match whole || !lines {
            true => {
                let part = Part::index(path, format, &spec.split.name)?;
                let records = part.len() as f64;
                (part, records)
            }
            false => Part::sample(path, format, HEAD, places as u64, BYTES)?,
        };
        total += records;
        parts.push((part, !whole && lines));
    }
    let slice = spec.split.rows(total.round() as usize);
    let (mut before, mut usable) = (0, spec.max_samples);
    for (part, sampled) in &parts {
        let len = part.len();
        let ranges = match whole {
            true => {
                let inside = |row: usize| row.clamp(before, before + len) - before;
                Vec::from_iter([(inside(slice.start), inside(slice.end))].map(|(start, end)| start..end))
            }
            false => spread(len, places, *sampled),
        };
        before += len;
        for range in ranges {
            judge_range(part, range, spec, &judge, &mut found, &mut usable)?;
        }
    }
    let used = found.judged - found.skips.total();
    let share = if found.judged == 0 { 0.0 } else { used as f64 / found.judged as f64 };
    found.records = if whole { used } else { (slice.len() as f64 * share).round() as u64 };
    found.records = found.records.min(spec.max_samples.map_or(u64::MAX, |most| most as u64));
    if used == 0 {
        let fields = parts.first().map_or_else(Vec::new, |(part, _)| part.fields());
        return Err(DataError::Nothing { name: spec.name(), skips: found.skips, fields });
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

fn judge_range<T: Shape>(
    part: &Part,
    range: Range<usize>,
    spec: &DataSpec,
    judge: &(impl Fn(&T) -> Judged + Sync),
    found: &mut Survey,
    usable: &mut Option<usize>,
) -> Result<(), DataError> {
    let mut unjudged = part.unjudged(range, None)?;
    while *usable != Some(0) {
        let (from, records) = part.next(&mut unjudged)?;
        if records.is_empty() {
            break;
        }
        let verdict = |bytes: &Vec<u8>| match T::read(part.parse(bytes)?, &spec.columns) {
            Ok(record) => judge(&record),
            Err(skip) => Ok(Err(skip)),
        };
        let verdicts: Vec<Judged> = records.par_iter().map(verdict).collect();
        for (at, verdict) in verdicts.iter().enumerate() {
            if *usable == Some(0) {
                break;
            }
            found.judged += 1;
            match verdict {
                Ok(Ok(())) => usable.iter_mut().for_each(|left| *left -= 1),
                Ok(Err(skip)) => found.skips.count(skip.clone()),
                Err(problem) => {
                    let more = verdicts[at + 1..].iter().filter(|verdict| verdict.is_err()).count();
                    let line = part.line_of_place(from + at);
                    return Err(DataError::Record { file: part.path.clone(), line, problem: problem.clone(), more });
                }
            }
        }
    }
    Ok(())
}
