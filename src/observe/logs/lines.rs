//! A text file that grows by whole lines and survives a crash between any two of them; and its reader.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;

use super::LogError;
use crate::util::atomic_file;

/// An append-only file of lines. Each line is one write to the operating system, so that a killed
/// process loses none of the returned ones.
#[derive(Debug)]
pub(super) struct LineFile {
    file: File,
    path: PathBuf,
}

impl LineFile {
    /// Opens `path` to append; makes it and its folder if they are missing. Removes a last line
    /// without its end, which a crash truncated, so that the next line does not continue it.
    pub(super) fn append(path: PathBuf) -> Result<Self, LogError> {
        let open = || {
            atomic_file::create_folder(path.parent().unwrap_or(Path::new("")))?;
            let is_new = !path.exists();
            let mut file = File::options().create(true).truncate(false).read(true).write(true).open(&path)?;
            if is_new {
                atomic_file::sync_entry(&path)?;
            }
            let whole = end_of_last_line(&mut file)?;
            if whole < file.metadata()?.len() {
                file.set_len(whole)?;
            }
            file.seek(SeekFrom::End(0))?;
            Ok(file)
        };
        match open() {
            Ok(file) => Ok(LineFile { file, path }),
            Err(source) => Err(LogError::Io { path, source }),
        }
    }

    /// Opens `path` empty, making it and its folder when missing.
    pub(super) fn create(path: PathBuf) -> Result<Self, LogError> {
        let mut lines = LineFile::append(path)?;
        lines.file.set_len(0).and_then(|()| lines.file.rewind()).map_err(|source| lines.error(source))?;
        Ok(lines)
    }

    /// Appends `line` and its end.
    pub(super) fn write(&mut self, mut line: String) -> Result<(), LogError> {
        line.push('\n');
        self.file.write_all(line.as_bytes()).map_err(|source| {
            // On a disk that is full, half a line would hide the whole ones before it from readers. The error that counts is the first.
            let undone = end_of_last_line(&mut self.file).and_then(|whole| self.file.set_len(whole));
            undone.and_then(|()| self.file.seek(SeekFrom::End(0))).ok();
            self.error(source)
        })
    }

    /// Asks the machine to put everything on the disk.
    pub(super) fn sync(&mut self) -> Result<(), LogError> {
        self.file.sync_all().map_err(|source| self.error(source))
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    fn error(&self, source: std::io::Error) -> LogError {
        LogError::Io { path: self.path.clone(), source }
    }
}

/// Reads one `T` per line lazily, in constant memory. Empty lines are skipped. The error of a
/// damaged line names file and number; the following lines are still read.
pub(super) fn read_lines<T: DeserializeOwned>(path: PathBuf) -> Result<impl Iterator<Item = Result<T, LogError>>, LogError> {
    let file = match File::open(&path) {
        Ok(file) => file,
        Err(source) => return Err(LogError::Io { path, source }),
    };
    // Bytes, not text: a line that is no UTF-8 is damaged like any other.
    let mut lines = (1..).zip(BufReader::new(file).split(b'\n'));
    let mut unreadable = false;
    Ok(std::iter::from_fn(move || {
        // What cannot be read now cannot be read by trying again either.
        let filled =
            |(_, line): &(usize, std::io::Result<Vec<u8>>)| line.as_ref().map_or(true, |line| !line.trim_ascii().is_empty());
        let (at, line) = if unreadable { None } else { lines.find(filled) }?;
        unreadable = line.is_err();
        Some(match line {
            Err(source) => Err(LogError::Io { path: path.clone(), source }),
            Ok(line) => serde_json::from_slice(&line).map_err(|source| LogError::Line { path: path.clone(), line: at, source }),
        })
    }))
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
