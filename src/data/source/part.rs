//! One file's records by number, without holding them: 12 bytes of index each.
//!
//! Rows are read where they lie, by position, rather than through a map of the file: what was read once then counts against the machine's
//! cache and not against this process, and a file that is cut short under a run is an error and not a crash.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use memchr::memchr_iter;
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use super::DataError;
use super::locate::Format;
use crate::data::jsonl::parse_line;

/// Read at once while lines are sought.
const BLOCK: usize = 8 << 20;

/// Where the bytes lie.
pub(super) enum Bytes {
    /// In the file itself.
    File,
    /// In a copy of this process's own, made from another format.
    #[cfg(feature = "parquet")]
    Copy(super::spool::Spool),
}

/// A file and where its records begin and how long they are.
pub(super) struct Part {
    pub(super) path: PathBuf,
    pub(super) format: Format,
    bytes: Bytes,
    start: Vec<u64>,
    len: Vec<u32>,
    /// Of the kept records, their place among all, where they have no lines.
    row: Vec<u32>,
}

impl Part {
    /// Finds the records. Nothing of them is looked at but where they end, unless they stand in a list.
    pub(super) fn index(path: PathBuf, format: Format, split: &str) -> Result<Self, DataError> {
        let format = if format == Format::Json && is_lines(&path)? { Format::JsonLines } else { format };
        let mut part = Part { path, format, bytes: Bytes::File, start: Vec::new(), len: Vec::new(), row: Vec::new() };
        match format {
            Format::JsonLines | Format::Text => part.index_lines()?,
            Format::Json => part.index_list(split)?,
            Format::Parquet => part.index_copy()?,
        }
        Ok(part)
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.start.len()
    }

    /// Keeps the records of these places, ascending.
    pub(super) fn keep(&mut self, places: &[u32]) {
        let lines = matches!(self.format, Format::JsonLines | Format::Text);
        for (to, &from) in places.iter().enumerate() {
            (self.start[to], self.len[to]) = (self.start[from as usize], self.len[from as usize]);
        }
        self.start.truncate(places.len());
        self.len.truncate(places.len());
        self.start.shrink_to_fit();
        self.len.shrink_to_fit();
        if !lines {
            self.row = places.to_vec();
        }
    }

    /// The bytes of records `from..to`, each with its own, read at once as far as they lie together.
    pub(super) fn read(&self, from: usize, to: usize) -> Result<Vec<Vec<u8>>, DataError> {
        let failed = DataError::file(&self.path);
        let file = File::open(&self.path).map_err(&failed)?;
        let mut records = Vec::with_capacity(to - from);
        let mut at = from;
        while at < to {
            let begin = self.start[at];
            let mut end = begin;
            let first = at;
            while at < to && self.start[at] + u64::from(self.len[at]) - begin <= BLOCK as u64 || at == first {
                end = self.start[at] + u64::from(self.len[at]);
                at += 1;
            }
            let mut block = vec![0; (end - begin) as usize];
            match &self.bytes {
                Bytes::File => file.read_exact_at(&mut block, begin),
                #[cfg(feature = "parquet")]
                Bytes::Copy(copy) => copy.read_at(&mut block, begin),
            }
            .map_err(&failed)?;
            records.extend((first..at).map(|at| {
                let offset = (self.start[at] - begin) as usize;
                block[offset..offset + self.len[at] as usize].to_vec()
            }));
        }
        Ok(records)
    }

    /// A record, from its bytes; what is wrong with it otherwise.
    pub(super) fn parse(&self, bytes: &[u8]) -> Result<Map<String, Value>, String> {
        match self.format {
            Format::Text => {
                let text = std::str::from_utf8(bytes).map_err(|error| format!("not UTF-8 ({error}); save the file as UTF-8"))?;
                Ok(Map::from_iter([("text".to_owned(), text.trim_end_matches('\r').into())]))
            }
            // The byte-order mark is behind the first record's beginning already.
            _ => parse_line(bytes, 0)?.ok_or_else(|| "an empty record".to_owned()),
        }
    }

    /// The line that a record stands on, from 1; of other formats its row. Costs reading the file up to there: for errors.
    pub(super) fn line(&self, at: usize) -> usize {
        if self.format == Format::Parquet {
            return self.row.get(at).map_or(at, |row| *row as usize) + 1;
        }
        let before = self.start.get(at).copied().unwrap_or(0);
        let lines = || {
            let mut file = File::open(&self.path)?.take(before);
            let (mut block, mut lines) = (vec![0; BLOCK], 1);
            loop {
                match file.read(&mut block)? {
                    0 => return Ok(lines),
                    read => lines += memchr_iter(b'\n', &block[..read]).count(),
                }
            }
        };
        lines().unwrap_or_else(|_: std::io::Error| at + 1)
    }

    fn push(&mut self, start: u64, len: usize) -> Result<(), DataError> {
        let len = u32::try_from(len).map_err(|_| DataError::format(&self.path, "a single record is longer than 4 GiB"))?;
        self.start.push(start);
        self.len.push(len);
        Ok(())
    }

    fn index_lines(&mut self) -> Result<(), DataError> {
        let failed = DataError::file(&self.path);
        let file = File::open(&self.path).map_err(&failed)?;
        let size = file.metadata().map_err(&failed)?.len();
        let (mut block, mut at) = (vec![0; BLOCK], 0);
        while at < size {
            let wanted = (size - at).min(block.len() as u64) as usize;
            file.read_exact_at(&mut block[..wanted], at).map_err(&failed)?;
            let mut begin = if at == 0 && block[..wanted].starts_with("\u{feff}".as_bytes()) { 3 } else { 0 };
            for end in memchr_iter(b'\n', &block[..wanted]) {
                self.push_line(&block[begin..end], at + begin as u64)?;
                begin = end + 1;
            }
            if at + wanted as u64 == size {
                self.push_line(&block[begin..wanted], at + begin as u64)?;
                break;
            }
            // A line that is longer than a block makes the block longer.
            if begin == 0 {
                block.resize(block.len() * 2, 0);
            }
            at += begin as u64;
        }
        Ok(())
    }

    fn push_line(&mut self, line: &[u8], start: u64) -> Result<(), DataError> {
        if line.iter().all(u8::is_ascii_whitespace) { Ok(()) } else { self.push(start, line.len()) }
    }

    /// `[{…}, …]`, or `{"data": [{…}, …], …}` with the split's name or a usual one for the list; another object is one record.
    fn index_list(&mut self, split: &str) -> Result<(), DataError> {
        let text = std::fs::read_to_string(&self.path).map_err(DataError::file(&self.path))?;
        let text = text.as_str();
        let refuse = |error: serde_json::Error| DataError::format(&self.path, format!("not JSON: {error}"));
        let whole: &RawValue = serde_json::from_str(text.trim_start_matches('\u{feff}')).map_err(refuse)?;
        // Slices of the text, so that their places are those in the file.
        let place = |record: &RawValue| (record.get().as_ptr() as usize - text.as_ptr() as usize, record.get().len());
        let list = if whole.get().starts_with('{') {
            let fields: std::collections::BTreeMap<String, &RawValue> = serde_json::from_str(whole.get()).map_err(refuse)?;
            let usual = [split, "data", "rows", "examples", "instances", "records"];
            let list = usual.iter().find_map(|name| fields.get(*name).filter(|value| value.get().starts_with('[')));
            list.map(|list| list.get())
        } else {
            Some(whole.get())
        };
        let records: Vec<&RawValue> = list.map_or(Ok(vec![whole]), serde_json::from_str).map_err(refuse)?;
        let found: Vec<_> = records.into_iter().map(place).collect();
        found.into_iter().try_for_each(|(start, len)| self.push(start as u64, len))
    }

    #[cfg(feature = "parquet")]
    fn index_copy(&mut self) -> Result<(), DataError> {
        let mut copy = super::spool::Spool::default();
        let path = self.path.clone();
        super::parquet::rows(&path, |record| {
            let start = copy.len();
            copy.append(&record).map_err(DataError::file(&path))?;
            self.push(start, record.len())
        })?;
        self.bytes = Bytes::Copy(copy);
        Ok(())
    }

    #[cfg(not(feature = "parquet"))]
    fn index_copy(&mut self) -> Result<(), DataError> {
        let problem =
            "this program was built without Parquet; build it with the feature `parquet`, or convert the file to JSON lines";
        Err(DataError::format(&self.path, problem))
    }
}

/// Whether a `.json` file holds an object a line: a first line that is whole, and more behind it.
fn is_lines(path: &Path) -> Result<bool, DataError> {
    use std::io::{BufRead, BufReader};
    let mut lines = BufReader::new(File::open(path).map_err(DataError::file(path))?);
    let mut first = Vec::new();
    lines.read_until(b'\n', &mut first).map_err(DataError::file(path))?;
    let more = !lines.fill_buf().map_err(DataError::file(path))?.is_empty();
    Ok(more && parse_line(&first, 1).is_ok_and(|record| record.is_some()))
}
