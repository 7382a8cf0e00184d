//! One file's records by number, without holding them: 12 bytes of index each.
//!
//! Rows are read by position and not through a memory map: pages count against the machine's cache
//! instead of this process, and a file that is truncated during a run is an error instead of a
//! crash. Rows of Parquet have no byte position: kept rows are copied to a spool, one row group at
//! a time, while they are judged.

use std::io::{BufWriter, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use memchr::memchr_iter;
use parking_lot::Mutex;
use rayon::prelude::*;
use serde_json::{Map, Value};
use tempfile::SpooledTempFile;

use super::locate::Format;
use super::parquet;
use super::scan;
use crate::data::DataError;
use crate::data::jsonl::{parse_line, parse_object};
use crate::util::reading;

/// Bytes per read while lines are searched.
const BLOCK: usize = 8 << 20;
/// Records judged together: memory for their bytes, and work for all cores.
const TOGETHER: usize = 1 << 16;
/// Bytes of records judged together, unless a single one has more.
const BYTES_TOGETHER: u64 = 16 << 20;
/// Records that are worth handing to another core.
const SHARE: usize = 64;
/// Bytes of a copy of Parquet's rows that are held in memory, before a temporary file takes them.
const IN_MEMORY: usize = 64 << 20;
/// The byte-order mark.
const MARK: &[u8] = "\u{feff}".as_bytes();

/// A file and where its records begin and how long they are.
pub(super) struct Part {
    pub(super) path: PathBuf,
    format: Format,
    start: Vec<u64>,
    len: Vec<u32>,
    kept: usize,
    /// Rows of a Parquet file.
    rows: usize,
    /// Row number of each of its kept records.
    row: Vec<u32>,
    /// Copy of its kept records, unpacked, and how many bytes it has.
    copy: Mutex<BufWriter<SpooledTempFile>>,
    copied: u64,
}

impl Part {
    fn new(path: PathBuf, format: Format) -> Self {
        let buffer = if format == Format::Parquet { 8 << 10 } else { 0 };
        let copy = Mutex::new(BufWriter::with_capacity(buffer, SpooledTempFile::new(IN_MEMORY)));
        Part { path, format, start: Vec::new(), len: Vec::new(), kept: 0, rows: 0, row: Vec::new(), copy, copied: 0 }
    }

    /// Finds the records. Nothing of them is looked at but where they end.
    pub(super) fn index(path: PathBuf, format: Format, split: &str) -> Result<Self, DataError> {
        let mut part = Part::new(path, format);
        match format {
            Format::Json => match scan::records(&part.path, split)? {
                Some(records) => records.iter().try_for_each(|record| part.push(record.start, record.len))?,
                None => return Part::index(part.path, Format::JsonLines, split),
            },
            Format::JsonLines | Format::Text => part.index_lines()?,
            Format::Parquet => part.rows = parquet::count(&part.path)?,
        }
        Ok(part)
    }

    /// Samples records of a file of lines: those in the first `head` bytes, and those in `bytes`
    /// bytes at each of `places` positions spread over the rest. Also estimates the number of
    /// records from their mean length.
    pub(super) fn sample(path: PathBuf, format: Format, head: u64, places: u64, bytes: u64) -> Result<(Self, f64), DataError> {
        let mut part = Part::new(path, format);
        let failed = DataError::read(&part.path);
        let file = reading::open(&part.path).map_err(&failed)?;
        let size = file.metadata().map_err(&failed)?.len();
        let (mut seen, mut read, rest) = (0, 0, size.saturating_sub(head + bytes));
        let spread = (1..=places).map(|at| head + rest * at / places).filter(|at| *at < size);
        for (at, wanted) in std::iter::once((0, head)).chain(spread.map(|at| (at, bytes))) {
            // Stretches that overlap would be counted twice.
            let at = at.max(read);
            let mut block = vec![0; wanted.min(size - at) as usize];
            file.read_exact_at(&mut block, at).map_err(&failed)?;
            read = at + block.len() as u64;
            // Without the end of a line that began before, and the beginning of one that ends later.
            let begin = if at == 0 { 0 } else { memchr::memchr(b'\n', &block).map_or(block.len(), |end| end + 1) };
            let end = if read == size { block.len() } else { memchr::memrchr(b'\n', &block).map_or(0, |end| end + 1) };
            let lines = &block[begin..end.max(begin)];
            part.push_lines(lines, at + begin as u64)?;
            seen += lines.len() as u64;
        }
        if part.start.is_empty() {
            // Lines longer than what was read.
            let whole = Part::index(part.path, format, "")?;
            let records = whole.len() as f64;
            return Ok((whole, records));
        }
        let records = part.start.len() as f64 * size as f64 / seen.max(1) as f64;
        Ok((part, records))
    }

    /// The fields of its first record.
    pub(super) fn fields(&self) -> Vec<String> {
        let first = match self.format {
            Format::Parquet => parquet::Rows::from(&self.path, 0).and_then(|mut rows| rows.next(1, 1)),
            _ => self.read(0, self.len().min(1)),
        };
        let record = first.ok().and_then(|records| self.parse(records.first()?).ok());
        record.map_or_else(Vec::new, |record| record.keys().cloned().collect())
    }

    /// Number of records, before any is kept.
    pub(super) fn len(&self) -> usize {
        if self.format == Format::Parquet { self.rows } else { self.start.len() }
    }

    /// Judges the records of these places on all cores, until `left` of them are usable, and gives
    /// each to `each` in order: with its place, its bytes, and the reason to leave it out. An error of
    /// `judge` ends it, with the record's line.
    pub(super) fn judge(
        &mut self,
        places: Range<usize>,
        left: &mut Option<usize>,
        judge: impl Fn(Map<String, Value>) -> Result<Result<(), String>, String> + Sync,
        mut each: impl FnMut(&mut Part, usize, &[u8], Result<(), String>) -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        let Range { start: mut from, end } = places;
        // Doubled after every read, so that a user of few records does not pay for many.
        let mut next = left.unwrap_or(TOGETHER).clamp(1, TOGETHER);
        let mut rows = (self.format == Format::Parquet).then(|| parquet::Rows::from(&self.path, from)).transpose()?;
        while from < end && *left != Some(0) {
            let most = end.min(from + next);
            next = TOGETHER.min(2 * next);
            let records = match &mut rows {
                Some(rows) => rows.next(most - from, BYTES_TOGETHER)?,
                None => {
                    let mut bytes = 0;
                    let fits = |at: &usize| {
                        bytes += u64::from(self.len[*at]);
                        bytes <= BYTES_TOGETHER || *at == from
                    };
                    let count = (from..most).take_while(fits).count();
                    self.read(from, from + count)?
                }
            };
            if records.is_empty() {
                break;
            }
            let verdict = |bytes: &Vec<u8>| judge(self.parse(bytes)?);
            let verdicts: Vec<Result<_, String>> = records.par_iter().with_min_len(SHARE).map(verdict).collect();
            for (at, (bytes, verdict)) in records.iter().zip(&verdicts).enumerate() {
                if *left == Some(0) {
                    break;
                }
                let verdict = verdict.clone().map_err(|problem| {
                    let more = match verdicts[at + 1..].iter().filter(|verdict| verdict.is_err()).count() {
                        0 => String::new(),
                        more => format!(" (and {more} more bad records nearby)"),
                    };
                    DataError::in_line(&self.path, self.line_of_place(from + at), format!("{problem}{more}"))
                })?;
                if verdict.is_ok() {
                    left.iter_mut().for_each(|left| *left -= 1);
                }
                each(self, from + at, bytes, verdict)?;
            }
            from += records.len();
        }
        Ok(())
    }

    /// Keeps the record of this place, after those that were kept before.
    pub(super) fn keep(&mut self, place: usize, record: &[u8]) -> Result<(), DataError> {
        if self.format == Format::Parquet {
            self.copy.get_mut().write_all(record).map_err(DataError::read(&self.path))?;
            let row = u32::try_from(place).map_err(|_| DataError::invalid(&self.path, "more than 4 billion records"))?;
            self.row.push(row);
            self.push(self.copied, record.len() as u64)?;
            self.copied += record.len() as u64;
        } else {
            (self.start[self.kept], self.len[self.kept]) = (self.start[place], self.len[place]);
        }
        self.kept += 1;
        Ok(())
    }

    /// Forgets what was not kept. How many were.
    pub(super) fn close(&mut self) -> usize {
        self.start.truncate(self.kept);
        self.len.truncate(self.kept);
        self.start.shrink_to_fit();
        self.len.shrink_to_fit();
        self.kept
    }

    /// Returns the bytes of records `from..to`, each separately; adjacent records share one read.
    pub(super) fn read(&self, from: usize, to: usize) -> Result<Vec<Vec<u8>>, DataError> {
        let failed = DataError::read(&self.path);
        let file = (self.format != Format::Parquet).then(|| reading::open(&self.path)).transpose().map_err(&failed)?;
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
            match &file {
                Some(file) => file.read_exact_at(&mut block, begin),
                None => {
                    let mut copy = self.copy.lock();
                    copy.seek(SeekFrom::Start(begin)).and_then(|_| copy.get_mut().read_exact(&mut block))
                }
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
            // The first record begins after the byte-order mark.
            Format::JsonLines => parse_line(bytes, 0)?.ok_or_else(|| "an empty record".to_owned()),
            Format::Json | Format::Parquet => parse_object(bytes),
        }
    }

    /// Line number of a kept record, from 1; of Parquet its row number. Reads the file up to there,
    /// so it is for errors.
    pub(super) fn line(&self, at: usize) -> usize {
        self.row.get(at).map_or_else(|| self.line_of_place(at), |row| *row as usize + 1)
    }

    /// Line number of a place among all records, while they are judged.
    pub(super) fn line_of_place(&self, at: usize) -> usize {
        if self.format == Format::Parquet {
            return at + 1;
        }
        let before = self.start.get(at).copied().unwrap_or(0);
        let lines = || {
            let mut file = reading::open(&self.path)?.take(before);
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

    fn push(&mut self, start: u64, len: u64) -> Result<(), DataError> {
        let len = u32::try_from(len).map_err(|_| DataError::invalid(&self.path, "a single record is longer than 4 GiB"))?;
        self.start.push(start);
        self.len.push(len);
        Ok(())
    }

    fn index_lines(&mut self) -> Result<(), DataError> {
        let failed = DataError::read(&self.path);
        let file = reading::open(&self.path).map_err(&failed)?;
        let size = file.metadata().map_err(&failed)?.len();
        let (mut block, mut at) = (vec![0; BLOCK], 0);
        while at < size {
            let wanted = (size - at).min(block.len() as u64) as usize;
            file.read_exact_at(&mut block[..wanted], at).map_err(&failed)?;
            let last = at + wanted as u64 == size;
            let whole = if last { wanted } else { memchr::memrchr(b'\n', &block[..wanted]).map_or(0, |end| end + 1) };
            self.push_lines(&block[..whole], at)?;
            // A line that is longer than a block makes the block longer.
            if whole == 0 {
                block.resize(block.len() * 2, 0);
            }
            at += whole as u64;
        }
        Ok(())
    }

    /// Indexes the lines of `block`, which is the file from byte `at` on, but for blank ones.
    fn push_lines(&mut self, block: &[u8], at: u64) -> Result<(), DataError> {
        let mut begin = if at == 0 && block.starts_with(MARK) { MARK.len() } else { 0 };
        for end in memchr_iter(b'\n', block).chain([block.len()]) {
            let line = &block[begin.min(end)..end];
            if !line.iter().all(u8::is_ascii_whitespace) {
                self.push(at + begin as u64, line.len() as u64)?;
            }
            begin = end + 1;
        }
        Ok(())
    }
}
