//! Sends a folder of weights to a server without a disk in common, in the protocol of `rollflow serve`.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::server::{LIMIT, Server, text};
use super::{Fault, RemoteError};

/// Bytes of a request.
const PIECE: u64 = 16 << 20;

/// Sends the files of `folder`, verified by their checksums. Returns their folder on the server's
/// host. Costs one piece of a file in memory.
pub(super) async fn send(server: &Server, folder: &Path) -> Result<PathBuf, RemoteError> {
    let begun = server.post_success("/uploads", &Value::Null).await?;
    let id = text(&begun, "upload").ok_or_else(|| server.nonsense("/uploads", "no id", &begun))?;
    let mut sums = BTreeMap::new();
    for (name, path) in files(folder).map_err(|error| local(server, folder, &error))? {
        let mut file = File::open(&path).map_err(|error| local(server, &path, &error))?;
        let (mut sum, mut at) = (Sha256::new(), 0);
        loop {
            let read = move || {
                let mut piece = Vec::new();
                let read = file.by_ref().take(PIECE).read_to_end(&mut piece);
                sum.update(&piece);
                read.map(|_| (file, sum, piece))
            };
            let read = tokio::task::spawn_blocking(read).await.map_err(std::io::Error::other);
            let piece;
            (file, sum, piece) = read.and_then(|read| read).map_err(|error| local(server, &path, &error))?;
            let length = piece.len() as u64;
            if length == 0 && at > 0 {
                break;
            }
            server.client.post_bytes(&format!("/uploads/{id}/{name}/{at}"), piece, LIMIT).await?;
            at += length;
            if length < PIECE {
                break;
            }
        }
        sums.insert(name, format!("{:x}", sum.finalize()));
    }
    let path = format!("/uploads/{id}");
    let ended = server.post_success(&path, &json!({ "files": sums })).await?;
    text(&ended, "folder").map(PathBuf::from).ok_or_else(|| server.nonsense(&path, "no folder", &ended))
}

/// Files that hold weights and their description, by name.
fn files(folder: &Path) -> std::io::Result<BTreeMap<String, PathBuf>> {
    let mut files = BTreeMap::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json") || name == "adapter_config.json" {
            files.insert(name, path);
        }
    }
    Ok(files)
}

fn local(server: &Server, path: &Path, error: &std::io::Error) -> RemoteError {
    server.client.fault(Fault::File(format!("{}: {error}", path.display())))
}
