//! A file that grows by lines, read from where the reader stopped.

use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// A file that grows by lines, and how much of it was read.
#[derive(Clone, Debug, Default)]
pub(crate) struct GrowingLines {
    path: PathBuf,
    /// Bytes read.
    read: u64,
    /// Lines read, empty ones included.
    lines: usize,
    /// The last line that was read, to notice a file that was cut off and grew again.
    last: Vec<u8>,
}

/// A line and its place.
pub(crate) struct PlacedLine<'a> {
    /// Offset of its first byte.
    pub at: u64,
    /// Number in the file, from 1.
    pub number: usize,
    /// Its bytes, with the line feed.
    pub bytes: &'a [u8],
}

impl GrowingLines {
    /// The file at `path`, of which nothing is read. It may be missing: it has no lines then.
    pub fn of(path: impl Into<PathBuf>) -> Self {
        GrowingLines { path: path.into(), ..GrowingLines::default() }
    }

    /// The lines of the last `bytes` of a file, and what follows. The first may lack its beginning.
    pub fn of_end(path: impl Into<PathBuf>, bytes: u64) -> Self {
        let path = path.into();
        let read = path.metadata().map_or(0, |metadata| metadata.len().saturating_sub(bytes));
        GrowingLines { path, read, ..GrowingLines::default() }
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes read.
    pub fn read(&self) -> u64 {
        self.read
    }

    /// Calls `see` with each whole line that was not seen before. A file that a resume has cut off is
    /// read from its end.
    pub fn each_new(&mut self, mut see: impl FnMut(PlacedLine) -> Result<()>) -> Result<()> {
        let path = self.path.clone();
        let reading = || format!("reading {}", path.display());
        let Some(mut file) = self.open()? else { return Ok(()) };
        self.read = self.read.min(file.metadata().with_context(reading)?.len());
        file.seek(SeekFrom::Start(self.read)).with_context(reading)?;
        let (mut file, mut line) = (BufReader::new(file), Vec::new());
        loop {
            line.clear();
            let length = file.read_until(b'\n', &mut line).with_context(reading)?;
            if !line.ends_with(b"\n") {
                return Ok(());
            }
            let at = self.read;
            (self.read, self.lines) = (at + length as u64, self.lines + 1);
            self.last.clone_from(&line);
            if !line.trim_ascii().is_empty() {
                see(PlacedLine { at, number: self.lines, bytes: &line })?;
            }
        }
    }

    /// Returns true, and begins again, if a resume has cut off lines that were read, also if the file
    /// has grown since.
    pub fn was_cut(&mut self) -> Result<bool> {
        let mut last = vec![0; self.last.len()];
        let same = match self.open()? {
            None => self.read == 0,
            Some(mut file) => {
                let start = SeekFrom::Start(self.read.saturating_sub(self.last.len() as u64));
                file.seek(start).and_then(|_| file.read_exact(&mut last)).is_ok() && last == self.last
            }
        };
        if !same {
            *self = GrowingLines::of(std::mem::take(&mut self.path));
        }
        Ok(!same)
    }

    fn open(&self) -> Result<Option<File>> {
        match File::open(&self.path) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            opened => opened.map(Some).with_context(|| format!("reading {}", self.path.display())),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn seen(lines: &mut GrowingLines) -> Vec<String> {
        let mut seen = Vec::new();
        let see = |line: PlacedLine| {
            seen.push(format!("{} {}", line.number, String::from_utf8_lossy(line.bytes).trim()));
            Ok(())
        };
        lines.each_new(see).unwrap();
        seen
    }

    #[test]
    fn lines_are_seen_once_they_are_whole_and_a_missing_file_has_none() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lines");
        let mut file = GrowingLines::of(&path);
        assert!(seen(&mut file).is_empty() && !file.was_cut().unwrap());
        fs::write(&path, "one\n\ntw").unwrap();
        assert_eq!(seen(&mut file), ["1 one"]);
        fs::write(&path, "one\n\ntwo\n").unwrap();
        assert!(!file.was_cut().unwrap());
        assert_eq!(seen(&mut file), ["3 two"]);
        fs::write(&path, "one\n").unwrap();
        assert!(seen(&mut file).is_empty(), "it continues at the end of a file that was cut off");
        fs::write(&path, "one\nthree\n").unwrap();
        assert_eq!(seen(&mut file), ["4 three"]);
    }

    #[test]
    fn a_file_that_was_cut_off_and_grew_again_is_read_from_its_start() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lines");
        fs::write(&path, "one\ntwo\n").unwrap();
        let mut file = GrowingLines::of(&path);
        seen(&mut file);
        fs::write(&path, "one\nsix\nseven\n").unwrap();
        assert!(file.was_cut().unwrap());
        assert_eq!(seen(&mut file), ["1 one", "2 six", "3 seven"]);
        fs::remove_file(&path).unwrap();
        assert!(file.was_cut().unwrap() && seen(&mut file).is_empty());
    }
}
