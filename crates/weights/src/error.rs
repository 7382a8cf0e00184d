//! Errors of artefacts and of the stores that carry them.

use std::io;
use std::path::{Path, PathBuf};

use super::Id;

/// Reason why an artefact could not be written, read or found. Names of stores are without secrets.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    /// The text is no address of a store.
    #[error(
        "{address:?} is no address of a store ({why}); write it as s3://bucket/folder, gs://bucket/folder, az://container/folder or file:///folder"
    )]
    Address {
        /// The text, without secrets.
        address: String,
        /// The problem.
        why: String,
    },
    /// The store failed, after retries.
    #[error("{store}: {what} failed: {why}; check that it is reachable and that this machine's credentials may do that")]
    Store {
        /// The store.
        store: String,
        /// The operation and the object.
        what: String,
        /// The store's error.
        why: String,
    },
    /// A file of this machine could not be read or written.
    #[error("{}: {error}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The file system's error.
        error: io::Error,
    },
    /// A file of weights cannot be read as such.
    #[error("{}: {why}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The problem.
        why: String,
    },
    /// An artefact differs from its checksums, or misses a part. It was not loaded.
    #[error(
        "{store}, {id}: {part} is damaged: {why}; it was not loaded. The next version replaces it; delete it if it is the newest"
    )]
    Damaged {
        /// The store.
        store: String,
        /// The artefact.
        id: Id,
        /// The tensor, file or object.
        part: String,
        /// The difference.
        why: String,
    },
    /// The store holds no complete artefact.
    #[error("{store} holds no complete version yet; check the address, or wait for the first")]
    Empty {
        /// The store.
        store: String,
    },
    /// The store does not hold this version.
    #[error("{store} holds no version {version}; it has {has}")]
    Missing {
        /// The store.
        store: String,
        /// The version.
        version: u64,
        /// Versions that are there.
        has: String,
    },
    /// Another process has begun to write there later.
    #[error(
        "{store}: another process has begun to write there (writer {newer}; this one is {own}): two runs must not share an address. \
         Stop one, or give it another address"
    )]
    Superseded {
        /// The store.
        store: String,
        /// Number of this writer.
        own: u64,
        /// Number of the other.
        newer: u64,
    },
}

impl WeightsError {
    pub(crate) fn io(path: impl AsRef<Path>) -> impl FnOnce(io::Error) -> Self {
        move |error| WeightsError::Io { path: path.as_ref().to_owned(), error }
    }
}
