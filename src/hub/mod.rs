//! Models and data sets by their ids: from the local cache of the Hugging Face hub, or fetched into
//! it on first use.
//!
//! [`Cache`] only looks; [`Hub`] fetches files that the cache lacks, unless `HF_HUB_OFFLINE` is
//! set.
//!
//! Fetching is written on [`net`](crate::net) instead of the crate hf-hub, whose version 1.1 was
//! read for these points:
//! - It sends `HEAD` requests through a reqwest client of its own (`no_redirect_client`), also if
//!   it is given one. The certificates of `net.ca_file` do not reach that client. Here all requests
//!   share one client, one TLS and proxy configuration, one retry policy with `Retry-After`, and
//!   one kind of error.
//! - It reads none of `HF_ENDPOINT`, `HF_TOKEN`, `HF_HOME` and `HF_HUB_OFFLINE`, and its default
//!   cache is relative to the working directory.
//! - It downloads an interrupted file again from its first byte, and compares no checksum. Here a
//!   download is resumed, and compared with the hub's SHA-256.
//! - It writes `refs/REVISION` in place, and a process that waits for a lock names no holder.
//!
//! Both pin a revision to its commit when it is first resolved.

mod access;
mod cache;
mod download;
mod error;
mod fetch;
mod store;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};

pub use access::Hub;
pub(crate) use cache::snapshot;
pub use cache::{Cache, CachedModel, RepoKind};
pub use error::{HubError, NotFound};
pub use fetch::Listing;
pub(crate) use fetch::shown;

/// The folder that `name` means: itself if it is one, else the model of that id, from the cache or
/// fetched now.
///
/// # Errors
///
/// [`HubError`] says whether the name, the network or the hub's permission is missing.
pub fn open(name: &Path) -> Result<PathBuf, HubError> {
    open_from(&Hub::of_user(), name)
}

/// [`open`] with a hub of one's own.
pub fn open_from(hub: &Hub, name: &Path) -> Result<PathBuf, HubError> {
    match locate_in(hub.cache(), name) {
        Ok(folder) => Ok(folder),
        Err(NotFound { name, is_id: true, .. }) => hub.model(&name),
        Err(missing) => Err(HubError::NotFound(missing)),
    }
}

/// The folder that `name` means: itself if it is one, else the hub's cached model of that id.
/// Fetches nothing.
pub fn locate(name: &Path) -> Result<PathBuf, NotFound> {
    locate_in(&Cache::of_user(), name)
}

/// [`locate`] with a cache of one's own.
pub fn locate_in(cache: &Cache, name: &Path) -> Result<PathBuf, NotFound> {
    if name.exists() {
        return Ok(name.to_owned());
    }
    match name.to_str().filter(|name| is_id(name)) {
        Some(id) => cache.model(id),
        None => {
            let looked = "which does not exist; paths are relative to the folder that the command runs in".to_owned();
            Err(NotFound { name: name.display().to_string(), looked, is_id: false })
        }
    }
}

/// Returns true if the hub may have a model of this name.
fn is_id(name: &str) -> bool {
    let (name, revision) = name.split_once('@').unwrap_or((name, "main"));
    let word = |part: &str| {
        !part.is_empty() && !part.starts_with('.') && part.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c))
    };
    let parts: Vec<&str> = name.split('/').collect();
    parts.len() == 2 && parts.iter().all(|part| word(part)) && revision.split('/').all(word)
}
