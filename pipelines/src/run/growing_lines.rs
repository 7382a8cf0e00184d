//! Files of a run that grow by lines, for readers that follow them.

use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind, Seek, SeekFrom};
use std::path::PathBuf;

use anyhow::{Context, Result};

/// A file that grows by lines, and how much of it was read, in bytes.
pub struct GrowingLines {
    path: PathBuf,
    read: u64,
}

impl GrowingLines {
    /// The lines of a file, none of which is seen yet.
    pub fn new(path: PathBuf) -> Self {
        GrowingLines { path, read: 0 }
    }

    /// The lines of the last `bytes` of a file, and what follows. The first may lack its beginning.
    pub fn of_end(path: PathBuf, bytes: u64) -> Self {
        let read = path.metadata().map_or(0, |metadata| metadata.len().saturating_sub(bytes));
        GrowingLines { path, read }
    }

    /// Returns true if a line was seen.
    pub fn has_lines(&self) -> bool {
        self.read > 0
    }

    /// Calls `see` with each whole line that was not seen before. A missing file has no lines. One
    /// that a resume has cut off is read from its end.
    pub fn each_new(&mut self, mut see: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
        let reading = || format!("reading {}", self.path.display());
        let mut file = match File::open(&self.path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            opened => opened.with_context(reading)?,
        };
        self.read = self.read.min(file.metadata().with_context(reading)?.len());
        file.seek(SeekFrom::Start(self.read)).with_context(reading)?;
        let (mut file, mut line) = (BufReader::new(file), Vec::new());
        loop {
            line.clear();
            let length = file.read_until(b'\n', &mut line).with_context(reading)?;
            if !line.ends_with(b"\n") {
                return Ok(());
            }
            self.read += length as u64;
            if !line.trim_ascii().is_empty() {
                see(&line)?;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_seen_once_when_they_are_whole_also_after_the_file_was_cut_off() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lines");
        let mut lines = GrowingLines::new(path.clone());
        let mut new = |text: Option<&str>| {
            text.into_iter().for_each(|text| std::fs::write(&path, text).unwrap());
            let mut seen = Vec::new();
            let see = |line: &[u8]| {
                seen.push(String::from_utf8_lossy(line).trim().to_owned());
                Ok(())
            };
            lines.each_new(see).unwrap();
            seen.join(" ")
        };
        assert_eq!(new(None), "", "there is no file yet");
        assert_eq!(new(Some("one\ntw")), "one");
        assert_eq!(new(Some("one\ntwo\n\nthree\n")), "two three");
        assert_eq!(new(Some("one\n")), "", "a resume cut it off");
        assert_eq!(new(Some("one\nnext\n")), "next");
        let mut end = GrowingLines::of_end(path, 7);
        let mut seen = Vec::new();
        end.each_new(|line| {
            seen.push(line.to_vec());
            Ok(())
        })
        .unwrap();
        assert_eq!(seen, [b"e\n".to_vec(), b"next\n".to_vec()]);
    }
}
