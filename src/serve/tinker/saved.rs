//! Routes of training runs and of saved weights: lists, downloads and removals.

use std::io::{self, BufWriter, Write};

use axum::body::{Body, Bytes};
use axum::extract::{Path, State};
use axum::http::header::{CONTENT_TYPE, LOCATION};
use axum::response::IntoResponse;
use futures_util::stream::unfold;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::mpsc::{Sender, channel};

use super::Tinker;
use super::journal::record;
use super::routes::{Of, blocking_refusal, named};
use super::sampling::BASE;
use super::trained::is_name;
use crate::serve::reply::{self, Refusal, Reply};
use crate::util::atomic_file;

/// Longest piece of a download, in bytes.
const PIECE: usize = 1 << 20;

#[derive(Deserialize)]
struct WeightsInfo {
    tinker_path: String,
}

pub(super) async fn weights_info(State(tinker): Of, body: Bytes) -> Reply {
    let WeightsInfo { tinker_path } = reply::read(&body)?;
    let model = tinker_path.strip_prefix("tinker://").and_then(|rest| rest.split('/').next()).unwrap_or_default();
    let missing = |_| Refusal::new(404, format!("there are no weights at {:?}", super::short(&tinker_path)));
    let lora = record(&tinker.ground.models.join(named(model)?)).map_err(missing)?.lora;
    Ok(reply::page(&json!({
        "base_model": tinker.shared.config.name, "is_lora": lora.rank > 0, "lora_rank": lora.rank, "train_unembed": lora.train_unembed,
        "train_mlp": lora.train_mlp, "train_attn": lora.train_attn,
    })))
}

fn run_of(tinker: &Tinker, id: &str, rank: usize) -> Value {
    json!({
        "training_run_id": id, "base_model": tinker.shared.config.name, "model_owner": "default", "is_lora": rank > 0,
        "corrupted": false, "lora_rank": rank, "last_request_time": changed(&tinker.ground.models.join(id)),
    })
}

/// Time of the last change of a folder.
fn changed(folder: &std::path::Path) -> Option<String> {
    let time = std::fs::metadata(folder).and_then(|found| found.modified()).ok()?;
    Some(jiff::Timestamp::try_from(time).ok()?.to_string())
}

pub(super) async fn training_runs(State(tinker): Of) -> Reply {
    let runs: Vec<Value> =
        tinker.models.lock().values().map(|model| run_of(&tinker, &model.record.id, model.record.lora.rank)).collect();
    let count = runs.len();
    Ok(reply::page(&json!({"training_runs": runs, "cursor": {"offset": 0, "limit": count, "total_count": count}})))
}

pub(super) async fn training_run(State(tinker): Of, Path(id): Path<String>) -> Reply {
    let missing = |_| Refusal::new(404, "there is no such training run");
    let found = record(&tinker.ground.models.join(named(&id)?)).map_err(missing)?;
    Ok(reply::page(&run_of(&tinker, &id, found.lora.rank)))
}

pub(super) async fn checkpoints(State(tinker): Of, Path(id): Path<String>) -> Reply {
    let id = named(&id)?;
    let names = |folder: std::path::PathBuf| -> Vec<String> {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        let mut names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.retain(|name| is_name(name));
        names.sort();
        names
    };
    let row = |kind: &str, folder: &str, name: &str, on_disk: &std::path::Path| {
        json!({
            "checkpoint_id": format!("{folder}/{name}"), "checkpoint_type": kind, "time": changed(on_disk),
            "tinker_path": format!("tinker://{id}/{folder}/{name}"),
        })
    };
    let (weights, samplers) = (tinker.ground.models.join(&id).join("weights"), &tinker.ground.samplers);
    let own = format!("{id}.");
    let mut all: Vec<Value> =
        names(weights.clone()).iter().map(|name| row("training", "weights", name, &weights.join(name))).collect();
    let sampled = names(samplers.clone());
    let sampled = sampled.iter().filter_map(|whole| Some((whole, whole.strip_prefix(&own)?)));
    all.extend(sampled.map(|(whole, name)| row("sampler", "sampler_weights", name, &samplers.join(whole))));
    Ok(reply::page(&json!({"checkpoints": all})))
}

fn redirect(tinker: &Tinker, session: String) -> Reply {
    if !tinker.has_session(&session) || session == BASE {
        return Err(Refusal::new(404, "there are no weights for sampling of this name"));
    }
    Ok((axum::http::StatusCode::FOUND, [(LOCATION, format!("/api/v1/archives/{session}"))]).into_response())
}

pub(super) async fn archive(State(tinker): Of, Path((id, kind, name)): Path<(String, String, String)>) -> Reply {
    match kind.as_str() {
        "sampler_weights" => redirect(&tinker, format!("{id}.{name}")),
        _ => Err(Refusal::bad("only weights for sampling can be downloaded: save them with save_weights_for_sampler")),
    }
}

pub(super) async fn archive_by_name(State(tinker): Of, Path((id, name)): Path<(String, String)>) -> Reply {
    redirect(&tinker, format!("{id}.{name}"))
}

/// The folder of weights for sampling, as a tar file.
pub(super) async fn download(State(tinker): Of, Path(session): Path<String>) -> Reply {
    if !tinker.has_session(&session) || session == BASE {
        return Err(Refusal::new(404, "there are no weights for sampling of this name"));
    }
    let folder = tinker.ground.samplers.join(&session);
    let (pieces, sent) = channel(2);
    tokio::task::spawn_blocking(move || {
        let mut archive = tar::Builder::new(BufWriter::with_capacity(PIECE, Pieces(pieces.clone())));
        let packed = archive.append_dir_all(".", &folder).and_then(|()| archive.into_inner()?.flush());
        if let Err(error) = packed {
            // The response breaks off. A client that is gone takes no error.
            pieces.blocking_send(Err(error)).ok();
        }
    });
    let body = Body::from_stream(unfold(sent, async |mut sent| Some((sent.recv().await?, sent))));
    Ok(([(CONTENT_TYPE, "application/x-tar")], body).into_response())
}

/// Writes the pieces of a response.
struct Pieces(Sender<io::Result<Bytes>>);

impl Write for Pieces {
    fn write(&mut self, piece: &[u8]) -> io::Result<usize> {
        let sent = self.0.blocking_send(Ok(Bytes::copy_from_slice(piece)));
        sent.map(|()| piece.len()).map_err(|_| io::ErrorKind::BrokenPipe.into())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Removes saved weights, unless a restart would load them. A restart does not save them again.
pub(super) async fn delete_checkpoint(State(tinker): Of, Path((id, kind, name)): Path<(String, String, String)>) -> Reply {
    let (id, name) = (named(&id)?, named(&name)?);
    let folder = match kind.as_str() {
        "weights" => tinker.ground.models.join(&id).join("weights").join(&name),
        "sampler_weights" => tinker.ground.samplers.join(format!("{id}.{name}")),
        _ => return Err(Refusal::bad("name the weights as weights/NAME or sampler_weights/NAME")),
    };
    blocking_refusal(move || {
        if !folder.is_dir() {
            return Err(Refusal::new(404, "there are no weights of this name"));
        }
        let path = format!("tinker://{id}/{kind}/{name}");
        if let Some(model) = tinker.needs(&path) {
            return Err(Refusal::bad(format!("the model {model} began with these weights or loaded them: unload it first")));
        }
        let of = tinker.models.lock().get(&id).cloned();
        let forgotten = of.map_or(Ok(()), |of| of.forget(&format!("{kind}/{name}")));
        forgotten.and_then(|()| atomic_file::remove(&folder)).map_err(|error| Refusal::new(500, error.to_string()))
    })
    .await?;
    Ok(reply::page(&json!({"type": "delete_checkpoint"})))
}
