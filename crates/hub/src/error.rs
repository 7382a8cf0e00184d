//! Errors of the hub and its cache: each names the repository and what to do.

use std::io;
use std::path::{Path, PathBuf};

use rollflow_net::RemoteError;

/// Why something could not be fetched from the hub.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// The name is neither a folder nor an id.
    #[error("{0}")]
    NotFound(String),
    /// The model of an id is not in the cache, or only in part.
    #[error("{0}")]
    NotCached(String),
    /// Missing from the cache while nothing may be fetched.
    #[error("{0}; it is not fetched, since HF_HUB_OFFLINE is set")]
    Offline(String),
    /// The hub has no such repository or revision, or does not show it to this user.
    #[error("{0}")]
    Refused(String),
    /// The repository does not hold what was asked of it.
    #[error("{0} {1}")]
    Lacks(String, String),
    /// A file that differs from the hub's checksum, and its repository.
    #[error("{0} of {1} arrived damaged: its checksum is another than the hub's; try again")]
    Damaged(String, String),
    /// Another process holds the lock on a file, and nothing arrives.
    #[error("{0}")]
    Locked(String),
    /// The hub could not be asked.
    #[error("{0}; or set HF_HUB_OFFLINE=1 to use only what is here, or HF_ENDPOINT to another hub")]
    Remote(#[from] RemoteError),
    /// The cache can't be written.
    #[error("writing {}: {}; HF_HOME names another folder for the cache", .0.display(), .1)]
    Io(PathBuf, #[source] io::Error),
}

pub(super) fn io(path: &Path) -> impl Fn(io::Error) -> HubError {
    let path = path.to_owned();
    move |source| HubError::Io(path.clone(), source)
}
