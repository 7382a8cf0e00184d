//! Truncates a run's line files to a step, so that a resumed run continues them as if it had not
//! been interrupted.

use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind};
use std::path::Path;

use serde::Deserialize;

use super::tensorboard;
use crate::observe::ObserveError;
use crate::util::atomic_file;

/// The last step of which a line file (`metrics.jsonl`, `rollouts.jsonl`) holds a whole line; 0 without any.
pub fn last_step(path: &Path) -> Result<u64, ObserveError> {
    let mut last = 0;
    each_step(path, |_, step| {
        last = step;
        true
    })?;
    Ok(last)
}

/// Removes the lines of steps after `step` from a line file, and a truncated last line. Steps
/// ascend in such files. `None` is before the run's first row, which may be of step 0: the file is
/// deleted. A missing file is no error.
pub fn rewind(path: &Path, step: Option<u64>) -> Result<(), ObserveError> {
    let Some(step) = step else { return atomic_file::remove(path).map_err(ObserveError::at(path)) };
    let mut keep = 0;
    each_step(path, |end, found| {
        keep = if found <= step { end } else { keep };
        found <= step
    })?;
    cut(path, keep)
}

/// Whole lines of a file; 0 without it.
pub fn count_lines(path: &Path) -> Result<u64, ObserveError> {
    let mut lines = 0;
    each_line(path, |_, line, _| {
        lines = line as u64;
        Ok(true)
    })?;
    Ok(lines)
}

/// Removes all but the first `lines` lines of a file whose lines have no step, and a truncated last
/// line. A file without any line left is deleted. A missing file is no error.
pub fn rewind_to_lines(path: &Path, lines: u64) -> Result<(), ObserveError> {
    let mut keep = 0;
    each_line(path, |end, line, _| {
        keep = if line as u64 <= lines { end } else { keep };
        Ok((line as u64) < lines)
    })?;
    if keep == 0 { atomic_file::remove(path).map_err(ObserveError::at(path)) } else { cut(path, keep) }
}

/// Removes the events of steps after `step` from the TensorBoard files of a run, and truncated
/// ones. Files without any step left are deleted.
pub fn rewind_events(folder: &Path, step: Option<u64>) -> Result<(), ObserveError> {
    for path in tensorboard::event_files(folder).map_err(ObserveError::at(folder))? {
        match tensorboard::end_of_step(&path, step).map_err(ObserveError::at(&path))? {
            Some(keep) => cut(&path, keep)?,
            None => atomic_file::remove(&path).map_err(ObserveError::at(&path))?,
        }
    }
    Ok(())
}

fn cut(path: &Path, keep: u64) -> Result<(), ObserveError> {
    let cut = || {
        let file = File::options().write(true).open(path)?;
        if file.metadata()?.len() > keep {
            file.set_len(keep)?;
        }
        file.sync_all()
    };
    match cut() {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(ObserveError::at(path)(error)),
        _ => Ok(()),
    }
}

/// Calls `see` with every whole line's end and step until it returns false.
fn each_step(path: &Path, mut see: impl FnMut(u64, u64) -> bool) -> Result<(), ObserveError> {
    #[derive(Deserialize)]
    struct Stepped {
        step: u64,
    }
    each_line(path, |end, line, text| match serde_json::from_slice(text) {
        Ok(Stepped { step }) => Ok(see(end, step)),
        Err(source) => Err(ObserveError::Line { path: path.to_owned(), line, source }),
    })
}

/// Calls `see` with every whole line's end, number (from 1) and bytes until it returns false. A
/// missing file has no lines.
fn each_line(path: &Path, mut see: impl FnMut(u64, usize, &[u8]) -> Result<bool, ObserveError>) -> Result<(), ObserveError> {
    let mut file = match File::open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        opened => BufReader::new(opened.map_err(ObserveError::at(path))?),
    };
    let (mut line, mut end) = (Vec::new(), 0);
    for number in 1.. {
        line.clear();
        end += file.read_until(b'\n', &mut line).map_err(ObserveError::at(path))? as u64;
        if !line.ends_with(b"\n") || !see(end, number, &line)? {
            break;
        }
    }
    Ok(())
}
