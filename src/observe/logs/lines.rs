//! A text file that grows by whole JSON lines and survives a crash between any two of them; and its reader.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::marker::PhantomData;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::observe::ObserveError;
use crate::util::atomic_file;

/// An append-only file of rows, one a line. Each line is one write to the operating system, so that
/// a killed process loses none of the returned ones.
#[derive(Debug)]
pub struct JsonLines<T> {
    path: PathBuf,
    file: Option<File>,
    rows: PhantomData<fn(&T)>,
}

impl<T> JsonLines<T> {
    /// Appends to `path`; the file and its folder are made with the first line.
    pub fn later(path: impl Into<PathBuf>) -> Self {
        JsonLines { path: path.into(), file: None, rows: PhantomData }
    }

    /// Opens `path` to append; makes it and its folder if they are missing. Removes a last line
    /// without its end, which a crash truncated, so that the next line does not continue it.
    pub fn append(path: impl Into<PathBuf>) -> Result<Self, ObserveError> {
        let mut lines = JsonLines::later(path);
        lines.with(|_| Ok(()))?;
        Ok(lines)
    }

    /// Opens `path` empty, making it and its folder when missing. What was there is gone.
    pub fn create(path: impl Into<PathBuf>) -> Result<Self, ObserveError> {
        let mut lines = JsonLines::later(path);
        lines.with(|file| file.set_len(0).and_then(|()| file.rewind()))?;
        Ok(lines)
    }

    /// The file it writes.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Waits until everything is on the disk.
    pub fn sync(&mut self) -> Result<(), ObserveError> {
        if self.file.is_some() { self.with(|file| file.sync_all()) } else { Ok(()) }
    }

    /// Does this with the file, which is opened first if it is not.
    fn with(&mut self, action: impl FnOnce(&mut File) -> std::io::Result<()>) -> Result<(), ObserveError> {
        let file = match &mut self.file {
            Some(file) => file,
            none => none.insert(open(&self.path).map_err(ObserveError::at(&self.path))?),
        };
        action(file).map_err(ObserveError::at(&self.path))
    }
}

impl<T: Serialize> JsonLines<T> {
    /// Appends one row.
    ///
    /// # Panics
    /// If the row is no JSON: its maps have other keys than text.
    pub fn write(&mut self, row: &T) -> Result<(), ObserveError> {
        let mut line = serde_json::to_string(row).expect("a row is JSON");
        line.push('\n');
        self.with(|file| {
            file.write_all(line.as_bytes()).inspect_err(|_| {
                // On a disk that is full, half a line would hide the whole ones before it from readers.
                // The error that counts is the first.
                let undone = end_of_last_line(file).and_then(|whole| file.set_len(whole));
                undone.and_then(|()| file.seek(SeekFrom::End(0))).ok();
            })
        })
    }
}

fn open(path: &Path) -> std::io::Result<File> {
    atomic_file::create_folder_of(path)?;
    let is_new = !path.exists();
    let mut file = File::options().create(true).truncate(false).read(true).write(true).open(path)?;
    if is_new {
        atomic_file::sync_entry(path)?;
    }
    let whole = end_of_last_line(&mut file)?;
    if whole < file.metadata()?.len() {
        file.set_len(whole)?;
    }
    file.seek(SeekFrom::End(0))?;
    Ok(file)
}

/// Reads one `T` per line lazily, in constant memory. Empty lines are skipped. The error of a
/// damaged line names file and number; the following lines are still read.
pub fn read_lines<T: DeserializeOwned>(
    path: impl Into<PathBuf>,
) -> Result<impl Iterator<Item = Result<T, ObserveError>>, ObserveError> {
    let path = path.into();
    let file = File::open(&path).map_err(ObserveError::at(&path))?;
    Ok(parse_lines(path, file))
}

/// Reads lines as [`read_lines`] does, without a last one that lacks its end because a crash truncated it.
pub fn read_whole_lines<T: DeserializeOwned>(
    path: impl Into<PathBuf>,
) -> Result<impl Iterator<Item = Result<T, ObserveError>>, ObserveError> {
    let path = path.into();
    let open = || {
        let mut file = File::open(&path)?;
        let end = end_of_last_line(&mut file)?;
        file.rewind()?;
        Ok(file.take(end))
    };
    let lines = open().map_err(ObserveError::at(&path))?;
    Ok(parse_lines(path, lines))
}

fn parse_lines<T: DeserializeOwned>(path: PathBuf, file: impl Read) -> impl Iterator<Item = Result<T, ObserveError>> {
    // Bytes, not text: a line that is no UTF-8 is damaged like any other.
    let mut lines = (1..).zip(BufReader::new(file).split(b'\n'));
    let mut unreadable = false;
    std::iter::from_fn(move || {
        // What cannot be read now cannot be read by trying again either.
        if unreadable {
            return None;
        }
        let (line, text) = lines.find(|(_, text)| !matches!(text, Ok(text) if text.trim_ascii().is_empty()))?;
        unreadable = text.is_err();
        let parse = |text: Vec<u8>| {
            serde_json::from_slice(&text).map_err(|source| ObserveError::Line { path: path.clone(), line, source })
        };
        Some(text.map_err(ObserveError::at(&path)).and_then(parse))
    })
}

/// Returns the offset after the last line feed. Reads backwards in blocks, so that the cost is that
/// of the last line.
fn end_of_last_line(file: &mut File) -> std::io::Result<u64> {
    let mut block = [0_u8; 4096];
    let mut end = file.seek(SeekFrom::End(0))?;
    while end > 0 {
        let start = end.saturating_sub(block.len() as u64);
        let part = &mut block[..(end - start) as usize];
        file.seek(SeekFrom::Start(start))?;
        file.read_exact(part)?;
        if let Some(at) = part.iter().rposition(|&byte| byte == b'\n') {
            return Ok(start + at as u64 + 1);
        }
        end = start;
    }
    Ok(0)
}
