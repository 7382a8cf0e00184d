//! Folders of weight versions, such as `v0000000042`, each complete or absent.
//!
//! Folders appear by [`atomic_file::replace`], which does not sync to disk: a resumed run writes
//! its weights again. A folder is kept while its path is held elsewhere. Of the others, the newest
//! are kept.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::data::Version;
use crate::util::atomic_file;

#[derive(Debug)]
pub(crate) struct Releases {
    dir: PathBuf,
    keep: usize,
    kept: BTreeMap<Version, Arc<Path>>,
}

fn name(version: Version) -> String {
    format!("v{version:010}")
}

impl Releases {
    /// Opens or creates `dir`. At most `keep` folders, at least one, are kept in addition to held
    /// ones. Folders of an earlier process count; incomplete ones are removed.
    pub(crate) fn open(dir: &Path, keep: usize) -> io::Result<Self> {
        atomic_file::create_folder(dir)?;
        let dir = dir.canonicalize()?;
        atomic_file::remove_leftovers(&dir)?;
        let mut kept = BTreeMap::new();
        for entry in std::fs::read_dir(&dir)? {
            let entry = entry?;
            let called = entry.file_name().to_string_lossy().into_owned();
            match called.strip_prefix('v').and_then(|digits| digits.parse().ok()) {
                Some(version) if called == name(version) => drop(kept.insert(version, entry.path().into())),
                _ => {}
            }
        }
        Ok(Releases { dir, keep: keep.max(1), kept })
    }

    /// Writes a folder atomically and removes the oldest ones beyond `keep`. An existing folder of
    /// the version is replaced, because it is another run's. Returns the absolute path.
    pub(crate) fn write<E: From<io::Error>>(
        &mut self,
        version: Version,
        write: impl FnOnce(&Path) -> Result<(), E>,
    ) -> Result<Arc<Path>, E> {
        let (path, writing) = (self.dir.join(name(version)), self.dir.join(format!(".{}.writing", name(version))));
        atomic_file::remove(&writing)?;
        std::fs::create_dir(&writing)?;
        if let Err(error) = write(&writing) {
            // The first error counts.
            atomic_file::remove(&writing).ok();
            return Err(error);
        }
        atomic_file::replace(&writing, &path)?;
        let folder: Arc<Path> = path.into();
        self.kept.insert(version, folder.clone());
        self.prune()?;
        Ok(folder)
    }

    /// Removes the oldest folders beyond `keep` that are not held.
    fn prune(&mut self) -> io::Result<()> {
        let mut too_many = self.kept.len().saturating_sub(self.keep);
        let mut removed = Ok(());
        self.kept.retain(|_, folder| {
            if too_many == 0 || Arc::strong_count(folder) > 1 {
                return true;
            }
            too_many -= 1;
            atomic_file::remove(folder).map_err(|error| removed = Err(error)).is_err()
        });
        removed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(releases: &mut Releases, version: Version) -> Arc<Path> {
        releases.write(version, |folder| std::fs::write(folder.join("weights"), version.to_string())).unwrap()
    }

    #[test]
    fn the_newest_are_kept_and_those_that_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let mut releases = Releases::open(dir.path(), 2).unwrap();
        let versions = |releases: &Releases| releases.kept.keys().copied().collect::<Vec<_>>();
        let held = put(&mut releases, 1);
        (2..=5).for_each(|version| drop(put(&mut releases, version)));
        assert_eq!(versions(&releases), [1, 5], "one is held, and two are kept in all");
        assert!(held.join("weights").exists() && held.ends_with("v0000000001"));
        drop(held);
        drop(put(&mut releases, 6));
        assert_eq!(versions(&releases), [5, 6]);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2, "nothing else is left there");
    }

    #[test]
    fn a_folder_is_there_whole_or_not_at_all() {
        let dir = tempfile::tempdir().unwrap();
        let mut releases = Releases::open(dir.path(), 2).unwrap();
        let failed = releases.write(3, |folder| {
            std::fs::write(folder.join("half"), "")?;
            Err::<(), _>(io::Error::other("the disk is full"))
        });
        assert!(failed.is_err() && std::fs::read_dir(dir.path()).unwrap().next().is_none());
        for leftover in [".v0000000004.writing", ".v0000000002.replaced"] {
            std::fs::create_dir(dir.path().join(leftover)).unwrap();
        }
        drop(put(&mut releases, 2));
        drop(put(&mut releases, 2));
        let reopened = Releases::open(dir.path(), 2).unwrap();
        assert!(reopened.kept.into_keys().eq([2]));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "leftovers are deleted");
    }
}
