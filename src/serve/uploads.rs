//! Weights that a client sends, for servers without a disk in common with it: begin an upload, send
//! the pieces of its files, and end it with their checksums. Only then it has a folder to load.
//!
//! A client chooses file names and sizes, so names are checked and sizes bounded by the model's.

use std::collections::{BTreeMap, VecDeque};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::{Path as Place, State};
use parking_lot::Mutex;
use serde::Deserialize;
use serde_json::json;
use sha2::{Digest, Sha256};
use tempfile::TempDir;

use super::control::blocking;
use super::reply::{self, Refusal, Reply};
use super::shared::Shared;
use crate::env::protocol;
use crate::model::{Layout, ModelConfig};

/// Uploads that are kept: the one that is loaded, and the next.
const KEPT: usize = 2;

/// Most files of an upload.
const FILES: usize = 1000;

/// Bytes of an upload beyond those of the weights, for headers and small files.
const SLACK: u64 = 64 << 20;

pub(super) struct Uploads {
    /// Removed when the server ends.
    dir: TempDir,
    /// Most bytes of an upload.
    largest: u64,
    /// The newest last.
    all: Mutex<VecDeque<Arc<Upload>>>,
}

struct Upload {
    id: String,
    folder: PathBuf,
    /// Length of each file so far; `None` after the end.
    files: Mutex<Option<BTreeMap<String, u64>>>,
}

impl Uploads {
    /// Uploads to a folder of their own in `dir`.
    pub fn new(dir: &Path, model: &ModelConfig) -> io::Result<Self> {
        let dir = tempfile::Builder::new().prefix("rollflow-uploads-").tempdir_in(dir)?;
        // In f32, with an untied head.
        let largest = 4 * Layout::new(&model.untied()).total() as u64 + SLACK;
        Ok(Uploads { dir, largest, all: Mutex::default() })
    }

    fn begin(&self) -> io::Result<Arc<Upload>> {
        let id = protocol::unique();
        let folder = self.dir.path().join(&id);
        let mut all = self.all.lock();
        while all.len() >= KEPT {
            fs::remove_dir_all(&all[0].folder)?;
            all.pop_front();
        }
        fs::create_dir(&folder)?;
        let upload = Arc::new(Upload { id, folder, files: Mutex::new(Some(BTreeMap::new())) });
        all.push_back(upload.clone());
        Ok(upload)
    }

    fn find(&self, id: &str) -> Result<Arc<Upload>, Refusal> {
        let found = self.all.lock().iter().find(|upload| upload.id == id).cloned();
        found.ok_or_else(|| Refusal::new(404, "there is no such upload; it ended, or a later one replaced it"))
    }
}

impl Upload {
    fn write(&self, name: &str, at: u64, piece: &[u8], largest: u64) -> Result<(), String> {
        let mut files = self.files.lock();
        let files = files.as_mut().ok_or("the upload has ended")?;
        let plain = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte));
        if !plain || name.starts_with('.') || name.is_empty() || name.len() > 100 {
            return Err("a file's name has letters, digits, `_`, `-` and `.`, and no `.` in front".to_owned());
        }
        let others: u64 = files.iter().filter(|(other, _)| *other != name).map(|(_, length)| length).sum();
        let end = at.saturating_add(piece.len() as u64);
        if others.saturating_add(end) > largest || (files.len() >= FILES && !files.contains_key(name)) {
            return Err(format!("the model's weights have {largest} bytes at most, in {FILES} files at most"));
        }
        let file = File::options().create(true).write(true).truncate(false).open(self.folder.join(name));
        file.and_then(|file| file.write_all_at(piece, at)).map_err(|error| format!("writing {name}: {error}"))?;
        let length = files.entry(name.to_owned()).or_default();
        *length = end.max(*length);
        Ok(())
    }

    /// Ends the upload if its files have these checksums.
    fn end(&self, sums: &BTreeMap<String, String>) -> Result<(), String> {
        let mut open = self.files.lock();
        let files = open.as_ref().ok_or("the upload has ended")?;
        if !files.keys().eq(sums.keys()) {
            return Err("the checksums are those of other files than were sent".to_owned());
        }
        for (name, sum) in sums {
            let found = file_sum(&self.folder.join(name)).map_err(|error| format!("reading {name}: {error}"))?;
            if found != *sum {
                return Err(format!("{name} has another checksum than was announced: it was damaged on its way; send it again"));
            }
        }
        *open = None;
        Ok(())
    }
}

fn file_sum(path: &Path) -> io::Result<String> {
    let mut sum = Sha256::new();
    io::copy(&mut File::open(path)?, &mut sum)?;
    Ok(format!("{:x}", sum.finalize()))
}

/// Begins an upload.
pub(super) async fn begin(State(shared): State<Arc<Shared>>) -> Reply {
    let upload =
        blocking(move || shared.uploads.begin().map_err(|error| format!("making a folder for an upload: {error}"))).await?;
    Ok(reply::page(&json!({ "success": true, "message": "", "upload": upload.id })))
}

/// Takes a piece of a file: upload, file, first byte.
pub(super) async fn piece(
    State(shared): State<Arc<Shared>>,
    Place((id, name, at)): Place<(String, String, u64)>,
    body: Bytes,
) -> Reply {
    let (upload, largest) = (shared.uploads.find(&id)?, shared.uploads.largest);
    blocking(move || upload.write(&name, at, &body, largest)).await?;
    Ok(reply::success(""))
}

#[derive(Deserialize)]
struct End {
    /// SHA-256 of each file.
    files: BTreeMap<String, String>,
}

/// Verifies an upload, and tells its folder.
pub(super) async fn end(State(shared): State<Arc<Shared>>, Place(id): Place<String>, body: Bytes) -> Reply {
    let (upload, End { files }) = (shared.uploads.find(&id)?, reply::read(&body)?);
    let folder = upload.folder.clone();
    blocking(move || upload.end(&files)).await?;
    Ok(reply::page(&json!({ "success": true, "message": "", "folder": folder })))
}
