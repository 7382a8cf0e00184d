//! Files and folders that outlive a run (law C3): whole under their name, or not there.
//!
//! [`write()`] puts the content into a temporary file in the same folder, brings it to the disk,
//! renames it and brings the folder to the disk. [`publish`] does the same with a folder or a file
//! that is written already. A reader never sees a half of either. After an error, which is one of
//! the file system, what was there before is still there, unchanged.
//!
//! A temporary file is created exclusively under a random name: no symbolic link is followed, and
//! two writers of one file do not meet. A process that is killed leaves at most a hidden
//! `.NAME….writing` or `.NAME.replaced`, which [`remove_leftovers`] deletes or puts back.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::Path;

use tempfile::{Builder, TempPath};

/// Name endings of leftovers, which begin with a dot.
const LEFTOVERS: [&str; 3] = [".writing", ".replaced", ".removed"];

/// Replaces the file at `path` by `content`, atomically and durably. The folder must exist.
pub fn write(path: &Path, content: impl AsRef<[u8]>) -> io::Result<()> {
    write_with(path, |file| file.write_all(content.as_ref()))
}

/// Replaces the file at `path` by content that `fill` writes in pieces, like [`write()`]. An error of
/// `fill` is returned.
pub fn write_with(path: &Path, fill: impl FnOnce(&mut BufWriter<&mut File>) -> io::Result<()>) -> io::Result<()> {
    put_file(path, fill, File::sync_all)?;
    sync_entry(path)
}

/// Replaces a file atomically without syncing: for a file in a folder that is [published](publish)
/// as a whole, or [replaced](replace).
pub fn write_unsynced(path: &Path, content: impl AsRef<[u8]>) -> io::Result<()> {
    put_file(path, |file| file.write_all(content.as_ref()), |_| Ok(()))
}

fn put_file(
    path: &Path,
    fill: impl FnOnce(&mut BufWriter<&mut File>) -> io::Result<()>,
    settle: impl FnOnce(&File) -> io::Result<()>,
) -> io::Result<()> {
    let prefix = hidden(path, "")?;
    // Unlike `tempfile_in`, errors do not name the temporary file, and the umask decides who may read it.
    let make = |path: &Path| File::options().write(true).create_new(true).open(path);
    let mut temporary = Builder::new().prefix(&prefix).suffix(".writing").make_in(parent(path), make)?;
    let mut out = BufWriter::new(temporary.as_file_mut());
    fill(&mut out)?;
    out.flush()?;
    drop(out);
    let (file, temporary) = temporary.into_parts();
    settle(&file)?;
    rename(temporary, path)
}

/// Replaces the file or link at `path` by a symbolic link to `target`, atomically and durably. The
/// folder must exist.
#[cfg(unix)]
pub fn link(path: &Path, target: &Path) -> io::Result<()> {
    let prefix = hidden(path, "")?;
    let mut builder = Builder::new();
    let make = |path: &Path| std::os::unix::fs::symlink(target, path);
    rename(builder.prefix(&prefix).suffix(".writing").make_in(parent(path), make)?.into_temp_path(), path)?;
    sync_entry(path)
}

fn rename(temporary: TempPath, path: &Path) -> io::Result<()> {
    fs::rename(&temporary, path)?;
    // It has another name now, and must not be deleted under this one.
    temporary.keep().map_err(|error| error.error)?;
    Ok(())
}

/// Hidden name of a file or folder that stands for `path`: `.NAME.` and an ending.
fn hidden(path: &Path, ending: &str) -> io::Result<String> {
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    Ok(format!(".{}.{ending}", name.to_string_lossy()))
}

/// Moves the finished folder or file `from` to `to`, which is in a folder on the same disk,
/// atomically and durably.
///
/// A folder that is at `to` is replaced. It is renamed to `.NAME.replaced` first, since a folder
/// cannot be renamed over one that holds files, and deleted at the end. After an error it is put back
/// where that is possible.
pub fn publish(from: &Path, to: &Path) -> io::Result<()> {
    if from.is_dir() { sync_all(from) } else { sync(from) }?;
    put(from, to, sync_entry)
}

/// Moves `from` to `to` as [`publish`] does, atomically, without syncing: for files that a run
/// hands to other processes and writes again after a crash.
pub fn replace(from: &Path, to: &Path) -> io::Result<()> {
    put(from, to, |_| Ok(()))
}

fn put(from: &Path, to: &Path, settle: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
    let aside = to.with_file_name(hidden(to, "replaced")?);
    remove(&aside)?;
    let replaces = from.is_dir() && to.symlink_metadata().is_ok();
    if replaces {
        fs::rename(to, &aside)?;
    }
    if let Err(error) = fs::rename(from, to) {
        if replaces {
            // The error that counts is the first.
            fs::rename(&aside, to).ok();
        }
        return Err(error);
    }
    settle(to)?;
    remove(&aside)
}

/// Makes `path` and the folders above it, durably. An existing folder is unchanged.
pub fn create_folder(path: &Path) -> io::Result<()> {
    if path.as_os_str().is_empty() || path.is_dir() {
        return Ok(());
    }
    create_folder(parent(path))?;
    match fs::create_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => Ok(()),
        made => made.and_then(|()| sync_entry(path)),
    }
}

/// Makes the folder of `file` and the folders above it, as [`create_folder`] does.
pub fn create_folder_of(file: &Path) -> io::Result<()> {
    create_folder(parent(file))
}

/// Deletes what a killed process left half written in `folder`, and puts a replaced folder back that
/// nothing has replaced yet. The caller must be the only one that writes there. A folder that does
/// not exist holds no leftovers.
pub fn remove_leftovers(folder: &Path) -> io::Result<()> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        let Some(hidden) = name.strip_prefix('.').filter(|name| LEFTOVERS.iter().any(|ending| name.ends_with(ending))) else {
            continue;
        };
        match hidden.strip_suffix(".replaced").map(|name| folder.join(name)) {
            // Killed between the two renames: nothing has taken the place of the old folder yet.
            Some(to) if to.symlink_metadata().is_err() => fs::rename(entry.path(), &to).and_then(|()| sync_entry(&to))?,
            _ => remove(&entry.path())?,
        }
    }
    Ok(())
}

/// Deletes a file, a link or a folder with all that is in it. One that does not exist is no error.
pub fn remove(path: &Path) -> io::Result<()> {
    let removed = match path.symlink_metadata() {
        Ok(metadata) if metadata.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(error) => Err(error),
    };
    match removed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// Brings a file, or the entries of a folder, to the disk.
pub fn sync(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

/// Brings the name of `path` to the disk, which is an entry of the folder that it is in.
pub fn sync_entry(path: &Path) -> io::Result<()> {
    sync(parent(path))
}

/// Brings a folder and everything in it to the disk.
fn sync_all(folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let kind = entry.file_type()?;
        if kind.is_dir() {
            sync_all(&entry.path())?;
        } else if kind.is_file() {
            sync(&entry.path())?;
        }
    }
    sync(folder)
}

/// The folder that `path` is in.
fn parent(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<String> =
            fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_file_is_replaced_whole_and_nothing_else_is_left() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        write(&path, "one").unwrap();
        write_unsynced(&path, "two").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "two");
        let failed = write_with(&path, |file| {
            file.write_all(b"half")?;
            Err(io::Error::other("the disk is full"))
        });
        assert_eq!(failed.unwrap_err().to_string(), "the disk is full");
        let failed = write(&folder.path().join("absent/file"), "lost").unwrap_err().to_string();
        assert!(!failed.contains(".writing"), "{failed}");
        assert_eq!((fs::read_to_string(&path).unwrap().as_str(), names(folder.path())), ("two", vec!["file".to_owned()]));
    }

    #[cfg(unix)]
    #[test]
    fn no_symbolic_link_is_followed_and_the_umask_decides_who_may_read() {
        use std::os::unix::fs::{PermissionsExt, symlink};
        let folder = tempfile::tempdir().unwrap();
        let (outside, path) = (folder.path().join("outside"), folder.path().join("link"));
        fs::write(&outside, "kept").unwrap();
        symlink(&outside, &path).unwrap();
        write(&path, "new").unwrap();
        assert_eq!((fs::read_to_string(&outside).unwrap(), fs::read_to_string(&path).unwrap()), ("kept".into(), "new".into()));
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode();
        assert_eq!(mode(&path), mode(&outside), "as a file that anything else makes");
    }

    #[cfg(unix)]
    #[test]
    fn a_link_replaces_a_file_or_a_link_and_nothing_else_is_left() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        write(&path, "a file").unwrap();
        for target in ["../one", "../two"] {
            link(&path, Path::new(target)).unwrap();
            assert_eq!(fs::read_link(&path).unwrap(), Path::new(target));
        }
        assert_eq!(names(folder.path()), ["file"]);
    }

    #[test]
    fn a_folder_is_replaced_whole_and_leftovers_are_deleted() {
        let root = tempfile::tempdir().unwrap();
        let (from, to) = (root.path().join(".model.writing"), root.path().join("model"));
        for (content, put) in [("one", publish as fn(&Path, &Path) -> io::Result<()>), ("two", publish), ("three", replace)] {
            create_folder(&from.join("deep/er")).unwrap();
            fs::write(from.join("deep/er/file"), content).unwrap();
            put(&from, &to).unwrap();
            assert_eq!(fs::read_to_string(to.join("deep/er/file")).unwrap(), content);
        }
        assert_eq!(names(root.path()), ["model"]);
        fs::create_dir(root.path().join(".step_000003.removed")).unwrap();
        fs::write(root.path().join(".run.json.a1b2c3.writing"), "").unwrap();
        fs::write(root.path().join("notes.writing"), "").unwrap();
        remove_leftovers(root.path()).unwrap();
        assert_eq!(names(root.path()), ["model", "notes.writing"], "what is not hidden is somebody's");
        remove_leftovers(&root.path().join("absent")).unwrap();
    }

    /// Law C3: a kill between the two renames of `publish` loses neither folder.
    #[test]
    fn a_folder_that_was_moved_aside_and_not_replaced_is_put_back() {
        let root = tempfile::tempdir().unwrap();
        let (aside, to) = (root.path().join(".model.replaced"), root.path().join("model"));
        fs::create_dir(&aside).unwrap();
        fs::write(aside.join("file"), "old").unwrap();
        remove_leftovers(root.path()).unwrap();
        assert_eq!(fs::read_to_string(to.join("file")).unwrap(), "old");
        fs::create_dir(&aside).unwrap();
        remove_leftovers(root.path()).unwrap();
        assert_eq!(names(root.path()), ["model"]);
    }
}
