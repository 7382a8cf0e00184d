//! Pulling: the newest artefact becomes a folder of this machine, exact to the bit.
//!
//! `FOLDER/v0000000042` appears by one rename, after every chunk has its checksum; the link
//! `FOLDER/latest` then points there. Objects that have arrived are kept in `FOLDER/.objects` until
//! that, so that a pull that was interrupted fetches the rest.

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rollflow_util::{atomic_file, lock_file, reading};
use serde::{Deserialize, Serialize};

use super::manifest::{Chunk, Id, LARGEST, Listed, Manifest, Part, Place, Stored, sha256};
use super::publisher::{MANIFESTS, listed, object_name};
use super::store::Store;
use super::{WeightsError, delta};

/// Link to the newest pulled version.
pub const LATEST: &str = "latest";
/// The manifest that a pulled folder was made from.
const STAMP: &str = ".artefact.jsonl";
/// Fetched objects.
const OBJECTS: &str = ".objects";
/// Kept locked while a process pulls into the folder.
const LOCK: &str = ".lock";
/// Folder of the reports of hosts in the store.
const HOSTS: &str = "hosts";

/// Times that a pull begins again when artefacts were deleted under it.
const RESTARTS: usize = 3;

/// A version in a folder of this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pulled {
    /// The artefact.
    pub id: Id,
    /// Its folder: a Hugging Face model, or a PEFT adapter.
    pub folder: PathBuf,
    /// Bytes that were fetched for it by this call; 0 if it was there.
    pub fetched: u64,
}

/// Version that a host has pulled, as it reported in the store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostReport {
    /// The artefact.
    pub id: Id,
    /// Absolute path of its folder on the host.
    pub folder: PathBuf,
}

/// Receiver of the versions in a store, in a folder that no other process pulls into.
#[derive(Debug)]
pub struct Puller {
    store: Store,
    folder: PathBuf,
    keep: usize,
    _lock: File,
}

impl Puller {
    /// Opens or creates `folder`. The newest `keep` pulled versions, at least one, are kept there.
    ///
    /// # Errors
    /// Those of the file system, and if another process pulls into the folder.
    pub fn open(store: Store, folder: &Path, keep: usize) -> Result<Self, WeightsError> {
        atomic_file::create_folder(folder).map_err(WeightsError::io(folder))?;
        let folder = folder.canonicalize().map_err(WeightsError::io(folder))?;
        let path = folder.join(LOCK);
        let lock = lock_file::take(&path).map_err(|error| match error {
            fs::TryLockError::WouldBlock => {
                WeightsError::Malformed { path: folder.clone(), why: "another process pulls into this folder".to_owned() }
            }
            fs::TryLockError::Error(error) => WeightsError::Io { path: path.clone(), error },
        })?;
        atomic_file::remove_leftovers(&folder).map_err(WeightsError::io(&folder))?;
        Ok(Puller { store, folder, keep: keep.max(1), _lock: lock })
    }

    /// The newest complete artefact in the store, if there is one. Costs one listing.
    pub fn newest(&self) -> Result<Option<Id>, WeightsError> {
        Ok(listed(&self.store)?.last().map(|listed| listed.id))
    }

    /// Brings a version, or else the newest, to this machine. Blocks. One that is there is not fetched
    /// again. Fetches deltas to what is there if a chain of them exists. Memory: the objects of one
    /// chain, some tens of megabytes each.
    ///
    /// # Errors
    /// [`WeightsError::Empty`], [`WeightsError::Missing`], [`WeightsError::Damaged`], and those of the
    /// store and the file system. After an error, what was pulled before is unchanged.
    pub fn pull(&self, version: Option<u64>) -> Result<Pulled, WeightsError> {
        let mut restarts = 0;
        loop {
            let all = listed(&self.store)?;
            let store = || self.store.name().to_owned();
            let target = match version {
                None => all.last().ok_or_else(|| WeightsError::Empty { store: store() })?,
                Some(version) => all.iter().rev().find(|listed| listed.id.version == version).ok_or_else(|| {
                    let has = all.iter().map(|listed| listed.id.version.to_string()).collect::<Vec<_>>().join(", ");
                    WeightsError::Missing { store: store(), version, has: if has.is_empty() { "none".to_owned() } else { has } }
                })?,
            };
            match self.bring(*target) {
                // The writer deletes what no newer version needs.
                Err(_) if restarts < RESTARTS && !listed(&self.store)?.contains(target) => restarts += 1,
                done => return done,
            }
        }
    }

    fn bring(&self, target: Listed) -> Result<Pulled, WeightsError> {
        let local = self.local()?;
        let folder = self.folder.join(name(target.id));
        if local.contains_key(&target.id) {
            self.point_to(&folder)?;
            return Ok(Pulled { id: target.id, folder, fetched: 0 });
        }
        match self.build(target, &local, &folder) {
            // The folder that the deltas refer to may be what is damaged: once more without it.
            Err(WeightsError::Damaged { .. } | WeightsError::Io { .. }) if !local.is_empty() => {
                self.build(target, &BTreeMap::new(), &folder)
            }
            built => built,
        }
    }

    fn build(&self, target: Listed, local: &BTreeMap<Id, Manifest>, folder: &Path) -> Result<Pulled, WeightsError> {
        let chain = Chain::read(&self.store, target, local)?;
        let objects = self.folder.join(OBJECTS);
        atomic_file::create_folder(&objects).map_err(WeightsError::io(&objects))?;
        let fetched = self.fetch(&chain, &objects)?;
        let writing = folder.with_file_name(format!(".{}.writing", name(target.id)));
        atomic_file::remove(&writing).map_err(WeightsError::io(&writing))?;
        fs::create_dir(&writing).map_err(WeightsError::io(&writing))?;
        if let Err(error) = Builder::new(self, &chain, &objects).write(&writing) {
            atomic_file::remove(&writing).ok();
            // Those that are damaged must not be taken for fetched ones.
            atomic_file::remove(&objects).ok();
            return Err(error);
        }
        atomic_file::publish(&writing, folder).map_err(WeightsError::io(folder))?;
        self.point_to(folder)?;
        atomic_file::remove(&objects).map_err(WeightsError::io(&objects))?;
        self.prune(target.id)?;
        Ok(Pulled { id: target.id, folder: folder.to_owned(), fetched })
    }

    /// Fetches what the chain needs and is not there. Returns the number of bytes.
    fn fetch(&self, chain: &Chain, objects: &Path) -> Result<u64, WeightsError> {
        let needed = chain.needed();
        let of = |at: usize, object: usize| &chain.links[at].objects[object];
        let mut missing = BTreeMap::new();
        for &(at, object) in &needed {
            let path = objects.join(staged(chain.links[at].id, object));
            let there = fs::read(&path).is_ok_and(|bytes| sha256(&bytes) == of(at, object).sha256);
            if !there {
                missing.insert(object_name(chain.links[at].id, object), (at, object, path));
            }
        }
        let wanted: Vec<(String, u64)> =
            missing.iter().map(|(name, (at, object, _))| (name.clone(), of(*at, *object).bytes)).collect();
        self.store.get_all(&wanted, |name, bytes| {
            let (at, object, path) = &missing[name];
            let found = sha256(&bytes);
            if found != of(*at, *object).sha256 {
                return Err(self.damaged(chain.links[*at].id, &format!("object {name}"), "its checksum differs"));
            }
            atomic_file::write_unsynced(path, bytes).map_err(WeightsError::io(path))
        })?;
        Ok(wanted.iter().map(|(_, bytes)| bytes).sum())
    }

    /// Pulled versions, with their manifests.
    fn local(&self) -> Result<BTreeMap<Id, Manifest>, WeightsError> {
        let mut found = BTreeMap::new();
        for entry in fs::read_dir(&self.folder).map_err(WeightsError::io(&self.folder))? {
            let path = entry.map_err(WeightsError::io(&self.folder))?.path();
            let manifest = reading::read(&path.join(STAMP), LARGEST as u64).ok().and_then(|bytes| Manifest::read(&bytes).ok());
            if let Some(manifest) =
                manifest.filter(|of| path.file_name().is_some_and(|found| *found == *name(of.id)) && !path.is_symlink())
            {
                found.insert(manifest.id, manifest);
            }
        }
        Ok(found)
    }

    fn point_to(&self, folder: &Path) -> Result<(), WeightsError> {
        let (link, target) = (self.folder.join(LATEST), Path::new(folder.file_name().unwrap_or_default()));
        if fs::read_link(&link).is_ok_and(|found| found == target) {
            return Ok(());
        }
        atomic_file::link(&link, target).map_err(WeightsError::io(&link))
    }

    /// Removes the oldest versions beyond those to keep, but never `pulled`.
    fn prune(&self, pulled: Id) -> Result<(), WeightsError> {
        for id in self.local()?.into_keys().rev().filter(|id| *id != pulled).skip(self.keep.saturating_sub(1)) {
            let folder = self.folder.join(name(id));
            atomic_file::remove(&folder).map_err(WeightsError::io(&folder))?;
        }
        Ok(())
    }

    /// Reports in the store that this machine, which others call `host`, holds a version.
    pub fn report(&self, host: &str, pulled: &Pulled) -> Result<(), WeightsError> {
        let report = HostReport { id: pulled.id, folder: pulled.folder.clone() };
        let json = serde_json::to_vec(&report)
            .map_err(|error| WeightsError::Malformed { path: pulled.folder.clone(), why: error.to_string() })?;
        self.store.put(&host_object(host), json)
    }

    fn damaged(&self, id: Id, part: &str, why: &str) -> WeightsError {
        damaged(&self.store, id, part, why)
    }
}

impl Store {
    /// The version that `host` reported last; none if it never did.
    ///
    /// # Errors
    /// Those of the store, and a report that is none.
    pub fn report_of(&self, host: &str) -> Result<Option<HostReport>, WeightsError> {
        let object = host_object(host);
        let Some(bytes) = self.get(&object, 1 << 16)? else { return Ok(None) };
        let report = serde_json::from_slice(&bytes);
        report.map(Some).map_err(|error| WeightsError::Malformed { path: object.into(), why: error.to_string() })
    }
}

fn host_object(host: &str) -> String {
    let safe = |c: char| if c.is_ascii_alphanumeric() || matches!(c, '.' | '-') { c } else { '_' };
    format!("{HOSTS}/{}.json", host.chars().map(safe).collect::<String>())
}

fn damaged(store: &Store, id: Id, part: &str, why: &str) -> WeightsError {
    WeightsError::Damaged { store: store.name().to_owned(), id, part: part.to_owned(), why: why.to_owned() }
}

fn name(id: Id) -> String {
    format!("v{:010}", id.version)
}

/// Name of a fetched object.
fn staged(id: Id, object: usize) -> String {
    format!("{}-{object:06}", id.folder())
}

/// The manifests from a version back to a whole one, or to one that is on this machine.
struct Chain {
    links: Vec<Manifest>,
    local: Option<Manifest>,
}

impl Chain {
    fn read(store: &Store, target: Listed, local: &BTreeMap<Id, Manifest>) -> Result<Self, WeightsError> {
        let (mut links, mut next, all) = (Vec::new(), Some(target), listed(store)?);
        while let Some(listed) = next {
            let object = format!("{MANIFESTS}/{}", listed.name());
            let bytes = store.get(&object, LARGEST)?.ok_or_else(|| damaged(store, listed.id, "its manifest", "it is gone"))?;
            let manifest = Manifest::read(&bytes).map_err(|why| damaged(store, listed.id, "its manifest", &why))?;
            if manifest.listed() != listed {
                return Err(damaged(store, listed.id, "its manifest", "it is that of another artefact"));
            }
            links.push(manifest);
            let Some(before) = listed.before() else { break };
            if let Some(manifest) = local.get(&before) {
                return Ok(Chain { links, local: Some(manifest.clone()) });
            }
            let found = all.iter().find(|listed| listed.id == before).copied();
            next = Some(found.ok_or_else(|| damaged(store, target.id, &format!("its base, {before}"), "it is not there"))?);
        }
        Ok(Chain { links, local: None })
    }

    /// Objects that hold bytes of the newest version: link and number.
    fn needed(&self) -> Vec<(usize, usize)> {
        let parts: Vec<_> = self.links.iter().map(Manifest::parts).collect();
        let mut needed = Vec::new();
        for (key, place) in &parts[0] {
            for at in 0..place.part.chunks.len() {
                for (link, parts) in parts.iter().enumerate() {
                    let stored = parts.get(key).and_then(|place| place.part.chunks.get(at)).and_then(|chunk| chunk.stored);
                    needed.extend(stored.map(|stored| (link, stored.object)));
                    if stored.is_some_and(|stored| !stored.delta) {
                        break;
                    }
                }
            }
        }
        needed.sort_unstable();
        needed.dedup();
        needed
    }
}

/// Writer of a version's files.
struct Builder<'a> {
    puller: &'a Puller,
    chain: &'a Chain,
    objects: &'a Path,
    parts: Vec<BTreeMap<String, Place<'a>>>,
    local: BTreeMap<String, Place<'a>>,
    /// The object of each link that was decompressed last.
    open: HashMap<usize, (usize, Vec<u8>)>,
    files: HashMap<PathBuf, File>,
}

impl<'a> Builder<'a> {
    fn new(puller: &'a Puller, chain: &'a Chain, objects: &'a Path) -> Self {
        let parts = chain.links.iter().map(Manifest::parts).collect();
        let local = chain.local.as_ref().map(Manifest::parts).unwrap_or_default();
        Builder { puller, chain, objects, parts, local, open: HashMap::new(), files: HashMap::new() }
    }

    fn write(mut self, folder: &Path) -> Result<(), WeightsError> {
        let manifest = &self.chain.links[0];
        for file in &manifest.files {
            let path = folder.join(&file.name);
            atomic_file::create_folder(path.parent().unwrap_or(folder)).map_err(WeightsError::io(&path))?;
            let mut out = BufWriter::new(File::create_new(&path).map_err(WeightsError::io(&path))?);
            for part in &file.parts {
                let key = part.key(&file.name);
                for (at, chunk) in part.chunks.iter().enumerate() {
                    let bytes = self.restore(&key, part, at, chunk)?;
                    out.write_all(&bytes).map_err(WeightsError::io(&path))?;
                }
            }
            out.flush().map_err(WeightsError::io(&path))?;
        }
        let (path, json) = (folder.join(STAMP), manifest.to_bytes());
        let json = json.map_err(|error| WeightsError::Malformed { path: path.clone(), why: error.to_string() })?;
        atomic_file::write_unsynced(&path, json).map_err(WeightsError::io(&path))
    }

    /// The bytes of a chunk, which have its checksum.
    fn restore(&mut self, key: &str, part: &Part, at: usize, chunk: &Chunk) -> Result<Vec<u8>, WeightsError> {
        let id = self.chain.links[0].id;
        let (mut deltas, mut bytes) = (Vec::new(), None);
        for link in 0..self.chain.links.len() {
            let place = self.parts[link].get(key).copied();
            let Some(place) = place.filter(|place| place.part.bytes == part.bytes && place.part.width == part.width) else {
                return Err(self.damaged(link, key, "its base has no part of this size"));
            };
            match place.part.chunks.get(at).map(|chunk| chunk.stored) {
                Some(None) => {}
                Some(Some(stored)) if stored.delta => deltas.push((link, self.read(link, key, stored)?)),
                Some(Some(stored)) => {
                    bytes = Some(delta::from_planes(part.width, &self.read(link, key, stored)?));
                    break;
                }
                None => return Err(self.damaged(link, key, "its base has fewer chunks")),
            }
        }
        let length = part.len(self.chain.links[0].chunk, at);
        let mut bytes = match bytes {
            Some(bytes) => bytes,
            None => self.local(key, part, at)?,
        };
        for (link, delta) in deltas.into_iter().rev() {
            delta::apply(part.width, &mut bytes, &delta).map_err(|why| self.damaged(link, key, why))?;
        }
        if bytes.len() as u64 != length || sha256(&bytes) != chunk.sha256 {
            return Err(self.puller.damaged(id, key, "its restored bytes have another checksum"));
        }
        Ok(bytes)
    }

    fn damaged(&self, link: usize, key: &str, why: &str) -> WeightsError {
        self.puller.damaged(self.chain.links[link].id, key, why)
    }

    /// The bytes of a chunk in the folder that the chain begins with.
    fn local(&mut self, key: &str, part: &Part, at: usize) -> Result<Vec<u8>, WeightsError> {
        let Some((base, place)) =
            self.chain.local.as_ref().zip(self.local.get(key).filter(|place| place.part.bytes == part.bytes))
        else {
            return Err(self.damaged(self.chain.links.len() - 1, key, "its base is not there"));
        };
        let path = self.puller.folder.join(name(base.id)).join(place.file);
        let file = match self.files.entry(path.clone()) {
            std::collections::hash_map::Entry::Occupied(open) => open.into_mut(),
            std::collections::hash_map::Entry::Vacant(free) => free.insert(File::open(&path).map_err(WeightsError::io(&path))?),
        };
        let mut bytes = vec![0; part.len(base.chunk, at) as usize];
        file.read_exact_at(&mut bytes, place.at + at as u64 * base.chunk).map_err(WeightsError::io(&path))?;
        Ok(bytes)
    }

    /// Bytes in an object.
    fn read(&mut self, link: usize, key: &str, stored: Stored) -> Result<Vec<u8>, WeightsError> {
        let manifest = &self.chain.links[link];
        let entry = &manifest.objects[stored.object];
        if self.open.get(&link).is_none_or(|(object, _)| *object != stored.object) {
            let path = self.objects.join(staged(manifest.id, stored.object));
            let packed = fs::read(&path).map_err(WeightsError::io(&path))?;
            let raw = zstd::bulk::decompress(&packed, entry.raw as usize);
            let raw = raw.map_err(|error| self.damaged(link, key, &format!("its object is not compressed by zstd: {error}")))?;
            self.open.insert(link, (stored.object, raw));
        }
        let raw = &self.open[&link].1;
        let bytes = raw.get(stored.at as usize..(stored.at + stored.length) as usize);
        bytes.map(<[u8]>::to_vec).ok_or_else(|| self.damaged(link, key, "its object is shorter than the manifest says"))
    }
}
