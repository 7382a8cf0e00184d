//! Index of a rollout file: a few numbers and the offset of every line. Memory: 64 bytes a sample.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

use anyhow::{Context, Result};
use rollflow::data::Status;
use rollflow::observe::logs::Rollout;
use serde_json::{Value, json};

use super::SampleKey;
use crate::run::growing::GrowingLines;

/// Samples that a reader's histograms are made of.
const SKETCHED: usize = 1200;

/// A line of the file.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    at: u64,
    bytes: u32,
    pub part: u32,
    pub step: u64,
    pub group: u64,
    pub index: u32,
    /// Sampled tokens.
    pub length: u32,
    /// NaN without a reward.
    pub reward: f64,
    pub status: Status,
    /// Place in [`SampleIndex::sources`].
    pub source: u16,
}

/// Index of a run's samples until now.
#[derive(Clone, Debug)]
pub struct SampleIndex {
    lines: GrowingLines,
    pub entries: Vec<Entry>,
    /// Data sets of the prompts; the empty name is none.
    pub sources: Vec<String>,
}

impl SampleIndex {
    /// Index of the run in `folder`, of which nothing is read.
    pub fn of(folder: &Path) -> Self {
        SampleIndex { lines: GrowingLines::of(folder.join("rollouts.jsonl")), entries: Vec::new(), sources: Vec::new() }
    }

    /// Reads what is new. After a resume that cut off samples it reads all. A damaged line is no sample.
    pub fn refresh(&mut self) -> Result<()> {
        let SampleIndex { lines, entries, sources } = self;
        if lines.was_cut()? {
            entries.clear();
            sources.clear();
        }
        lines.each_new(|line| {
            if let Ok(row) = Rollout::without_columns(line.bytes) {
                let source = source_of(&row);
                let known = sources.iter().position(|known| known == source);
                let source = known.unwrap_or_else(|| {
                    sources.push(source.to_owned());
                    sources.len() - 1
                });
                entries.push(Entry {
                    at: line.at,
                    bytes: line.bytes.len() as u32,
                    part: row.part,
                    step: row.step,
                    group: row.group,
                    index: row.index,
                    length: row.versions.generated() as u32,
                    reward: row.reward.unwrap_or(f64::NAN),
                    status: row.status,
                    source: source as u16,
                });
            }
            Ok(())
        })
    }

    /// Opens the file, to read lines of entries.
    pub fn open(&self) -> Result<File> {
        File::open(self.lines.path()).with_context(|| format!("reading {}", self.lines.path().display()))
    }

    /// Lines of the group that `key` is in.
    pub fn group(&self, key: SampleKey) -> impl Iterator<Item = &Entry> {
        self.entries.iter().filter(move |entry| (entry.step, entry.group) == (key.step, key.group))
    }

    /// Extent of the samples, for a reader's filters, and about a thousand of them as
    /// `[step, reward, length]`.
    pub fn sketch(&self) -> Value {
        let extent = |of: fn(&Entry) -> f64| {
            let finite = self.entries.iter().map(of).filter(|value| value.is_finite());
            finite.fold(None, |range: Option<[f64; 2]>, value| {
                let [low, high] = range.unwrap_or([value; 2]);
                Some([low.min(value), high.max(value)])
            })
        };
        let every = self.entries.len().div_ceil(SKETCHED).max(1);
        let rows: Vec<Value> =
            self.entries.iter().step_by(every).map(|entry| json!([entry.step, entry.reward, entry.length])).collect();
        json!({
            "step": extent(|entry| entry.step as f64), "reward": extent(|entry| entry.reward),
            "length": extent(|entry| f64::from(entry.length)),
            "sources": self.sources.iter().filter(|source| !source.is_empty()).collect::<Vec<_>>(), "rows": rows,
        })
    }
}

impl Entry {
    /// Reads the line from the index's file, without its columns by token. `None` if a resume has
    /// replaced it since.
    pub fn row(&self, file: &mut File) -> Option<Rollout> {
        Rollout::without_columns(&self.line(file)?).ok()
    }

    /// Reads the whole line.
    pub fn rollout(&self, file: &mut File) -> Option<Rollout> {
        serde_json::from_slice(&self.line(file)?).ok()
    }

    fn line(&self, file: &mut File) -> Option<Vec<u8>> {
        let mut line = vec![0; self.bytes as usize];
        file.seek(SeekFrom::Start(self.at)).and_then(|_| file.read_exact(&mut line)).ok()?;
        Some(line)
    }
}

/// Data set of a row's prompt, also in files that have it in the metadata alone.
fn source_of(row: &Rollout) -> &str {
    let given = || row.metadata.get("source").and_then(Value::as_str).unwrap_or_default();
    if row.source.is_empty() { given() } else { &row.source }
}
