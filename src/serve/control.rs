//! Routes that change what is served: pauses, aborts, weights, labels and adapters, in SGLang's form.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use axum::body::Bytes;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::IntoResponse;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use super::pulls;
use super::reply::{self, Refusal, Reply};
use super::shared::{LoadedAdapter, Shared, unknown};
use super::worker::{Command, Installed};
use crate::engine::remote::PauseMode;
use crate::model::{Dtype, FrozenWeights, TensorSlice, holds_adapter, load_adapter, load_weights_for};
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

/// Weights that a request names.
#[derive(Clone, PartialEq, Deserialize)]
pub(super) struct Source {
    model_path: PathBuf,
    weight_version: Option<String>,
}

#[derive(Deserialize)]
struct Update {
    #[serde(flatten)]
    source: Source,
    #[serde(default)]
    abort_all_requests: bool,
    /// Its entries would be verified.
    manifest: Option<Value>,
}

/// Adapters by name.
pub(super) type Adapters = BTreeMap<Arc<str>, LoadedAdapter>;

/// Checksum of each tensor by name, computed once for weights.
pub(super) type Sums = Arc<OnceLock<Map<String, Value>>>;

/// Weights in memory, ready to be served.
pub(super) struct Prepared {
    source: Source,
    label: Option<Arc<str>>,
    folder: PathBuf,
    weights: Arc<FrozenWeights>,
    sums: Sums,
}

fn named(name: &str, what: &str) -> Result<Arc<str>, Refusal> {
    match !name.is_empty() && name.len() <= LONGEST_NAME && !name.chars().any(char::is_control) {
        true => Ok(name.into()),
        false => Err(Refusal::bad(format!("{what} must have 1 to {LONGEST_NAME} bytes, without control characters"))),
    }
}

/// Runs work that reads files, or computes for long, on tokio's pool for blocking work.
pub(super) async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T, String> + Send + 'static) -> Result<T, Refusal> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done.map_err(Refusal::bad),
        Err(_) => Err(Refusal::new(500, "the request failed; look into the server's log")),
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

/// Reads the weights of a folder, or of the store, and computes their checksums, while requests
/// continue. An update that names the same weights then only installs them.
pub(super) async fn prepare(State(shared): State<Arc<Shared>>, body: Bytes) -> Reply {
    let source: Source = reply::read(&body)?;
    let _order = shared.changing.lock().await;
    // Two versions in memory, and not three.
    shared.prepared.lock().take();
    let prepared = read(&shared, source).await?;
    let (weights, sums, dtype) = (prepared.weights.clone(), prepared.sums.clone(), shared.compute.dtype);
    let summed = move || {
        sums.get_or_init(|| sums_of(&weights, dtype));
        Ok(())
    };
    blocking(summed).await?;
    *shared.prepared.lock() = Some(prepared);
    Ok(reply::success("Weights prepared."))
}

/// Installs the weights of a folder, or of the store, between two tokens. Unless they were prepared,
/// they are fetched and read before, while requests continue.
pub(super) async fn update(State(shared): State<Arc<Shared>>, body: Bytes) -> Reply {
    let Update { source, abort_all_requests, manifest } = reply::read(&body)?;
    if manifest.is_some_and(|manifest| !manifest.is_null()) {
        return Err(Refusal::bad("`manifest` is not supported; verify with /weights_checker and by scoring"));
    }
    let _order = shared.changing.lock().await;
    let prepared = shared.prepared.lock().take().filter(|prepared| prepared.source == source);
    let prepared = match prepared {
        Some(prepared) => prepared,
        None => read(&shared, source).await?,
    };
    let Prepared { source, label, folder, weights, sums } = prepared;
    let label = label.unwrap_or_else(|| shared.served.lock().label.clone());
    if abort_all_requests {
        shared.send(Command::Abort(None));
    }
    install(&shared, label.clone(), folder, weights, sums).await?;
    tracing::info!("serving the weights of {} as version {label}", source.model_path.display());
    Ok(reply::page(&json!({
        "success": true, "message": "Succeeded to update model weights.", "num_paused_requests": 0, "instance": shared.instance,
    })))
}

/// Serves weights from now on, under the loaded adapters, too.
pub(super) async fn install(
    shared: &Arc<Shared>,
    label: Arc<str>,
    folder: PathBuf,
    weights: Arc<FrozenWeights>,
    sums: Sums,
) -> Result<(), Refusal> {
    let adapters = {
        let (shared, weights) = (shared.clone(), weights.clone());
        blocking(move || Ok(adapters_over(&shared, &weights))).await?
    };
    let installed = Installed {
        label: label.clone(),
        weights: weights.clone(),
        adapters: adapters.iter().map(|(name, adapter)| (name.clone(), adapter.weights.clone())).collect(),
    };
    shared.call(|reply| Command::Install { what: installed, reply }).await?;
    let mut served = shared.served.lock();
    (served.label, served.folder, served.weights, served.sums, served.adapters) = (label, folder, weights, sums, adapters);
    served.asleep.weights = false;
    Ok(())
}

/// Reads weights on the model's device and in its format.
async fn read(shared: &Arc<Shared>, source: Source) -> Result<Prepared, Refusal> {
    let label = source.weight_version.as_deref().map(|label| named(label, "`weight_version`")).transpose()?;
    let (folder, pulled) = find(shared, &source.model_path, label.as_deref()).await?;
    let label = label.or_else(|| pulled.map(|version| version.to_string().into()));
    let (shared, from) = (shared.clone(), folder.clone());
    let weights = blocking(move || read_whole(&shared, &from)).await?;
    Ok(Prepared { source, label, folder, weights, sums: Sums::default() })
}

fn absolute(path: &Path) -> Result<PathBuf, Refusal> {
    match path.is_absolute() {
        true => Ok(path.to_owned()),
        false => Err(Refusal::bad("the path must be absolute: a folder that this server can read")),
    }
}

/// The loaded adapters over other weights.
pub(super) fn adapters_over(shared: &Shared, weights: &FrozenWeights) -> Adapters {
    let _guard = tch::no_grad_guard();
    let (weights, known) = (weights.read(), shared.served.lock().adapters.clone());
    let over = |known: LoadedAdapter| {
        let adapter = known.weights.read().adapter;
        let weights =
            adapter.map_or_else(|| known.weights.clone(), |adapter| Arc::new(FrozenWeights::of_own(weights.under(adapter))));
        LoadedAdapter { weights, ..known }
    };
    known.into_iter().map(|(name, known)| (name, over(known))).collect()
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

/// Checksums of the served weights.
pub(super) async fn checksums(State(shared): State<Arc<Shared>>) -> Reply {
    let dtype = shared.compute.dtype;
    let (weights, sums) = {
        let served = shared.served.lock();
        (served.weights.clone(), served.sums.clone())
    };
    let sums = blocking(move || Ok(sums.get_or_init(|| sums_of(&weights, dtype)).clone()));
    Ok(reply::page(&json!({ "success": true, "message": "", "per_engine_checksum": sums.await? })))
}

pub(super) fn sums_of(weights: &FrozenWeights, dtype: Dtype) -> Map<String, Value> {
    let weights = weights.read();
    let flat = weights.whole().to_device(tch::Device::Cpu);
    let sum = |(name, tensor): (&str, TensorSlice<'_>)| {
        (name.to_owned(), Value::String(format!("{:x}", Sha256::digest(safetensors::View::data(&tensor)))))
    };
    TensorSlice::all(weights.layout.entries(), &flat, dtype).map(sum).collect()
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
    let weights = read_adapter(&shared, &folder).await?;
    let (given, own) = (Some(weights.clone()), name.clone());
    shared.call(|reply| Command::Adapter { name: own, weights: given, reply }).await?;
    shared.served.lock().adapters.insert(name, LoadedAdapter { folder, weights });
    Ok(reply::page(&json!({ "success": true, "message": "", "loaded_adapters": adapters(&shared) })))
}

/// The adapter in a PEFT folder, over the served weights.
pub(super) async fn read_adapter(shared: &Arc<Shared>, folder: &Path) -> Result<Arc<FrozenWeights>, Refusal> {
    let (shared, folder) = (shared.clone(), folder.to_owned());
    blocking(move || {
        let _guard = tch::no_grad_guard();
        let adapter = load_adapter(&folder, &shared.model).map_err(|error| error.to_string())?;
        let base = shared.served.lock().weights.clone();
        Ok(Arc::new(FrozenWeights::of_own(base.read().under(adapter))))
    })
    .await
}

/// The weights in a folder of sampling weights: a PEFT folder, or a model's.
pub(super) async fn read_session(shared: &Arc<Shared>, folder: &Path) -> Result<Arc<FrozenWeights>, Refusal> {
    if holds_adapter(folder) {
        return read_adapter(shared, folder).await;
    }
    let (shared, folder) = (shared.clone(), folder.to_owned());
    blocking(move || read_whole(&shared, &folder)).await
}

/// The weights in a model's folder, in the server's format.
fn read_whole(shared: &Shared, folder: &Path) -> Result<Arc<FrozenWeights>, String> {
    let _guard = tch::no_grad_guard();
    let weights = load_weights_for(&shared.model, folder, shared.compute.dtype).map_err(|error| error.to_string())?;
    Ok(Arc::new(FrozenWeights::of_own(weights.on(shared.compute))))
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
