//! Locks on folders, as empty files that a process holds. A lock goes with its process, also when
//! that is killed.

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::fs::OFlags;

/// Takes the lock `path`, which is made if it does not exist. It is held until the file is dropped.
///
/// # Errors
/// [`TryLockError::WouldBlock`] if another process holds it. An error of the file system if `path`
/// is a symbolic link (it is not followed) or cannot be written.
pub fn take(path: &Path) -> Result<File, TryLockError> {
    let lock = open(OpenOptions::new().create(true).truncate(false).write(true), path).map_err(TryLockError::Error)?;
    lock.try_lock()?;
    Ok(lock)
}

/// Returns true if a process holds the lock `path`.
pub fn is_taken(path: &Path) -> bool {
    let lock = open(OpenOptions::new().read(true), path);
    lock.is_ok_and(|lock| matches!(lock.try_lock_shared(), Err(TryLockError::WouldBlock)))
}

fn open(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    // Non-blocking: opening a named pipe would wait for its other end.
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    options.custom_flags(flags.bits() as i32).open(path).map_err(|error| match path.symlink_metadata() {
        Ok(metadata) if metadata.is_symlink() => {
            io::Error::new(error.kind(), "it is a symbolic link, which a lock never is; delete it")
        }
        _ => error,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_is_held_once_and_never_through_a_link() {
        let folder = tempfile::tempdir().unwrap();
        let (path, link, outside) = (folder.path().join("lock"), folder.path().join("link"), folder.path().join("outside"));
        assert!(!is_taken(&path));
        let held = take(&path).unwrap();
        assert!(is_taken(&path) && matches!(take(&path), Err(TryLockError::WouldBlock)));
        drop(held);
        assert!(!is_taken(&path));
        std::os::unix::fs::symlink(&outside, &link).unwrap();
        let Err(TryLockError::Error(refused)) = take(&link) else { panic!("a link is no lock") };
        let refused = refused.to_string();
        assert!(refused.contains("symbolic link") && !outside.exists(), "{refused}");
    }
}
