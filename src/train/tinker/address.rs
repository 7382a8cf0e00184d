//! Where the weights of a checkpoint are: on the server that trained them.

use std::fs::File;
use std::io::{self, BufReader, Read, Seek};
use std::path::Path;

use rollflow_tinker::{Connection, Patience};
use serde::{Deserialize, Serialize};

use crate::net::{Endpoint, Tasks};
use crate::train::TrainError;
use crate::util::atomic_file;

/// File of a checkpoint that names its weights on the server.
pub const ADDRESS: &str = "tinker.json";

/// First bytes of what gzip compressed.
const GZIP: [u8; 2] = [0x1f, 0x8b];

/// Place of a checkpoint's weights.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Address {
    /// Address of the server.
    pub server: String,
    /// Path of the weights and the optimizer on it.
    pub path: String,
    /// Path of the weights for sampling, which can be downloaded.
    #[serde(default)]
    pub sampler_path: Option<String>,
    /// The model that was trained.
    pub base_model: String,
    /// Rank of the adapters.
    pub rank: usize,
}

/// Returns true if a checkpoint of a [`TinkerBackend`](super::TinkerBackend) is of adapters, and false if
/// all weights were trained.
///
/// # Errors
/// The folder is no such checkpoint.
pub fn has_adapters(checkpoint: &Path) -> Result<bool, TrainError> {
    Ok(address_of(checkpoint)?.rank > 0)
}

pub(super) fn address_of(checkpoint: &Path) -> Result<Address, TrainError> {
    let file = checkpoint.join(ADDRESS);
    let text = std::fs::read(&file).map_err(TrainError::io(&file))?;
    serde_json::from_slice(&text).map_err(|error| TrainError::malformed(&file, error))
}

/// Downloads the weights of a checkpoint from the server that has them, unpacked into `to`, which
/// must not exist. `key` is an API key. Blocks.
///
/// # Errors
/// The folder is no checkpoint of a [`TinkerBackend`](super::TinkerBackend), or the server does not have the weights.
pub fn download(checkpoint: &Path, key: Option<&str>, ca_file: Option<&Path>, to: &Path) -> Result<(), TrainError> {
    let (file, address) = (checkpoint.join(ADDRESS), address_of(checkpoint)?);
    let path = address.sampler_path.ok_or_else(|| TrainError::malformed(&file, "it names no weights for sampling"))?;
    let mut endpoint = Endpoint::new(address.server);
    endpoint.ca_file = ca_file.map(Path::to_owned);
    let tasks = Tasks::new().map_err(TrainError::io(&file))?;
    let folder = to.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let archive = atomic_file::create_folder(folder).and_then(|()| tempfile::tempfile_in(folder));
    let mut archive = archive.map_err(TrainError::io(folder))?;
    tasks.block_on(async { Connection::open(endpoint, key, Patience::default()).await?.archive(&path, &mut archive).await })?;
    unpack(archive, to).map_err(TrainError::io(to))
}

/// Unpacks a tar file, which gzip may have compressed.
pub(super) fn unpack(mut archive: File, to: &Path) -> io::Result<()> {
    let mut first = Vec::new();
    archive.rewind()?;
    archive.by_ref().take(GZIP.len() as u64).read_to_end(&mut first)?;
    archive.rewind()?;
    let archive = BufReader::new(archive);
    match first == GZIP {
        true => tar::Archive::new(flate2::read::GzDecoder::new(archive)).unpack(to),
        false => tar::Archive::new(archive).unpack(to),
    }
}
