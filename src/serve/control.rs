//! Routes that change what is served: pauses, aborts, weights, labels and adapters, in SGLang's form.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::IntoResponse;
use serde::Deserialize;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::pulls;
use super::reply::{self, Refusal, Reply};
use super::shared::{LoadedAdapter, Shared, unknown};
use super::uploads::hex;
use super::worker::{Command, Installed};
use crate::engine::remote::PauseMode;
use crate::model::{FrozenWeights, TensorSlice, load_adapter, load_weights_for};
use crate::util::untrusted;

/// Longest name of an adapter or a version, in bytes.
const LONGEST_NAME: usize = 200;

#[derive(Deserialize)]
struct Pause {
    mode: Option<String>,
}

/// Pauses generation: new requests wait.
pub(super) async fn pause(State(shared): State<Arc<Shared>>, body: Bytes) -> Reply {
    let mode = match reply::read::<Pause>(&body)?.mode.as_deref() {
        None | Some("abort") => PauseMode::Abort,
        Some("retract") => PauseMode::Recompute,
        Some("in_place") => PauseMode::Keep,
        Some(other) => {
            let other = untrusted::line_of(other, 60);
            return Err(Refusal::bad(format!("the pause mode {other} is unknown; use \"abort\", \"retract\" or \"in_place\"")));
        }
    };
    let _order = shared.changing.lock().await;
    shared.call(|reply| Command::Pause { mode, reply }).await?;
    shared.served.lock().paused = true;
    Ok(reply::success("Generation paused successfully."))
}

/// Ends a pause.
pub(super) async fn resume(State(shared): State<Arc<Shared>>) -> Reply {
    let _order = shared.changing.lock().await;
    shared.call(|reply| Command::Resume { reply }).await?;
    shared.served.lock().paused = false;
    Ok(reply::success("Generation continued successfully."))
}

#[derive(Deserialize)]
struct Abort {
    #[serde(default)]
    rid: String,
    #[serde(default)]
    abort_all: bool,
}

/// Ends requests with what they have.
pub(super) async fn abort(State(shared): State<Arc<Shared>>, body: Bytes) -> Reply {
    let Abort { rid, abort_all } = reply::read(&body)?;
    if abort_all || !rid.is_empty() {
        shared.send(Command::Abort(Some(rid).filter(|_| !abort_all)));
    }
    Ok(StatusCode::OK.into_response())
}

#[derive(Deserialize)]
struct Update {
    model_path: PathBuf,
    weight_version: Option<String>,
    #[serde(default)]
    abort_all_requests: bool,
    /// Its entries would be verified.
    manifest: Option<Value>,
}

fn named(name: &str, what: &str) -> Result<Arc<str>, Refusal> {
    match !name.is_empty() && name.len() <= LONGEST_NAME && !name.chars().any(char::is_control) {
        true => Ok(name.into()),
        false => Err(Refusal::bad(format!("{what} must have 1 to {LONGEST_NAME} bytes, without control characters"))),
    }
}

/// Runs work that reads files on tokio's pool for blocking work.
pub(super) async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T, String> + Send + 'static) -> Result<T, Refusal> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done.map_err(Refusal::bad),
        Err(_) => Err(Refusal::new(500, "the work on files failed; look into the server's log")),
    }
}

/// Folder of the weights at `path`, and their version if they come from the store: its newest, or the
/// one that `label` names.
async fn find(shared: &Arc<Shared>, path: &Path, label: Option<&str>) -> Result<(PathBuf, Option<u64>), Refusal> {
    if !path.to_string_lossy().contains("://") {
        return Ok((absolute(path)?, None));
    }
    let Some(puller) = shared.pulls.as_ref().and_then(|pulls| pulls.of(path)) else {
        return Err(Refusal::bad("this server pulls from the store of its flag --store alone; name that, or a folder"));
    };
    let version = match label.map(str::parse::<u64>) {
        Some(Err(_)) => return Err(Refusal::bad("`weight_version` must be the number of a version in the store")),
        given => given.and_then(Result::ok),
    };
    let (version, folder) = blocking(move || pulls::pull(&puller, version).map_err(|error| error.to_string())).await?;
    Ok((folder, Some(version)))
}

/// Loads the weights of a folder, or of the store, and installs them between two tokens. They are
/// fetched and read before, while requests continue.
pub(super) async fn update(State(shared): State<Arc<Shared>>, body: Bytes) -> Reply {
    let Update { model_path, weight_version, abort_all_requests, manifest } = reply::read(&body)?;
    if manifest.is_some_and(|manifest| !manifest.is_null()) {
        return Err(Refusal::bad("`manifest` is not supported; verify with /weights_checker and by scoring"));
    }
    let label = weight_version.map(|label| named(&label, "`weight_version`")).transpose()?;
    let _order = shared.changing.lock().await;
    let (folder, pulled) = find(&shared, &model_path, label.as_deref()).await?;
    let label = label.or_else(|| pulled.map(|version| version.to_string().into()));
    let (what, adapters) = {
        let (shared, folder) = (shared.clone(), folder.clone());
        blocking(move || read_weights(&shared, &folder).map_err(|error| error.to_string())).await?
    };
    let label = label.unwrap_or_else(|| shared.served.lock().label.clone());
    if abort_all_requests {
        shared.send(Command::Abort(None));
    }
    let installed = Installed {
        label: label.clone(),
        weights: what.clone(),
        adapters: adapters.iter().map(|(name, adapter)| (name.clone(), adapter.weights.clone())).collect(),
    };
    shared.call(|reply| Command::Install { what: installed, reply }).await?;
    let mut served = shared.served.lock();
    (served.label, served.folder, served.weights, served.adapters) = (label, folder, what, adapters);
    drop(served);
    tracing::info!("serving the weights of {} as version {}", model_path.display(), shared.served.lock().label);
    Ok(reply::page(&json!({
        "success": true, "message": "Succeeded to update model weights.", "num_paused_requests": 0, "instance": shared.instance,
    })))
}

fn absolute(path: &Path) -> Result<PathBuf, Refusal> {
    match path.is_absolute() {
        true => Ok(path.to_owned()),
        false => Err(Refusal::bad("the path must be absolute: a folder that this server can read")),
    }
}

type Weights = (Arc<FrozenWeights>, BTreeMap<Arc<str>, LoadedAdapter>);

/// Weights of a folder on the model's device and in its format, and the loaded adapters over them.
fn read_weights(shared: &Shared, folder: &Path) -> Result<Weights, crate::model::ModelError> {
    let _guard = tch::no_grad_guard();
    let weights = load_weights_for(&shared.model, folder, shared.compute.dtype)?.on(shared.compute);
    let known = shared.served.lock().adapters.clone();
    let over = |known: LoadedAdapter| {
        let adapter = known.weights.read().adapter;
        let weights =
            adapter.map_or_else(|| known.weights.clone(), |adapter| Arc::new(FrozenWeights::of_own(weights.under(adapter))));
        LoadedAdapter { weights, ..known }
    };
    let adapters = known.into_iter().map(|(name, known)| (name, over(known))).collect();
    Ok((Arc::new(FrozenWeights::of_own(weights)), adapters))
}

#[derive(Deserialize)]
struct Label {
    new_version: String,
    /// SGLang's default.
    #[serde(default = "yes")]
    abort_all_requests: bool,
}

fn yes() -> bool {
    true
}

/// Renames the served weights.
pub(super) async fn label(State(shared): State<Arc<Shared>>, body: Bytes) -> Reply {
    let Label { new_version, abort_all_requests } = reply::read(&body)?;
    let label = named(&new_version, "`new_version`")?;
    let _order = shared.changing.lock().await;
    if abort_all_requests {
        shared.send(Command::Abort(None));
    }
    shared.call(|reply| Command::Label { label: label.clone(), reply }).await?;
    shared.served.lock().label = label;
    Ok(reply::page(&json!({ "success": true, "message": "Weight version updated.", "new_version": new_version })))
}

/// Computes the checksum of each tensor of the served weights.
pub(super) async fn checksums(State(shared): State<Arc<Shared>>) -> Reply {
    let (weights, dtype) = (shared.served.lock().weights.clone(), shared.compute.dtype);
    let sums = blocking(move || {
        let weights = weights.read();
        let flat = weights.flat.to_device(tch::Device::Cpu);
        let sum = |(name, tensor): (&str, TensorSlice<'_>)| {
            (name.to_owned(), Value::String(hex(&Sha256::digest(safetensors::View::data(&tensor)))))
        };
        Ok(TensorSlice::all(weights.layout.entries(), &flat, dtype).map(sum).collect::<serde_json::Map<_, _>>())
    });
    Ok(reply::page(&json!({ "success": true, "message": "", "per_engine_checksum": sums.await? })))
}

#[derive(Deserialize)]
struct LoadAdapter {
    lora_name: String,
    lora_path: PathBuf,
}

/// Loads a PEFT folder as an adapter of a new name.
pub(super) async fn load_lora(State(shared): State<Arc<Shared>>, body: Bytes) -> Reply {
    let LoadAdapter { lora_name, lora_path } = reply::read(&body)?;
    let name = named(&lora_name, "`lora_name`")?;
    let _order = shared.changing.lock().await;
    if *name == *shared.config.name || shared.served.lock().adapters.contains_key(&name) {
        return Err(Refusal::bad(format!("the name {name:?} is taken; unload that LoRA adapter, or choose another")));
    }
    let folder = absolute(&lora_path)?;
    let weights = {
        let (shared, folder) = (shared.clone(), folder.clone());
        let load = move || {
            let _guard = tch::no_grad_guard();
            let adapter = load_adapter(&folder, &shared.model).map_err(|error| error.to_string())?;
            let base = shared.served.lock().weights.clone();
            Ok(Arc::new(FrozenWeights::of_own(base.read().under(adapter))))
        };
        blocking(load).await?
    };
    let (given, own) = (Some(weights.clone()), name.clone());
    shared.call(|reply| Command::Adapter { name: own, weights: given, reply }).await?;
    shared.served.lock().adapters.insert(name, LoadedAdapter { folder, weights });
    Ok(reply::page(&json!({ "success": true, "message": "", "loaded_adapters": adapters(&shared) })))
}

#[derive(Deserialize)]
struct UnloadAdapter {
    lora_name: String,
}

/// Unloads an adapter. Its completions in flight end with an error.
pub(super) async fn unload_lora(State(shared): State<Arc<Shared>>, body: Bytes) -> Reply {
    let UnloadAdapter { lora_name } = reply::read(&body)?;
    let _order = shared.changing.lock().await;
    // New requests are refused from here on.
    let known = shared.served.lock().adapters.remove_entry(lora_name.as_str());
    let (name, _) = known.ok_or_else(|| unknown(400, &lora_name))?;
    shared.call(|reply| Command::Adapter { name, weights: None, reply }).await?;
    Ok(reply::page(&json!({ "success": true, "message": "", "loaded_adapters": adapters(&shared) })))
}

/// Names and folders of the loaded adapters.
fn adapters(shared: &Shared) -> Value {
    let served = shared.served.lock();
    served
        .adapters
        .iter()
        .map(|(name, adapter)| (name.to_string(), json!(adapter.folder)))
        .collect::<serde_json::Map<_, _>>()
        .into()
}
