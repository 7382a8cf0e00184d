//! Files that a fetch writes into the cache: locks, links, references and lists.

use std::fs::{File, TryLockError};
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use super::HubError;
use super::error::io;
use super::fetch::Remote;
use rollflow_util::{atomic_file, lock_file, reading};

/// Time between two looks at a lock that another process holds.
const LOOK: Duration = Duration::from_millis(250);

/// Time between two lines that name the holder of a lock.
const TELL: Duration = Duration::from_secs(30);

/// Longest name of a holder that is read, in bytes.
const NAME: u64 = 256;

/// Takes the lock `path` on `what`, a file of a repository: the one that the hub's Python tools take.
/// If another process holds it, waits for as long as `part`, the file that is downloaded, grows:
/// after `stall` without a new byte the wait ends with [`HubError::Locked`]. Warnings name the holder.
pub(super) async fn take_lock(path: &Path, what: &str, part: &Path, stall: Duration) -> Result<File, HubError> {
    let folder = path.parent().unwrap_or(path);
    std::fs::create_dir_all(folder).map_err(io(folder))?;
    let size = || std::fs::metadata(part).map_or(0, |metadata| metadata.len());
    let (mut seen, mut grew, mut told) = (size(), Instant::now(), None::<Instant>);
    loop {
        match lock_file::take(path) {
            Ok(mut lock) => {
                // For the messages of others; the lock holds without it.
                drop(lock.set_len(0).and_then(|()| lock.write_all(this_process().as_bytes())));
                return Ok(lock);
            }
            Err(TryLockError::WouldBlock) => {}
            Err(TryLockError::Error(error)) => return Err(io(path)(error)),
        }
        let (now, size) = (Instant::now(), size());
        if size != seen {
            (seen, grew) = (size, now);
        }
        if now.duration_since(grew) >= stall {
            return Err(HubError::Locked(format!(
                "{} holds the lock on {what}, of which nothing arrived for {} s; end that process, or delete {} if there is \
                     none",
                holder(path),
                stall.as_secs(),
                path.display()
            )));
        }
        if told.is_none_or(|at| now.duration_since(at) >= TELL) {
            told = Some(now);
            let (holder, size) = (holder(path), size / 1_000_000);
            tracing::warn!("Waiting for {holder} to fetch {what} ({size} MB so far); Ctrl-C ends the wait");
        }
        tokio::time::sleep(LOOK).await;
    }
}

fn this_process() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname");
    format!("process {} on {}", std::process::id(), host.as_deref().map_or("this machine", str::trim))
}

/// The holder of a lock, if it left its name there. The hub's Python tools leave none.
fn holder(lock: &Path) -> String {
    let name = reading::read(lock, NAME).ok().and_then(|name| String::from_utf8(name).ok());
    let plain =
        |name: &String| name.starts_with("process ") && name.chars().all(|c| c.is_ascii_alphanumeric() || " .-_".contains(c));
    name.filter(plain).unwrap_or_else(|| "another process".to_owned())
}

/// A file's path must stay inside of its snapshot.
pub(super) fn check_path(path: &str) -> Result<(), String> {
    let inside = |part: &str| !part.is_empty() && part != "." && part != ".." && !part.contains(['\\', '\0']);
    if path.split('/').all(inside) { Ok(()) } else { Err("the name of a file that leads out of its folder".to_owned()) }
}

/// Points a snapshot's file to its blob, by a relative link.
pub(super) fn link(snapshot: &Path, remote: &Remote) -> Result<(), HubError> {
    let path = snapshot.join(&remote.path);
    let folder = path.parent().unwrap_or(snapshot);
    std::fs::create_dir_all(folder).map_err(io(folder))?;
    let depth = remote.path.split('/').count() + 1;
    let target = Path::new(&"../".repeat(depth)).join("blobs").join(&remote.etag);
    if std::fs::read_link(&path).is_ok_and(|old| old == target) {
        return Ok(());
    }
    atomic_file::link(&path, &target).map_err(io(&path))
}

/// Writes a reference or a list of files.
pub(super) fn write(path: &Path, bytes: &[u8]) -> Result<(), HubError> {
    let folder = path.parent().unwrap_or(path);
    std::fs::create_dir_all(folder).map_err(io(folder))?;
    atomic_file::write(path, bytes).map_err(io(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn take(root: &Path, stall: u64) -> Result<File, HubError> {
        let (path, part) = (root.join(".locks/models--org--thing/abc.lock"), root.join("abc.incomplete"));
        take_lock(&path, "model.safetensors of org/thing", &part, Duration::from_millis(stall)).await
    }

    #[tokio::test]
    async fn a_lock_whose_holder_makes_no_progress_ends_the_wait_and_names_the_holder() {
        let root = tempfile::tempdir().unwrap();
        let held = take(root.path(), 0).await.unwrap();
        let error = take(root.path(), 300).await.unwrap_err().to_string();
        let me = format!("process {} on ", std::process::id());
        for part in [me.as_str(), "model.safetensors of org/thing", "nothing arrived for 0 s", "abc.lock"] {
            assert!(error.contains(part), "{part}: {error}");
        }
        drop(held);
        take(root.path(), 0).await.unwrap();
    }

    #[tokio::test]
    async fn a_lock_is_waited_for_while_the_file_grows() {
        let root = tempfile::tempdir().unwrap();
        let held = take(root.path(), 0).await.unwrap();
        let growing = root.path().join("abc.incomplete");
        let other = std::thread::spawn(move || {
            for size in 1..=8 {
                std::thread::sleep(Duration::from_millis(200));
                std::fs::write(&growing, vec![0; size]).unwrap();
            }
            drop(held);
        });
        // Longer than the pause between two pieces, shorter than all of them.
        take(root.path(), 1000).await.unwrap();
        other.join().unwrap();
    }
}
