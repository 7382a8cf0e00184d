//! Weights that this server brings from a store, verified by their checksums: `--store ADDRESS`.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tempfile::TempDir;

use crate::weights::{Puller, Store, WEIGHTS, WeightsError};

/// Versions that are kept: the one that is loaded, and the next, which may be a delta to it.
const KEPT: usize = 2;

pub(super) struct Pulls {
    /// Address in requests.
    address: String,
    puller: Arc<Puller>,
    /// Removed when the server ends.
    _dir: TempDir,
}

impl Pulls {
    /// Pulls from the run's store `store` into a new folder in `dir`.
    pub fn new(store: &Store, dir: &Path) -> io::Result<Self> {
        let dir = tempfile::Builder::new().prefix("rollflow-pulled-").tempdir_in(dir)?;
        let puller = Puller::open(store.below(WEIGHTS), dir.path(), KEPT).map_err(io::Error::other)?;
        Ok(Pulls { address: store.name().to_owned(), puller: Arc::new(puller), _dir: dir })
    }

    /// The puller, if `path` is the store's address.
    pub fn of(&self, path: &Path) -> Option<Arc<Puller>> {
        let asked = path.to_str()?.trim_end_matches('/');
        (asked == self.address).then(|| self.puller.clone())
    }
}

/// Brings a version, or else the newest, to this machine. Returns its number and folder. Blocks.
pub(super) fn pull(puller: &Puller, version: Option<u64>) -> Result<(u64, PathBuf), WeightsError> {
    let pulled = puller.pull(version)?;
    Ok((pulled.id.version, pulled.folder))
}
