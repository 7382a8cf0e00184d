//! Bringing a run's line files back to a step, so that a resumed run writes on as if it had never been interrupted.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use serde::Deserialize;

use super::LogError;

#[derive(Deserialize)]
struct Stepped {
    step: u64,
}

/// The last step of which a line file (`metrics.jsonl`, `rollouts.jsonl`) holds a whole line; 0 without any.
pub fn last_step(path: &Path) -> Result<u64, LogError> {
    let mut last = 0;
    each_line(path, |_, step| {
        last = step;
        true
    })?;
    Ok(last)
}

/// Removes what stands in a line file after `step`, and a torn last line. Steps ascend in such files. A file that is not there is well.
pub fn rewind(path: &Path, step: u64) -> Result<(), LogError> {
    let mut keep = 0;
    each_line(path, |end, found| {
        let kept = found <= step;
        if kept {
            keep = end;
        }
        kept
    })?;
    let cut = || File::options().write(true).open(path).and_then(|file| file.set_len(keep).and_then(|()| file.sync_all()));
    match cut() {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(io(path)(error)),
        _ => Ok(()),
    }
}

/// Calls `see` with every whole line's end and step until it says no.
fn each_line(path: &Path, mut see: impl FnMut(u64, u64) -> bool) -> Result<(), LogError> {
    let file = match File::open(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        opened => opened.map_err(io(path))?,
    };
    let (mut reader, mut text, mut end) = (BufReader::new(file), String::new(), 0);
    for line in 1.. {
        text.clear();
        let read = reader.read_line(&mut text).map_err(io(path))?;
        if !text.ends_with('\n') {
            break;
        }
        end += read as u64;
        let Stepped { step } =
            serde_json::from_str(&text).map_err(|source| LogError::Line { path: path.to_owned(), line, source })?;
        if !see(end, step) {
            break;
        }
    }
    Ok(())
}

fn io(path: &Path) -> impl FnOnce(std::io::Error) -> LogError {
    let path = path.to_owned();
    move |source| LogError::Io { path, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_came_after_the_step_goes_with_the_torn_end() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let whole = "{\"step\":1,\"loss\":0.5}\n{\"step\":2}\n{\"step\":2}\n";
        std::fs::write(&path, format!("{whole}{{\"step\":3}}\n{{\"ste")).unwrap();
        assert_eq!(last_step(&path).unwrap(), 3);
        rewind(&path, 2).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), whole);
        rewind(&path, 0).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "");
        rewind(&folder.path().join("absent"), 3).unwrap();
    }

    #[test]
    fn a_damaged_line_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        std::fs::write(&path, "{\"step\":1}\nnonsense\n").unwrap();
        assert!(last_step(&path).unwrap_err().to_string().contains("metrics.jsonl, line 2"));
    }
}
