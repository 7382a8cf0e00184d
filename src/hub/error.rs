//! Errors of the hub and its cache: each names the repository and what to do.

use std::fmt;
use std::path::PathBuf;

use crate::net::RemoteError;

/// Why something could not be fetched from the hub.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// The name is neither a folder nor an id.
    #[error("{0}")]
    NotFound(NotFound),
    /// Missing from the cache while nothing may be fetched.
    #[error("{0}; it is not fetched, since HF_HUB_OFFLINE is set")]
    Offline(NotFound),
    /// The hub has no such repository, or does not show it to this user.
    #[error(
        "{id} is neither here nor on {hub}{}; check the name",
        if *has_token { ", for the token in use" } else { "; a private one needs a token in HF_TOKEN" }
    )]
    NoRepository {
        /// Requested name.
        id: String,
        /// The hub's address.
        hub: String,
        /// If true, a token was sent.
        has_token: bool,
    },
    /// The repository has no such revision.
    #[error("{id} has no revision {revision:?}; name a branch, a tag or a commit of it")]
    NoRevision {
        /// The repository.
        id: String,
        /// Requested revision.
        revision: String,
    },
    /// The repository's owners ask for an agreement first.
    #[error(
        "{id} is gated: accept its terms at {hub}/{id}, then {}",
        if *has_token { "use a token of that account in HF_TOKEN" } else { "set HF_TOKEN to a token of that account" }
    )]
    Gated {
        /// The repository.
        id: String,
        /// The hub's address.
        hub: String,
        /// If true, a token was sent.
        has_token: bool,
    },
    /// The repository does not hold what was asked of it.
    #[error("{id} {problem}")]
    Lacks {
        /// The repository.
        id: String,
        /// Missing and present files.
        problem: String,
    },
    /// Download that differs from the hub's announcement.
    #[error("{file} of {id} arrived damaged: its checksum is another than the hub's; try again")]
    Damaged {
        /// The repository.
        id: String,
        /// The file.
        file: String,
    },
    /// Another process holds the lock on a file, and does not get on with it.
    #[error(
        "{holder} holds the lock on {file} of {id}, of which nothing arrived for {seconds} s; end that process, or delete {} \
         if there is none",
        .lock.display()
    )]
    Locked {
        /// The repository.
        id: String,
        /// The file.
        file: String,
        /// The process that holds the lock, as far as it left its name.
        holder: String,
        /// The lock.
        lock: PathBuf,
        /// The time without progress.
        seconds: u64,
    },
    /// The hub could not be asked.
    #[error("{0}; or set HF_HUB_OFFLINE=1 to use only what is here, or HF_ENDPOINT to another hub")]
    Remote(#[from] RemoteError),
    /// The cache can't be written.
    #[error("writing {}: {source}; HF_HOME names another folder for the cache", .path.display())]
    Io {
        /// Path of the file or folder.
        path: PathBuf,
        /// Cause.
        source: std::io::Error,
    },
}

/// A model that is neither a folder nor in the cache.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct NotFound {
    /// Requested name.
    pub name: String,
    /// Description of the places that were searched.
    pub looked: String,
    /// If true, the hub may have the model.
    pub is_id: bool,
}

impl fmt::Display for NotFound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let NotFound { name, looked, is_id } = self;
        write!(f, "{name}, {looked}")?;
        match name.split_once('@') {
            _ if !is_id => Ok(()),
            Some((id, revision)) => write!(f, "; to fetch it: hf download {id} --revision {revision}"),
            None => write!(f, "; to fetch it: hf download {name}"),
        }
    }
}
