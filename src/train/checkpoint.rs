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

/// A checkpoint that can't be written or read.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The file system refused.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// A file with invalid contents.
    #[error("{}: {reason}", path.display())]
    Malformed {
        /// The file or folder.
        path: PathBuf,
        /// Problem.
        reason: String,
    },
}

impl CheckpointError {
    /// For `map_err`: names the path.
    pub fn io(path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| CheckpointError::Io { path, source }
    }

    /// A file whose content is wrong.
    pub fn malformed(path: &Path, reason: impl ToString) -> Self {
        CheckpointError::Malformed { path: path.to_owned(), reason: reason.to_string() }
    }
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
pub fn read_metadata(folder: &Path) -> Result<CheckpointMetadata, CheckpointError> {
    let path = folder.join(METADATA);
    let text = fs::read_to_string(&path).map_err(CheckpointError::io(&path))?;
    let metadata: CheckpointMetadata = serde_json::from_str(&text).map_err(|error| CheckpointError::malformed(&path, error))?;
    for (name, FileMark { bytes: size, .. }) in &metadata.files {
        let file = folder.join(name);
        let found = fs::metadata(&file).map_err(CheckpointError::io(&file))?.len();
        if found != *size {
            return Err(CheckpointError::malformed(
                &file,
                format!("{found} bytes; {METADATA} says {size}: the file was cut or changed"),
            ));
        }
    }
    Ok(metadata)
}

/// Reads the metadata, and compares every file with it.
pub fn verify(folder: &Path) -> Result<CheckpointMetadata, CheckpointError> {
    let metadata = read_metadata(folder)?;
    for (name, mark) in &metadata.files {
        let path = folder.join(name);
        let found = crc32(&path)?;
        if found != mark.crc32 {
            let reason =
                format!("its checksum is {found:08x}; {METADATA} says {:08x}: the file was changed or damaged", mark.crc32);
            return Err(CheckpointError::malformed(&path, reason));
        }
    }
    Ok(metadata)
}

/// Intact checkpoints, newest first, and the problems of damaged ones. Verified lazily.
pub fn intact(checkpoints: &Path) -> Result<impl Iterator<Item = Result<(u64, PathBuf), CheckpointError>>, CheckpointError> {
    let mut found = named(checkpoints)?;
    found.reverse();
    Ok(found.into_iter().map(|(step, path)| verify(&path).map(|_| (step, path))))
}

/// Complete checkpoints in `checkpoints`, by ascending step. Empty if the folder does not exist.
pub fn list(checkpoints: &Path) -> Result<Vec<(u64, PathBuf)>, CheckpointError> {
    Ok(named(checkpoints)?.into_iter().filter(|(_, path)| read_metadata(path).is_ok()).collect())
}

/// Folders that are named as checkpoints, complete or not, by ascending step.
pub fn named(checkpoints: &Path) -> Result<Vec<(u64, PathBuf)>, CheckpointError> {
    numbered(checkpoints, parse_step)
}

/// The entries of a folder whose names `number` finds a step in, by ascending step.
fn numbered(checkpoints: &Path, number: impl Fn(&str) -> Option<u64>) -> Result<Vec<(u64, PathBuf)>, CheckpointError> {
    let entries = match fs::read_dir(checkpoints) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(CheckpointError::io(checkpoints)(error)),
    };
    let mut found = Vec::new();
    for entry in entries {
        let path = entry.map_err(CheckpointError::io(checkpoints))?.path();
        let step = path.file_name().and_then(|name| name.to_str()).and_then(&number);
        found.extend(step.map(|step| (step, path)));
    }
    found.sort();
    Ok(found)
}

/// The complete checkpoint of the largest step.
pub fn latest(checkpoints: &Path) -> Result<Option<PathBuf>, CheckpointError> {
    Ok(list(checkpoints)?.pop().map(|(_, path)| path))
}

/// Writes `checkpoints/step_<step>` atomically, and returns its path. `fill` puts the files into an
/// empty folder, which then gets its metadata, is synced, and is renamed. Replaces a checkpoint of
/// the same step.
pub fn write<E: From<CheckpointError>>(
    checkpoints: &Path,
    step: u64,
    metadata: CheckpointMetadata,
    fill: impl FnOnce(&Path) -> Result<(), E>,
) -> Result<PathBuf, E> {
    let (target, temporary) = (checkpoints.join(step_folder(step)), checkpoints.join(format!(".{}.writing", step_folder(step))));
    atomic_file::remove(&temporary).map_err(CheckpointError::io(&temporary))?;
    atomic_file::create_folder(&temporary).map_err(CheckpointError::io(&temporary))?;
    let filled = fill(&temporary).and_then(|()| Ok(seal(&temporary, metadata)?));
    if let Err(error) = filled {
        // A disk that is full needs the room, and the error that counts is the first.
        atomic_file::remove(&temporary).ok();
        return Err(error);
    }
    publish(&temporary, &target)?;
    Ok(target)
}

/// Moves a complete checkpoint from `from`, on the same disk, to `target`, and marks it as the
/// latest. Both steps are durable.
pub fn publish(from: &Path, target: &Path) -> Result<(), CheckpointError> {
    let checkpoints = target.parent().unwrap_or(Path::new("."));
    atomic_file::create_folder(checkpoints).map_err(CheckpointError::io(checkpoints))?;
    atomic_file::publish(from, target).map_err(CheckpointError::io(target))?;
    point_to(target)
}

/// Names a checkpoint in [`LATEST`] as the newest one.
pub fn point_to(checkpoint: &Path) -> Result<(), CheckpointError> {
    let (pointer, name) = (checkpoint.with_file_name(LATEST), checkpoint.file_name().unwrap_or_default().to_string_lossy());
    atomic_file::write(&pointer, format!("{name}\n")).map_err(CheckpointError::io(&pointer))
}

/// Deletes what a killed process left: incomplete checkpoints, and those that an earlier resume set
/// aside. The caller must be the run's only process.
pub fn remove_leftovers(checkpoints: &Path) -> Result<(), CheckpointError> {
    atomic_file::remove_leftovers(checkpoints).map_err(CheckpointError::io(checkpoints))?;
    remove_undone(checkpoints, u64::MAX)
}

/// Removes complete checkpoints older than `step` until `keep` are left, `step` included. Newer
/// ones stay. Returns the removed folders.
pub fn prune(checkpoints: &Path, step: u64, keep: usize) -> Result<Vec<PathBuf>, CheckpointError> {
    let found = list(checkpoints)?;
    let steps: Vec<u64> = found.iter().map(|(step, _)| *step).collect();
    let old = found.into_iter().take(superseded(&steps, step, keep)).map(|(_, path)| path).collect::<Vec<_>>();
    for path in &old {
        // Hidden first: a killed removal leaves no incomplete checkpoint under a valid name.
        let aside = rename_hidden(path, "removed")?;
        atomic_file::remove(&aside).map_err(CheckpointError::io(&aside))?;
    }
    remove_undone(checkpoints, step)?;
    Ok(old)
}

/// Number of the ascending `steps` to remove so that the newest `keep` up to `step` stay; `step`
/// itself always stays.
fn superseded(steps: &[u64], step: u64, keep: usize) -> usize {
    steps.iter().filter(|other| **other <= step).count().saturating_sub(keep.max(1))
}

/// Writes the metadata, last of all files.
fn seal(folder: &Path, metadata: CheckpointMetadata) -> Result<(), CheckpointError> {
    let mut files = BTreeMap::new();
    mark(folder, "", &mut files)?;
    let timestamp = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let path = folder.join(METADATA);
    let json = serde_json::to_string_pretty(&CheckpointMetadata { timestamp, files, ..metadata });
    let json = json.map_err(|error| CheckpointError::malformed(&path, error))?;
    atomic_file::write(&path, json).map_err(CheckpointError::io(&path))
}

/// Records size and checksum of a folder's files, recursively, by relative path.
fn mark(folder: &Path, prefix: &str, files: &mut BTreeMap<String, FileMark>) -> Result<(), CheckpointError> {
    for entry in fs::read_dir(folder).map_err(CheckpointError::io(folder))? {
        let entry = entry.map_err(CheckpointError::io(folder))?;
        let (path, name) = (entry.path(), format!("{prefix}{}", entry.file_name().to_string_lossy()));
        let metadata = entry.metadata().map_err(CheckpointError::io(&path))?;
        if metadata.is_dir() {
            mark(&path, &format!("{name}/"), files)?;
        } else {
            files.insert(name, FileMark { bytes: metadata.len(), crc32: crc32(&path)? });
        }
    }
    Ok(())
}

/// Hides a checkpoint that the run will write again, as `.step_N.undone`. It is deleted after that
/// step is saved again, or at the next resume.
pub fn set_aside(path: &Path) -> Result<PathBuf, CheckpointError> {
    rename_hidden(path, UNDONE)
}

/// Suffix of [`set_aside`].
const UNDONE: &str = "undone";

fn rename_hidden(path: &Path, fate: &str) -> Result<PathBuf, CheckpointError> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let aside = path.with_file_name(format!(".{name}.{fate}"));
    atomic_file::remove(&aside).map_err(CheckpointError::io(&aside))?;
    fs::rename(path, &aside).map_err(CheckpointError::io(path))?;
    Ok(aside)
}

/// Deletes checkpoints of steps up to `step` that were set aside.
fn remove_undone(checkpoints: &Path, step: u64) -> Result<(), CheckpointError> {
    let undone = |name: &str| parse_step(name.strip_prefix('.')?.strip_suffix(UNDONE)?.strip_suffix('.')?);
    for (_, path) in numbered(checkpoints, undone)?.into_iter().filter(|(of, _)| *of <= step) {
        atomic_file::remove(&path).map_err(CheckpointError::io(&path))?;
    }
    Ok(())
}

fn crc32(path: &Path) -> Result<u32, CheckpointError> {
    let mut file = File::open(path).map_err(CheckpointError::io(path))?;
    let (mut hasher, mut block) = (crc32fast::Hasher::new(), vec![0; 1 << 20]);
    loop {
        match file.read(&mut block).map_err(CheckpointError::io(path))? {
            0 => return Ok(hasher.finalize()),
            read => hasher.update(&block[..read]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_make_place_and_the_newest_never_does() {
        assert_eq!(superseded(&[1, 2, 3, 4], 4, 3), 1);
        assert_eq!(superseded(&[1, 2, 3, 4], 4, 4), 0);
        assert_eq!(superseded(&[1, 2, 3, 4], 4, 0), 3, "the step that was just saved stays");
        assert_eq!(superseded(&[1, 2, 90, 91], 2, 1), 1, "newer ones belong to somebody else");
        assert_eq!(superseded(&[], 4, 1), 0);
        assert_eq!(superseded(&[1, 2], 2, usize::MAX), 0);
    }
}
