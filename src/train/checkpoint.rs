//! Checkpoint folders: written atomically, found by number (law C1, its file part).
//!
//! `checkpoints/step_000123` appears by one rename, after all its files are durable (law C3).
//! `metadata.json`, written last, lists them with sizes and checksums. A killed save leaves a
//! hidden temporary folder, which is never read; [`remove_leftovers`] deletes it at the next
//! resume.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::TrainError;
use crate::data::{Version, number};
use crate::util::atomic_file;

/// The file that makes a folder a complete checkpoint.
pub const METADATA: &str = "metadata.json";
/// The file in `checkpoints/` that names the newest one, for people and scripts.
pub const LATEST: &str = "latest";
/// The folder of checkpoints in a run's folder.
pub const CHECKPOINTS: &str = "checkpoints";

/// `metadata.json`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CheckpointMetadata {
    /// Updates that the weights have seen.
    pub step: u64,
    /// Publishes that the run has made (law V1).
    pub weight_version: Version,
    /// Seconds since 1970.
    #[serde(default)]
    pub timestamp: u64,
    /// Numbers that the run wrote down.
    #[serde(default, with = "number")]
    pub metrics: BTreeMap<String, f64>,
    /// All other files.
    #[serde(default)]
    pub files: BTreeMap<String, FileMark>,
}

/// Size and checksum of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileMark {
    /// Size in bytes.
    pub bytes: u64,
    /// CRC-32 of its content, against disks and copies that change a bit; not against people.
    pub crc32: u32,
}

/// `step_000123`.
pub fn step_folder(step: u64) -> String {
    format!("step_{step:06}")
}

/// The number in `step_N`, padded or not.
pub fn parse_step(name: &str) -> Option<u64> {
    name.strip_prefix("step_").filter(|digits| digits.bytes().all(|b| b.is_ascii_digit()))?.parse().ok()
}

/// Reads `metadata.json` and checks that every file it lists is there in full.
pub fn read_metadata(folder: &Path) -> Result<CheckpointMetadata, TrainError> {
    let path = folder.join(METADATA);
    let text = fs::read_to_string(&path).map_err(TrainError::io(&path))?;
    let metadata: CheckpointMetadata = serde_json::from_str(&text).map_err(|error| TrainError::malformed(&path, error))?;
    for (name, mark) in &metadata.files {
        let file = folder.join(name);
        let found = fs::metadata(&file).map_err(TrainError::io(&file))?.len();
        if found != mark.bytes {
            let reason = format!("{found} bytes; {METADATA} says {}: the file was cut or changed", mark.bytes);
            return Err(TrainError::malformed(&file, reason));
        }
    }
    Ok(metadata)
}

/// Reads the metadata, and compares every file with it.
pub fn verify(folder: &Path) -> Result<CheckpointMetadata, TrainError> {
    verify_part(folder, 0, 1)
}

/// Reads the metadata, and compares every `of`th file with it, from number `first`. Ranks share the
/// work.
pub(super) fn verify_part(folder: &Path, first: usize, of: usize) -> Result<CheckpointMetadata, TrainError> {
    let metadata = read_metadata(folder)?;
    for (name, FileMark { crc32: expected, .. }) in metadata.files.iter().skip(first).step_by(of) {
        let path = folder.join(name);
        let found = crc32(&path)?;
        if found != *expected {
            let reason = format!("its checksum is {found:08x}; {METADATA} says {expected:08x}: the file was changed or damaged");
            return Err(TrainError::malformed(&path, reason));
        }
    }
    Ok(metadata)
}

/// If true, the checkpoint whose verification failed may be intact: the system did not let its files be read.
pub fn may_be_intact(error: &TrainError) -> bool {
    use io::ErrorKind::{InvalidData, IsADirectory, NotADirectory, NotFound};
    let is_damage = |cause: &io::Error| matches!(cause.kind(), InvalidData | IsADirectory | NotADirectory | NotFound);
    matches!(error, TrainError::Io(_, cause) if !is_damage(cause))
}

/// Intact checkpoints, newest first, and the problems of damaged ones. Verified lazily.
pub fn intact(checkpoints: &Path) -> Result<impl Iterator<Item = Result<(u64, PathBuf), TrainError>>, TrainError> {
    let mut found = named(checkpoints)?;
    found.reverse();
    Ok(found.into_iter().map(|(step, path)| verify(&path).map(|_| (step, path))))
}

/// Complete checkpoints in `checkpoints`, by ascending step. Empty if the folder does not exist.
pub fn list(checkpoints: &Path) -> Result<Vec<(u64, PathBuf)>, TrainError> {
    Ok(named(checkpoints)?.into_iter().filter(|(_, path)| read_metadata(path).is_ok()).collect())
}

/// Folders that are named as checkpoints, complete or not, by ascending step.
pub fn named(checkpoints: &Path) -> Result<Vec<(u64, PathBuf)>, TrainError> {
    numbered(checkpoints, parse_step)
}

/// The entries of a folder whose names `number` finds a step in, by ascending step.
fn numbered(checkpoints: &Path, number: impl Fn(&str) -> Option<u64>) -> Result<Vec<(u64, PathBuf)>, TrainError> {
    let entries = match fs::read_dir(checkpoints) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(TrainError::io(checkpoints)(error)),
    };
    let paths = entries.map(|entry| entry.map(|entry| entry.path())).collect::<io::Result<Vec<_>>>();
    let paths = paths.map_err(TrainError::io(checkpoints))?.into_iter();
    let mut found: Vec<_> = paths.filter_map(|path| Some((number(path.file_name()?.to_str()?)?, path))).collect();
    found.sort();
    Ok(found)
}

/// The complete checkpoint of the largest step.
pub fn latest(checkpoints: &Path) -> Result<Option<PathBuf>, TrainError> {
    Ok(list(checkpoints)?.pop().map(|(_, path)| path))
}

/// Writes `checkpoints/step_<step>` atomically, and returns its path. `fill` puts the files into an
/// empty folder, which then gets its metadata, is synced, and is renamed. Replaces a checkpoint of
/// the same step.
pub fn write(
    checkpoints: &Path,
    step: u64,
    metadata: CheckpointMetadata,
    fill: impl FnOnce(&Path) -> Result<(), TrainError>,
) -> Result<PathBuf, TrainError> {
    let unfinished = Unfinished::begin(checkpoints, step)?;
    unfinished.finish(metadata, |folder| fill(folder).map(|()| BTreeMap::new()))
}

/// A checkpoint whose files are being written, in a hidden folder.
pub(super) struct Unfinished {
    /// The hidden folder. No other save has the same name, so that a process of an earlier start that
    /// still writes never meets this one.
    pub folder: PathBuf,
    target: PathBuf,
}

impl Unfinished {
    /// Makes an empty folder for a checkpoint of `step`.
    pub fn begin(checkpoints: &Path, step: u64) -> Result<Self, TrainError> {
        let (process, now) = (std::process::id(), SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos());
        let folder = checkpoints.join(format!(".{}.{now:x}-{process:x}.writing", step_folder(step)));
        atomic_file::create_folder(&folder).map_err(TrainError::io(&folder))?;
        Ok(Unfinished { folder, target: checkpoints.join(step_folder(step)) })
    }

    /// Completes the checkpoint that `fill` writes. `fill` returns the checksums that it knows; other
    /// files are read for theirs.
    pub fn finish(
        self,
        metadata: CheckpointMetadata,
        fill: impl FnOnce(&Path) -> Result<BTreeMap<String, FileMark>, TrainError>,
    ) -> Result<PathBuf, TrainError> {
        let filled = fill(&self.folder).and_then(|known| seal(&self.folder, metadata, &known));
        if let Err(error) = filled {
            // A disk that is full needs the room, and the error that counts is the first.
            atomic_file::remove(&self.folder).ok();
            return Err(error);
        }
        publish(&self.folder, &self.target)?;
        Ok(self.target)
    }
}

/// Moves a complete checkpoint from `from`, on the same disk, to `target`, and marks it as the
/// latest. Both steps are durable.
pub fn publish(from: &Path, target: &Path) -> Result<(), TrainError> {
    let checkpoints = target.parent().unwrap_or(Path::new("."));
    atomic_file::create_folder(checkpoints).map_err(TrainError::io(checkpoints))?;
    atomic_file::publish(from, target).map_err(TrainError::io(target))?;
    point_to(target)
}

/// Names a checkpoint in [`LATEST`] as the newest one.
pub fn point_to(checkpoint: &Path) -> Result<(), TrainError> {
    let (pointer, name) = (checkpoint.with_file_name(LATEST), checkpoint.file_name().unwrap_or_default().to_string_lossy());
    atomic_file::write(&pointer, format!("{name}\n")).map_err(TrainError::io(&pointer))
}

/// Deletes what a killed process left: incomplete checkpoints, and those that an earlier resume set
/// aside. The caller must be the run's only process.
pub fn remove_leftovers(checkpoints: &Path) -> Result<(), TrainError> {
    atomic_file::remove_leftovers(checkpoints).map_err(TrainError::io(checkpoints))?;
    remove_undone(checkpoints, u64::MAX)
}

/// Removes complete checkpoints older than `step` until `keep` are left, `step` included. Newer
/// ones stay. Returns the removed folders.
pub fn prune(checkpoints: &Path, step: u64, keep: usize) -> Result<Vec<PathBuf>, TrainError> {
    let mut old = list(checkpoints)?;
    old.retain(|(other, _)| *other <= step);
    old.truncate(old.len().saturating_sub(keep.max(1)));
    let old: Vec<PathBuf> = old.into_iter().map(|(_, path)| path).collect();
    for path in &old {
        // Hidden first: a killed removal leaves no incomplete checkpoint under a valid name.
        let aside = rename_hidden(path, "removed")?;
        atomic_file::remove(&aside).map_err(TrainError::io(&aside))?;
    }
    remove_undone(checkpoints, step)?;
    Ok(old)
}

/// Writes the metadata, last of all files.
fn seal(folder: &Path, metadata: CheckpointMetadata, known: &BTreeMap<String, FileMark>) -> Result<(), TrainError> {
    let mut files = BTreeMap::new();
    mark(folder, "", known, &mut files)?;
    if let Some(missing) = known.keys().find(|name| !files.contains_key(*name)) {
        let reason = "a rank wrote it, and it is not there: the ranks do not share this folder";
        return Err(TrainError::malformed(&folder.join(missing), reason));
    }
    let timestamp = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let path = folder.join(METADATA);
    let json = serde_json::to_string_pretty(&CheckpointMetadata { timestamp, files, ..metadata });
    let json = json.map_err(|error| TrainError::malformed(&path, error))?;
    atomic_file::write(&path, json).map_err(TrainError::io(&path))
}

/// Records size and checksum of a folder's files, recursively, by relative path. Files whose
/// checksum is known are not read.
fn mark(
    folder: &Path,
    prefix: &str,
    known: &BTreeMap<String, FileMark>,
    files: &mut BTreeMap<String, FileMark>,
) -> Result<(), TrainError> {
    for entry in fs::read_dir(folder).map_err(TrainError::io(folder))? {
        let entry = entry.map_err(TrainError::io(folder))?;
        let (path, name) = (entry.path(), format!("{prefix}{}", entry.file_name().to_string_lossy()));
        let metadata = entry.metadata().map_err(TrainError::io(&path))?;
        if metadata.is_dir() {
            mark(&path, &format!("{name}/"), known, files)?;
            continue;
        }
        let found = match known.get(&name) {
            Some(written) if written.bytes == metadata.len() => *written,
            Some(written) => {
                let reason = format!("{} bytes; its rank wrote {}", metadata.len(), written.bytes);
                return Err(TrainError::malformed(&path, reason));
            }
            None => mark_of(&path)?,
        };
        files.insert(name, found);
    }
    Ok(())
}

/// Size and checksum of a file.
pub(super) fn mark_of(path: &Path) -> Result<FileMark, TrainError> {
    let bytes = fs::metadata(path).map_err(TrainError::io(path))?.len();
    Ok(FileMark { bytes, crc32: crc32(path)? })
}

/// Hides a checkpoint that the run will write again, as `.step_N.undone`. It is deleted after that
/// step is saved again, or at the next resume.
pub fn set_aside(path: &Path) -> Result<PathBuf, TrainError> {
    rename_hidden(path, UNDONE)
}

/// Suffix of [`set_aside`].
const UNDONE: &str = "undone";

fn rename_hidden(path: &Path, fate: &str) -> Result<PathBuf, TrainError> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let aside = path.with_file_name(format!(".{name}.{fate}"));
    atomic_file::remove(&aside).map_err(TrainError::io(&aside))?;
    fs::rename(path, &aside).map_err(TrainError::io(path))?;
    Ok(aside)
}

/// Deletes checkpoints of steps up to `step` that were set aside.
fn remove_undone(checkpoints: &Path, step: u64) -> Result<(), TrainError> {
    let undone = |name: &str| parse_step(name.strip_prefix('.')?.strip_suffix(UNDONE)?.strip_suffix('.')?);
    for (_, path) in numbered(checkpoints, undone)?.into_iter().filter(|(of, _)| *of <= step) {
        atomic_file::remove(&path).map_err(TrainError::io(&path))?;
    }
    Ok(())
}

fn crc32(path: &Path) -> Result<u32, TrainError> {
    let mut file = File::open(path).map_err(TrainError::io(path))?;
    let (mut hasher, mut block) = (crc32fast::Hasher::new(), vec![0; 1 << 20]);
    loop {
        match file.read(&mut block).map_err(TrainError::io(path))? {
            0 => return Ok(hasher.finalize()),
            read => hasher.update(&block[..read]),
        }
    }
}
