//! Versions of a server that trains, as adapters for engines elsewhere.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;
use rollflow_tinker::{Connection, TinkerError};

use super::address::unpack;
use super::backend::SamplerWeights;
use super::service::TinkerService;
use super::teacher::{Scored, log_probs};
use crate::data::Version;
use crate::engine::remote::sync::{Releases, Update};
use crate::net::{RemoteError, Tasks};

/// Downloads each version of a [`TinkerBackend`](super::TinkerBackend) to a folder, in PEFT's format,
/// with the server's own scores of some texts, by which engines are verified.
pub struct TinkerExporter {
    connection: Arc<Connection>,
    tasks: Tasks,
    dir: PathBuf,
    releases: Mutex<Releases>,
    texts: Vec<Vec<u32>>,
    tolerance: f64,
}

/// Error of an export.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// The folder can't be written.
    #[error("writing adapters for engines: {0}; they need a folder that engines can read, with room for engine.keep versions")]
    Io(#[from] io::Error),
    /// The download failed.
    #[error("downloading adapters for engines: {0}")]
    Server(#[from] TinkerError),
    /// The server's scores failed.
    #[error("scoring the probe of a version: {0}")]
    Probe(#[from] RemoteError),
    /// The version was not saved to be downloaded.
    #[error("the version has no path on the server, by which it is downloaded")]
    Unnamed,
}

impl TinkerExporter {
    /// Keeps the newest `keep` versions in `dir`. Engines score `texts`, with a tolerance of `tolerance`
    /// nats on average. Without texts, they are not verified.
    ///
    /// # Errors
    /// The folder can't be made, or the machine gives no threads.
    pub fn new(service: &TinkerService, dir: &Path, keep: usize, texts: Vec<Vec<u32>>, tolerance: f64) -> io::Result<Self> {
        let (connection, releases) = (service.connection().clone(), Mutex::new(Releases::open(dir, keep)?));
        Ok(TinkerExporter { connection, tasks: Tasks::new()?, dir: dir.to_owned(), releases, texts, tolerance })
    }

    /// Downloads a version, and asks the server for its scores. Blocks.
    ///
    /// # Errors
    /// The download, the folder, or the server's scores fail.
    pub fn export(&self, version: Version, weights: &SamplerWeights) -> Result<Update, ExportError> {
        let path = weights.path.as_deref().ok_or(ExportError::Unnamed)?;
        let mut archive = tempfile::tempfile_in(&self.dir)?;
        self.tasks.block_on(self.connection.archive(path, &mut archive))?;
        let folder = self.releases.lock().write(version, |folder| unpack(archive, folder).map_err(ExportError::from))?;
        let expected = self.texts.iter().map(|text| {
            let scores = self.tasks.block_on(log_probs(&self.connection, Scored::Path(path), text))?;
            Ok(scores.into_iter().map(f64::from).collect())
        });
        let (expected, texts, tolerance) = (expected.collect::<Result<_, ExportError>>()?, self.texts.clone(), self.tolerance);
        Ok(Update { adapter: true, changed: true, texts, expected, tolerance, ..Update::unprobed(version, folder) })
    }
}
