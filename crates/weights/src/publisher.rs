//! Publishing: a folder becomes an artefact, whole or as a delta to the one before.
//!
//! Objects come first and the manifest last, by a conditional put: a reader sees a complete artefact
//! or none. A process that writes claims a number first, and one with a later number has taken over.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use rayon::prelude::*;

use super::manifest::{Chunk, FORMAT, FileEntry, Id, Listed, Manifest, ObjectEntry, Part, Stored, sha256};
use super::source::{SourceFile, SourcePart};
use super::store::Store;
use super::{WeightsError, delta};

/// Folder of the manifests.
pub(crate) const MANIFESTS: &str = "manifests";
/// Folder of the objects, one below it per artefact.
pub(crate) const DATA: &str = "data";
/// Folder of the writers' claims.
const WRITERS: &str = "writers";

/// Bytes of a chunk, which is compared, encoded and verified as one.
const CHUNK: u64 = 16 << 20;
/// Bytes from which an object is closed.
const OBJECT: usize = 32 << 20;
/// Objects that are encoded before they are sent together.
const BATCH: usize = 4;

/// Level of compression: higher ones take several times as long for a few percent.
const LEVEL: i32 = 1;

/// A delta of more than one in this many bytes of the whole is not worth its chain.
const WORTH: u64 = 3;

/// What a publish wrote.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Published {
    /// The artefact.
    pub id: Id,
    /// Bytes of the folder's files.
    pub raw: u64,
    /// Bytes of the artefact in the store, with its manifest.
    pub stored: u64,
    /// If true, it refers to the version before.
    pub delta: bool,
}

/// Writer of the versions of one run to a store.
pub struct Publisher {
    store: Store,
    anchor_every: u64,
    keep: usize,
    /// Number of this writer, once it has claimed one.
    writer: Option<u64>,
    /// The version of the latest attempt, which may have failed.
    attempted: u64,
    last: Option<Last>,
    chunk: u64,
}

/// The version that was published last.
struct Last {
    manifest: Manifest,
    /// Kept for as long as this is, because the next version is compared with it.
    folder: Arc<Path>,
    /// Versions since the last whole one.
    since: u64,
}

impl Publisher {
    /// A writer to `store`, which sends nothing yet. Every `anchor_every`th version is whole; 1 writes
    /// no deltas. The newest `keep` versions are kept, and those that they are deltas to.
    pub fn new(store: Store, anchor_every: u64, keep: usize) -> Self {
        let (anchor_every, keep) = (anchor_every.max(1), keep.max(1));
        Publisher { store, anchor_every, keep, writer: None, attempted: 0, last: None, chunk: CHUNK }
    }

    /// The store that it writes to.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// Smaller chunks, so that tests have several of them.
    #[cfg(test)]
    pub(crate) fn chunked(self, chunk: u64) -> Self {
        Publisher { chunk, ..self }
    }

    /// Publishes the files of a folder as `version`, and deletes artefacts that no kept version needs.
    /// The folder must not change until the next call returns. Blocks. Cost: reads the folder and the
    /// one before twice, from the page cache if there is room. Memory: some hundred megabytes.
    ///
    /// # Errors
    /// Those of the store and of the folder; [`WeightsError::Superseded`] if another process has begun
    /// to write there. After an error, the version is not in the store.
    pub fn publish(&mut self, version: u64, folder: &Arc<Path>) -> Result<Published, WeightsError> {
        // A version that was passed or published before belongs to another timeline of the run.
        if version < self.attempted || self.last.as_ref().is_some_and(|last| version == last.manifest.id.version) {
            (self.writer, self.last) = (None, None);
        }
        self.attempted = version;
        let writer = match self.writer {
            Some(writer) => writer,
            None => *self.writer.insert(claim(&self.store)?),
        };
        let id = Id { writer, version };
        let files = SourceFile::all(folder)?;
        let last = self.last.take().filter(|last| last.since + 1 < self.anchor_every);
        // A folder that is gone or damaged is no base; the version is whole then.
        let base = last.as_ref().and_then(|last| Base::open(last).ok());
        let base = base.filter(|base| base.is_worth(&files, self.chunk).unwrap_or(false));
        let mut writing = Writing { store: &self.store, id, objects: Vec::new(), open: Vec::new(), closed: Vec::new() };
        let mut entries = Vec::with_capacity(files.len());
        for file in &files {
            let mut parts = Vec::with_capacity(file.parts.len());
            for part in &file.parts {
                parts.push(writing.part(file, part, self.chunk, base.as_ref())?);
            }
            entries.push(FileEntry { name: file.name.clone(), parts });
        }
        writing.close()?;
        writing.send()?;
        let objects = writing.objects;
        let from = base.as_ref().map(|base| base.manifest.id.version);
        let manifest = Manifest { format: FORMAT, id, base: from, chunk: self.chunk, files: entries, objects };
        let json = manifest.to_bytes().map_err(|error| malformed(folder, error.to_string()))?;
        let stored = manifest.objects.iter().map(|object| object.bytes).sum::<u64>() + json.len() as u64;
        let newest = writers(&self.store)?.last().copied().unwrap_or(0);
        if newest > writer {
            return Err(self.superseded(writer, newest));
        }
        if !self.store.create(&format!("{MANIFESTS}/{}", manifest.listed().name()), json)? {
            return Err(self.superseded(writer, writer));
        }
        let since = if from.is_some() { last.map_or(0, |last| last.since + 1) } else { 0 };
        let published = Published { id, raw: manifest.raw(), stored, delta: from.is_some() };
        self.last = Some(Last { manifest, folder: folder.clone(), since });
        // Leftovers take room, and mislead no reader.
        if let Err(error) = clean(&self.store, writer, self.keep) {
            tracing::warn!("old versions stay in the store: {error}");
        }
        Ok(published)
    }

    fn superseded(&self, own: u64, newer: u64) -> WeightsError {
        WeightsError::Superseded { store: self.store.name().to_owned(), own, newer }
    }
}

fn malformed(path: &Path, why: String) -> WeightsError {
    WeightsError::Malformed { path: path.to_owned(), why }
}

/// Numbers of the writers so far, ascending.
fn writers(store: &Store) -> Result<Vec<u64>, WeightsError> {
    let mut found: Vec<u64> = store.list(WRITERS)?.iter().filter_map(|name| name.parse().ok()).collect();
    found.sort_unstable();
    Ok(found)
}

/// Takes the next number, which no other process gets.
fn claim(store: &Store) -> Result<u64, WeightsError> {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    // Two processes never write the same claim, which would count as a retry of one.
    let claim = format!("{{\"process\": {}, \"nanoseconds\": {}}}\n", std::process::id(), since.as_nanos());
    let mut next = writers(store)?.last().copied().unwrap_or(0);
    loop {
        next += 1;
        if store.create(&format!("{WRITERS}/{next:010}"), claim.clone().into_bytes())? {
            return Ok(next);
        }
    }
}

/// Complete artefacts, oldest first.
pub(crate) fn listed(store: &Store) -> Result<Vec<Listed>, WeightsError> {
    let mut found: Vec<Listed> = store.list(MANIFESTS)?.iter().filter_map(|name| Listed::of_name(name)).collect();
    found.sort_unstable();
    Ok(found)
}

/// Those of `all`, oldest first, that the newest `keep` need.
fn needed(all: &[Listed], keep: usize) -> BTreeSet<Id> {
    let by_id: BTreeMap<Id, Listed> = all.iter().map(|listed| (listed.id, *listed)).collect();
    let mut needed = BTreeSet::new();
    for newest in all.iter().rev().take(keep) {
        let mut next = Some(newest.id);
        while let Some(id) = next.filter(|id| needed.insert(*id)) {
            next = by_id.get(&id).and_then(|listed| listed.before());
        }
    }
    needed
}

/// Deletes artefacts that no kept one needs, each manifest first, and objects that a killed writer left
/// without a manifest.
fn clean(store: &Store, writer: u64, keep: usize) -> Result<(), WeightsError> {
    let all = listed(store)?;
    let needed = needed(&all, keep);
    for old in all.iter().filter(|listed| !needed.contains(&listed.id)) {
        store.delete(&format!("{MANIFESTS}/{}", old.name()))?;
    }
    for folder in store.folders(DATA)? {
        let left = Id::of_folder(&folder).filter(|id| !needed.contains(id) && id.writer <= writer);
        if left.is_some() {
            for object in store.list(&format!("{DATA}/{folder}"))? {
                store.delete(&format!("{DATA}/{folder}/{object}"))?;
            }
        }
    }
    let claims = writers(store)?;
    for old in claims.iter().filter(|old| **old + 1 < writer) {
        store.delete(&format!("{WRITERS}/{old:010}"))?;
    }
    Ok(())
}

/// The version before, to compare with.
struct Base<'a> {
    manifest: &'a Manifest,
    files: BTreeMap<String, SourceFile>,
    parts: BTreeMap<String, super::manifest::Place<'a>>,
}

impl<'a> Base<'a> {
    fn open(last: &'a Last) -> Result<Self, WeightsError> {
        let files = SourceFile::all(&last.folder)?.into_iter().map(|file| (file.name.clone(), file)).collect();
        Ok(Base { manifest: &last.manifest, files, parts: last.manifest.parts() })
    }

    /// The bytes of a chunk, if there is a part of this key and size.
    fn chunk(&self, key: &str, part: &SourcePart, at: usize, chunk: u64) -> Option<(Vec<u8>, &'a str)> {
        let place = self.parts.get(key).filter(|place| place.part.bytes == part.bytes && place.part.width == part.width)?;
        let bytes = self.files.get(place.file)?.read(place.at + at as u64 * chunk, place.part.len(chunk, at)).ok()?;
        Some((bytes, &place.part.chunks[at].sha256))
    }

    /// Returns true if a delta has at most a third of the whole. A changed number counts with its own
    /// bytes and one for its place.
    fn is_worth(&self, files: &[SourceFile], chunk: u64) -> Result<bool, WeightsError> {
        let (mut delta, mut all) = (0u64, 0u64);
        for file in files {
            for part in &file.parts {
                let key = key(file, part);
                let costs: Result<Vec<u64>, WeightsError> = (0..part.bytes.div_ceil(chunk) as usize)
                    .into_par_iter()
                    .map(|at| {
                        let bytes = chunk_of(file, part, at, chunk)?;
                        let before = self.chunk(&key, part, at, chunk);
                        Ok(before.map_or(bytes.len() as u64, |(before, _)| cost(part.width, &before, &bytes)))
                    })
                    .collect();
                all += part.bytes;
                delta += costs?.into_iter().sum::<u64>();
            }
        }
        Ok(delta * WORTH <= all)
    }
}

/// Bytes of a delta before compression.
fn cost(width: usize, before: &[u8], after: &[u8]) -> u64 {
    (delta::changed(width, before, after) * (width + 1)) as u64
}

fn key(file: &SourceFile, part: &SourcePart) -> String {
    Part { tensor: part.tensor.clone(), width: 1, bytes: 0, chunks: Vec::new() }.key(&file.name)
}

fn chunk_of(file: &SourceFile, part: &SourcePart, at: usize, chunk: u64) -> Result<Vec<u8>, WeightsError> {
    let from = at as u64 * chunk;
    file.read(part.at + from, chunk.min(part.bytes - from))
}

/// Encoded chunk, before it has a place.
struct Encoded {
    sha256: String,
    /// None: as in the base.
    bytes: Option<(Vec<u8>, bool)>,
}

/// An artefact that is being written.
struct Writing<'a> {
    store: &'a Store,
    id: Id,
    objects: Vec<ObjectEntry>,
    /// Bytes of the object that is being filled.
    open: Vec<u8>,
    /// Filled objects that were not sent.
    closed: Vec<Vec<u8>>,
}

impl Writing<'_> {
    fn part(&mut self, file: &SourceFile, part: &SourcePart, chunk: u64, base: Option<&Base<'_>>) -> Result<Part, WeightsError> {
        let (key, count) = (key(file, part), part.bytes.div_ceil(chunk) as usize);
        let mut chunks = Vec::with_capacity(count);
        for first in (0..count).step_by(BATCH * 2) {
            let encoded: Result<Vec<Encoded>, WeightsError> = (first..count.min(first + BATCH * 2))
                .into_par_iter()
                .map(|at| {
                    let bytes = chunk_of(file, part, at, chunk)?;
                    let sha256 = sha256(&bytes);
                    let before = base.and_then(|base| base.chunk(&key, part, at, chunk));
                    let bytes = match before {
                        Some((_, before)) if *before == sha256 => None,
                        Some((before, _)) if cost(part.width, &before, &bytes) * WORTH <= bytes.len() as u64 => {
                            Some((delta::encode(part.width, &before, &bytes), true))
                        }
                        _ => Some((delta::to_planes(part.width, &bytes), false)),
                    };
                    Ok(Encoded { sha256, bytes })
                })
                .collect();
            for Encoded { sha256, bytes } in encoded? {
                let stored = bytes.map(|(bytes, delta)| self.store_chunk(&bytes, delta)).transpose()?;
                chunks.push(Chunk { sha256, stored });
            }
        }
        Ok(Part { tensor: part.tensor.clone(), width: part.width, bytes: part.bytes, chunks })
    }

    fn store_chunk(&mut self, bytes: &[u8], delta: bool) -> Result<Stored, WeightsError> {
        let object = self.objects.len() + self.closed.len();
        let stored = Stored { object, at: self.open.len() as u64, length: bytes.len() as u64, delta };
        self.open.extend_from_slice(bytes);
        if self.open.len() >= OBJECT {
            self.close()?;
        }
        Ok(stored)
    }

    fn close(&mut self) -> Result<(), WeightsError> {
        if !self.open.is_empty() {
            self.closed.push(std::mem::take(&mut self.open));
        }
        if self.closed.len() >= BATCH { self.send() } else { Ok(()) }
    }

    /// Compresses and sends what is closed.
    fn send(&mut self) -> Result<(), WeightsError> {
        let closed = std::mem::take(&mut self.closed);
        let packed: Result<Vec<_>, WeightsError> = closed
            .into_par_iter()
            .map(|raw| {
                let bytes = zstd::bulk::compress(&raw, LEVEL).map_err(WeightsError::io("compression"))?;
                let entry = ObjectEntry { bytes: bytes.len() as u64, raw: raw.len() as u64, sha256: sha256(&bytes) };
                Ok((entry, bytes))
            })
            .collect();
        let mut objects = Vec::new();
        for (entry, bytes) in packed? {
            objects.push((object_name(self.id, self.objects.len()), bytes));
            self.objects.push(entry);
        }
        self.store.put_all(objects)
    }
}

/// Place of an artefact's object in the store.
pub(crate) fn object_name(id: Id, at: usize) -> String {
    format!("{DATA}/{}/{at:06}", id.folder())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn artefacts_are_deleted_only_when_no_kept_chain_needs_them() {
        let of = |writer, version, base| Listed { id: Id { writer, version }, base };
        let all = [
            of(1, 9, None),
            of(2, 1, None),
            of(2, 2, Some(1)),
            of(2, 3, Some(2)),
            of(2, 4, None),
            of(2, 5, Some(4)),
            of(2, 6, Some(5)),
        ];
        let versions = |keep| needed(&all, keep).into_iter().map(|id| id.version).collect::<Vec<_>>();
        assert_eq!(versions(1), [4, 5, 6]);
        assert_eq!(versions(3), [4, 5, 6]);
        assert_eq!(versions(4), [1, 2, 3, 4, 5, 6], "version 3 needs 2, which needs 1");
        assert_eq!(versions(99), [9, 1, 2, 3, 4, 5, 6]);
    }
}
