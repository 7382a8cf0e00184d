//! One data set: its usable records by number.
//!
//! Opening reads every record of the slice once, on all cores. A bad line is an error before the
//! run begins, and unusable records are counted by reason. From then on record `k` never changes.
//! Memory is 12 bytes per record, for its position.

use std::marker::PhantomData;
use std::path::PathBuf;
use std::sync::Arc;

use rayon::prelude::*;

use super::DataError;
use super::columns::Columns;
use super::hub;
use super::locate::{Format, Layout, layout_of_folder, locate, names_id};
use super::part::Part;
use super::shape::Shape;
use super::skips::{Skip, Skips};
use super::split::Split;
use crate::hub::{Hub, HubError};

/// Records that are worth handing to another core.
const SHARE: usize = 64;

/// Selection of a data set and of its records.
#[derive(Clone, Debug, PartialEq)]
pub struct DataSpec {
    /// A file, a folder, or the id of a data set of the hub.
    pub data: PathBuf,
    /// One of several subsets (configurations).
    pub subset: Option<String>,
    /// The split, and which part of it.
    pub split: Split,
    /// The first usable records, at most so many.
    pub max_samples: Option<usize>,
    /// Names of the fields.
    pub columns: Columns,
    /// Name in messages and metrics. Left out: the end of `data`.
    pub name: Option<String>,
    /// Hub, or its cache, from which ids are loaded.
    pub hub: Hub,
}

impl DataSpec {
    /// All of the split `train`.
    pub fn new(data: impl Into<PathBuf>) -> Self {
        DataSpec {
            data: data.into(),
            subset: None,
            split: Split::default(),
            max_samples: None,
            columns: Columns::default(),
            name: None,
            hub: Hub::of_user(),
        }
    }

    /// Name of the data set.
    pub fn name(&self) -> String {
        let end =
            || self.data.file_stem().map_or_else(|| self.data.display().to_string(), |end| end.to_string_lossy().into_owned());
        self.name.clone().unwrap_or_else(end)
    }

    /// Returns the data set's subsets, and the splits of `subset`, by the names of its files. For
    /// an id, the names come from the hub, or from the cache if downloads are off; no data is
    /// downloaded.
    pub fn layout(&self) -> Result<Layout, DataError> {
        match &self.data {
            file if file.is_file() => Ok(Layout::default()),
            folder if folder.is_dir() => layout_of_folder(folder, self.subset.as_deref()),
            id if names_id(id) => hub::layout(&self.hub, &id.to_string_lossy(), self.subset.as_deref()),
            _ => self.check().map(|()| Layout::default()),
        }
    }

    /// Checks that the files exist, without reading them.
    pub fn check(&self) -> Result<(), DataError> {
        self.files().map(drop)
    }

    fn files(&self) -> Result<Vec<(PathBuf, Format)>, DataError> {
        locate(&self.data, self.subset.as_deref(), &self.split.name, self.hub.cache())
    }

    /// Fetches the split's files if `data` is an id of the hub and the cache lacks them.
    ///
    /// # Errors
    ///
    /// [`DataError::NoFile`], [`DataError::Missing`] and [`DataError::Layout`] if there is no such
    /// file, folder, subset or split, [`DataError::Hub`] if the download failed.
    pub fn fetch(&self) -> Result<(), DataError> {
        self.found().map(drop)
    }

    fn found(&self) -> Result<Vec<(PathBuf, Format)>, DataError> {
        let name = self.data.to_string_lossy();
        if self.subset.is_none() && hub::may_be_asked_for(&self.data) {
            hub::list_if_unknown(&self.hub, &name);
        }
        let missing = match self.files() {
            Ok(files) => return Ok(files),
            Err(missing) => missing,
        };
        if !hub::may_be_asked_for(&self.data) || self.hub.is_offline() {
            return Err(missing);
        }
        match hub::fetch(&self.hub, &name, self.subset.as_deref(), &self.split.name) {
            Ok(_) => self.files(),
            // What is here already may be all that is needed to say what is wrong.
            Err(HubError::Remote(_)) if matches!(missing, DataError::Layout { .. } | DataError::Hub(_)) => Err(missing),
            Err(error) => Err(error.into()),
        }
    }
}

/// A data set of `T`. Clones share the index.
#[derive(Clone)]
pub struct DataSet<T> {
    name: String,
    parts: Arc<[Part]>,
    /// Records up to the end of each part.
    ends: Arc<[usize]>,
    columns: Columns,
    skips: Skips,
    fingerprint: u64,
    of: PhantomData<fn() -> T>,
}

impl<T: Shape> DataSet<T> {
    /// Finds and judges the records. An empty data set is refused.
    pub fn open(spec: &DataSpec) -> Result<Self, DataError> {
        Self::open_if(spec, |_| Ok(()))
    }

    /// [`DataSet::open`] with a say in which records are used.
    pub fn open_if(spec: &DataSpec, usable: impl Fn(&T) -> Result<(), Skip> + Sync) -> Result<Self, DataError> {
        let files = spec.found()?;
        let index = |(path, format)| Part::index(path, format, &spec.split.name);
        let mut parts = files.into_iter().map(index).collect::<Result<Vec<_>, _>>()?;
        let slice = spec.split.rows(parts.iter().map(Part::len).sum());
        let mut opening = Opening {
            spec,
            usable: &usable,
            left: spec.max_samples,
            skips: Skips::default(),
            fields: Vec::new(),
            crc: crc32fast::Hasher::new(),
        };
        let (mut before, mut ends, mut all) = (0, Vec::new(), 0);
        for part in &mut parts {
            let len = part.len();
            let places = slice.start.clamp(before, before + len) - before..slice.end.clamp(before, before + len) - before;
            opening.judge(part, places)?;
            before += len;
            all += part.close();
            ends.push(all);
        }
        let Opening { skips, fields, crc, .. } = opening;
        if all == 0 {
            return Err(DataError::Nothing { name: spec.name(), skips, fields });
        }
        let fingerprint = u64::from(crc.finalize()) << 32 ^ all as u64;
        let (parts, ends) = (parts.into(), ends.into());
        Ok(DataSet { name: spec.name(), parts, ends, columns: spec.columns.clone(), skips, fingerprint, of: PhantomData })
    }

    /// A record, read from the disk.
    pub fn get(&self, at: usize) -> Result<T, DataError> {
        let part = self.file_of(at);
        let within = at - part.checked_sub(1).map_or(0, |before| self.ends[before]);
        let part = &self.parts[part];
        let bytes = part.read(within, within + 1)?;
        let read =
            part.parse(&bytes[0]).and_then(|record| T::read(record, &self.columns).map_err(|skip| format!("a record {skip}")));
        // It was usable when it was counted.
        let changed = |problem| DataError::Record {
            file: part.path.clone(),
            line: part.line(within),
            problem: format!("{problem}; the file has changed since it was opened"),
            more: 0,
        };
        read.map_err(changed)
    }

    /// All records, in order.
    pub fn iter(&self) -> impl Iterator<Item = Result<T, DataError>> + '_ {
        (0..self.len()).map(|at| self.get(at))
    }
}

impl<T> DataSet<T> {
    /// Usable records. Never 0: an empty data set is refused.
    #[expect(clippy::len_without_is_empty, reason = "it cannot be empty")]
    pub fn len(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    /// Name of the data set.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Counts of dropped records.
    pub fn skips(&self) -> &Skips {
        &self.skips
    }

    /// In a line: how much there is, and what was left out.
    pub fn describe(&self) -> String {
        let skipped = if self.skips.total() == 0 { String::new() } else { format!("; skipped: {}", self.skips) };
        format!("{}: {} records{skipped}", self.name, self.len())
    }

    /// Index of the file that a record is in.
    pub(crate) fn file_of(&self, at: usize) -> usize {
        self.ends.partition_point(|end| *end <= at)
    }

    /// Differs where the usable records or their order do.
    pub(crate) fn fingerprint(&self) -> u64 {
        self.fingerprint
    }
}

impl<T> std::fmt::Debug for DataSet<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DataSet").field("name", &self.name).field("len", &self.len()).field("skips", &self.skips).finish()
    }
}

/// Results of judging records while a data set opens.
struct Opening<'a, T> {
    spec: &'a DataSpec,
    usable: &'a (dyn Fn(&T) -> Result<(), Skip> + Sync),
    left: Option<usize>,
    skips: Skips,
    fields: Vec<String>,
    crc: crc32fast::Hasher,
}

impl<T: Shape> Opening<'_, T> {
    /// Keeps the usable records among these, as many as are wanted.
    fn judge(&mut self, part: &mut Part, places: std::ops::Range<usize>) -> Result<(), DataError> {
        let mut unjudged = part.unjudged(places, self.left)?;
        while self.left != Some(0) {
            let (from, records) = part.next(&mut unjudged)?;
            if records.is_empty() {
                break;
            }
            self.note_fields(part, records.first());
            let judge = |bytes: &Vec<u8>| {
                let record = part.parse(bytes)?;
                Ok(T::read(record, &self.spec.columns).and_then(|read| (self.usable)(&read)))
            };
            let verdicts: Vec<Result<Result<(), Skip>, String>> = records.par_iter().with_min_len(SHARE).map(judge).collect();
            let mut bad = verdicts.iter().enumerate().filter_map(|(at, verdict)| Some((at, verdict.as_ref().err()?)));
            if let Some((at, problem)) = bad.next() {
                let (line, problem, more) = (part.line_of_place(from + at), problem.clone(), bad.count());
                return Err(DataError::Record { file: part.path.clone(), line, problem, more });
            }
            for ((place, bytes), verdict) in (from..).zip(&records).zip(verdicts) {
                match verdict {
                    _ if self.left == Some(0) => break,
                    Ok(Err(skip)) => self.skips.count(skip),
                    _ => {
                        part.keep(place, bytes)?;
                        self.left.iter_mut().for_each(|left| *left -= 1);
                        self.crc.update(bytes);
                    }
                }
            }
        }
        Ok(())
    }

    fn note_fields(&mut self, part: &Part, first: Option<&Vec<u8>>) {
        if self.fields.is_empty()
            && let Some(Ok(record)) = first.map(|bytes| part.parse(bytes))
        {
            self.fields = record.keys().cloned().collect();
        }
    }
}
