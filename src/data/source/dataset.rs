//! One data set: its usable records by number.
//!
//! Opening reads every record of the slice once, on all cores. A bad line is an error before the
//! run begins, and unusable records are counted by reason. From then on record `k` never changes.
//! Memory is 12 bytes per record, for its position.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::hub;
use super::locate::{Format, Listing, locate, names_id};
use super::mixture::Share;
use super::part::Part;
use super::shape::{Columns, Shape};
use super::split::Split;
use crate::data::DataError;
use crate::hub::{Hub, HubError};
use crate::util::untrusted;

/// Selection of a data set and of its records.
#[derive(Clone, Debug, PartialEq)]
pub struct DataSpec {
    /// A file, a folder, or the id of a data set of the hub.
    pub data: PathBuf,
    /// One of several subsets (configurations).
    pub subset: Option<String>,
    /// Split, optionally with a range of records: `train`, `train[:10%]`, `test[100:200]`,
    /// `train[-50:]`. A percentage is rounded to the nearest record.
    pub split: String,
    /// The first usable records, at most so many.
    pub max_samples: Option<usize>,
    /// Repetitions of each record in an epoch of a [`Mixed`](super::Mixed) stream.
    pub repeat: u64,
    /// Share of a stream relative to the other data sets' weights, instead of `repeat`: all of them
    /// have a weight, or none.
    pub weight: Option<f64>,
    /// Names of the fields.
    pub columns: Columns,
    /// Name in messages and metrics. Left out: the end of `data`, without the revision of an id.
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
            split: "train".to_owned(),
            max_samples: None,
            repeat: 1,
            weight: None,
            columns: Columns::default(),
            name: None,
            hub: Hub::of_user(),
        }
    }

    /// Name of the data set. That of an id has no revision, so that a run which pins the id keeps the name.
    pub fn name(&self) -> String {
        let end = || {
            let shown = self.data.to_string_lossy();
            let data: &str = if names_id(&self.data) { shown.split('@').next().unwrap_or(&shown) } else { &shown };
            Path::new(data).file_stem().map_or_else(|| data.to_owned(), |end| end.to_string_lossy().into_owned())
        };
        self.name.clone().unwrap_or_else(end)
    }

    pub(super) fn share(&self) -> Share {
        self.weight.map_or(Share::Repeat(self.repeat), Share::Weight)
    }

    /// Returns the subsets (configurations); none if there is no choice.
    /// For an id, the names come from the hub, or from the cache if downloads are off; no data is
    /// downloaded.
    pub fn subsets(&self) -> Result<Vec<String>, DataError> {
        Ok(self.listing()?.subsets())
    }

    /// Returns the splits that the names of the subset's files say, like [`DataSpec::subsets`].
    pub fn splits(&self) -> Result<Vec<String>, DataError> {
        Ok(self.listing()?.splits(self.subset.as_deref()))
    }

    fn listing(&self) -> Result<Listing, DataError> {
        match &self.data {
            folder if folder.is_dir() => Listing::of_folder(folder),
            id if names_id(id) => hub::listing(&self.hub, &id.to_string_lossy()),
            _ => self.check().map(|()| Listing::default()),
        }
    }

    /// Checks that the files exist, without reading them.
    pub fn check(&self) -> Result<(), DataError> {
        self.files().map(drop)
    }

    pub(super) fn files(&self) -> Result<Vec<(PathBuf, Format)>, DataError> {
        locate(&self.data, self.subset.as_deref(), &self.split.parse::<Split>()?.name, self.hub.cache())
    }

    /// Fetches the split's files if `data` is an id of the hub and the cache lacks them.
    ///
    /// # Errors
    ///
    /// [`DataError::NotFound`] and [`DataError::Layout`] if there is no such file, folder, subset or
    /// split, [`DataError::Hub`] if the download failed.
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
        match hub::fetch(&self.hub, &name, self.subset.as_deref(), &self.split.parse::<Split>()?.name) {
            Ok(_) => self.files(),
            // What is here already may be all that is needed to say what is wrong.
            Err(HubError::Remote(_)) if matches!(missing, DataError::Layout { .. } | DataError::Hub(_)) => Err(missing),
            Err(error) => Err(error.into()),
        }
    }

    /// The error of a data set without a usable record.
    pub(super) fn nothing(&self, skips: &Skips, files: &[(PathBuf, Format)]) -> DataError {
        let split = self.split.parse().map_or_else(|_| String::new(), |split: Split| split.name);
        let fields = |(path, format): &(PathBuf, Format)| Some(Part::index(path.clone(), *format, &split).ok()?.fields());
        // Of an empty file there are none.
        let fields = files.iter().filter_map(fields).find(|fields| !fields.is_empty()).unwrap_or_default().join(", ");
        let why = match skips.total() {
            0 => "it is empty (or the slice is)".to_owned(),
            _ => format!(
                "all records were skipped: {skips}. Fields of the first: {fields}. If others are meant, name them in `columns`, as in \
                 columns = {{ prompt = \"query\", answer = \"reply\" }}"
            ),
        };
        DataError::Unusable(format!("{} holds nothing to use: {why}", self.name()))
    }
}

/// Skipped records by reason: a few words, the same for all records of its kind. Details of the
/// first record follow in messages.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Skips(BTreeMap<String, Skipped>);

/// Number of records, and details of the first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Skipped {
    count: u64,
    example: Option<String>,
}

/// Largest number of reasons that are counted separately.
const REASONS: usize = 20;
/// Longest details of a record in messages, in characters.
const EXAMPLE: usize = 200;

impl Skips {
    /// Counts one more record. Details of this record follow the reason after `: `.
    pub fn count(&mut self, reason: String) {
        let (reason, example) = reason.split_once(": ").map_or((&*reason, None), |(reason, example)| (reason, Some(example)));
        let known = self.0.len() < REASONS || self.0.contains_key(reason);
        let (reason, example) = if known { (reason, example) } else { ("for other reasons", None) };
        let skipped = self.0.entry(reason.to_owned()).or_default();
        skipped.count += 1;
        if skipped.count == 1 {
            skipped.example = example.map(|example| untrusted::line_of(example, EXAMPLE));
        }
    }

    /// All of them.
    pub fn total(&self) -> u64 {
        self.0.values().map(|skipped| skipped.count).sum()
    }

    /// Each reason with its count.
    pub fn iter(&self) -> impl Iterator<Item = (&str, u64)> {
        self.0.iter().map(|(reason, skipped)| (reason.as_str(), skipped.count))
    }
}

impl fmt::Display for Skips {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let line = |(reason, Skipped { count, example }): (&String, &Skipped)| match example {
            Some(example) => format!("{count} {reason} (as {example})"),
            None => format!("{count} {reason}"),
        };
        f.write_str(&self.0.iter().map(line).collect::<Vec<_>>().join(", "))
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

    /// [`DataSet::open`] with a say in which records are used: an error is the reason to skip one.
    pub fn open_if(spec: &DataSpec, usable: impl Fn(&T) -> Result<(), String> + Sync) -> Result<Self, DataError> {
        let (split, files): (Split, _) = (spec.split.parse()?, spec.found()?);
        let index = |(path, format): &(PathBuf, Format)| Part::index(path.clone(), *format, &split.name);
        let mut parts = files.iter().map(index).collect::<Result<Vec<_>, _>>()?;
        let slice = split.rows(parts.iter().map(Part::len).sum());
        let (mut left, mut skips, mut crc) = (spec.max_samples, Skips::default(), crc32fast::Hasher::new());
        let (mut before, mut ends, mut all) = (0, Vec::new(), 0);
        for part in &mut parts {
            let inside = |row: usize| row.clamp(before, before + part.len()) - before;
            let places = inside(slice.start)..inside(slice.end);
            before += part.len();
            let judge = |record| Ok(T::read(record, &spec.columns).and_then(|read| usable(&read)));
            part.judge(places, &mut left, judge, |part, place, bytes, verdict| {
                match verdict {
                    Ok(()) => {
                        crc.update(bytes);
                        part.keep(place, bytes)?;
                    }
                    Err(skip) => skips.count(skip),
                }
                Ok(())
            })?;
            all += part.close();
            ends.push(all);
        }
        if all == 0 {
            return Err(spec.nothing(&skips, &files));
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
        let changed = |problem| {
            let problem = format!("{problem}; the file has changed since it was opened");
            DataError::in_line(&part.path, part.line(within), problem)
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

impl<T> fmt::Debug for DataSet<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DataSet").field("name", &self.name).field("len", &self.len()).field("skips", &self.skips).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_above_the_limit_are_counted_together() {
        let mut skips = Skips::default();
        (0..50).for_each(|n| skips.count(format!("for reason {n}")));
        let others = skips.iter().find(|(reason, _)| *reason == "for other reasons");
        assert_eq!((skips.iter().count(), skips.total(), others), (REASONS + 1, 50, Some(("for other reasons", 30))));
    }
}
