//! Routes of the Tinker API, `/api/v1/…`.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::{Path, State};
use axum::http::HeaderMap;
use axum::http::header::{ACCEPT, CONTENT_ENCODING, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post};
use rollflow_tinker::message::{AdamParams, LoraConfig, Pass, PassInput, SampleRequest};
use rollflow_tinker::proto;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::Tinker;
use super::journal::record;
use super::operation::{Answer, Operation};
use super::sampling::BASE;
use super::saved::{
    archive, archive_by_name, checkpoints, delete_checkpoint, download, training_run, training_runs, weights_info,
};
use super::trained::{UNNAMED, is_name, unnamed};
use crate::env::protocol;
use crate::serve::control::blocking;
use crate::serve::reply::{self, Refusal, Reply};

/// Time for which a request for an answer is held until the client asks again.
const HELD: Duration = Duration::from_secs(20);

pub(super) type Of = State<Arc<Tinker>>;

/// The routes. docs/how_to/tinker.md has their table.
pub(in crate::serve) fn routes(tinker: &Arc<Tinker>) -> Router {
    Router::new()
        .route("/api/v1/healthz", get(async || reply::page(&json!({"status": "ok"}))))
        .route("/api/v1/client/config", post(async || reply::page(&json!({"pjwt_auth_enabled": false}))))
        .route("/api/v1/client/dynamic_config", post(async || reply::page(&json!({"sample_cancel_enabled": true}))))
        .route("/api/v1/telemetry", post(async || reply::page(&json!({"status": "accepted"}))))
        .route("/api/v1/get_server_capabilities", get(capabilities))
        .route("/api/v1/create_session", post(create_session))
        .route("/api/v1/session_heartbeat", post(heartbeat))
        .route("/api/v1/sessions/{id}/finish", post(finish))
        .route("/api/v1/create_model", post(create_model))
        .route("/api/v1/unload_model", post(unload_model))
        .route("/api/v1/get_info", post(get_info))
        .route("/api/v1/forward_backward", post(forward_backward))
        .route("/api/v1/forward", post(forward))
        .route("/api/v1/optim_step", post(optim_step))
        .route("/api/v1/save_weights", post(save_weights))
        .route("/api/v1/load_weights", post(load_weights))
        .route("/api/v1/save_weights_for_sampler", post(save_for_sampler))
        .route("/api/v1/create_sampling_session", post(create_sampling_session))
        .route("/api/v1/samplers/{id}", get(sampler))
        .route("/api/v1/asample", post(sample))
        .route("/api/v1/retrieve_future", post(retrieve))
        .route("/api/v1/cancel_future", post(cancel))
        .route("/api/v1/weights_info", post(weights_info))
        .route("/api/v1/training_runs", get(training_runs))
        .route("/api/v1/training_runs/{id}", get(training_run))
        .route("/api/v1/training_runs/{id}/checkpoints", get(checkpoints))
        .route("/api/v1/training_runs/{id}/checkpoints/{kind}/{name}", delete(delete_checkpoint))
        .route("/api/v1/training_runs/{id}/checkpoints/{kind}/{name}/archive", get(archive))
        .route("/api/v1/training_runs/{id}/checkpoints/{name}/archive", get(archive_by_name))
        .route("/api/v1/archives/{session}", get(download))
        .with_state(tinker.clone())
}

async fn capabilities(State(tinker): Of) -> Reply {
    let shared = &tinker.shared;
    let model = json!({
        "model_name": shared.config.name, "max_context_length": shared.context(), "trainable": true, "sampleable": true,
    });
    Ok(reply::page(&json!({"supported_models": [model]})))
}

async fn create_session(State(_): Of) -> Reply {
    let id = format!("session-{}", protocol::unique());
    Ok(reply::page(&json!({"session_id": id, "type": "create_session"})))
}

#[derive(Deserialize)]
struct Heartbeat {
    session_id: String,
}

async fn heartbeat(State(tinker): Of, body: Bytes) -> Reply {
    let Heartbeat { session_id } = reply::read(&body)?;
    tinker.hear_again(&session_id);
    Ok(reply::page(&json!({"type": "session_heartbeat"})))
}

/// Ends a session, whose models are unloaded. Their saved weights stay.
async fn finish(State(tinker): Of, Path(session): Path<String>) -> Reply {
    blocking_refusal(move || tinker.finish(&session)).await?;
    Ok(reply::page(&json!({"type": "finish_session"})))
}

#[derive(Deserialize)]
struct CreateModel {
    session_id: String,
    #[serde(default)]
    model_seq_id: u64,
    base_model: String,
    lora_config: Option<LoraConfig>,
    #[serde(default)]
    optimizer_config: Option<Value>,
}

/// Refuses another base model and other optimizers than AdamW.
fn check_model(tinker: &Tinker, base: &str, optimizer: Option<&Value>) -> Result<(), Refusal> {
    let config = &tinker.shared.config;
    if base != config.name && std::path::Path::new(base) != config.folder {
        return Err(Refusal::bad(format!("the base model {:?} is not served; it is {:?}", super::short(base), config.name)));
    }
    match optimizer.and_then(|optimizer| optimizer.get("type")).and_then(Value::as_str) {
        None | Some("adamw") => Ok(()),
        Some(other) => Err(Refusal::bad(format!("the optimizer {:?} is not known; there is adamw", super::short(other)))),
    }
}

async fn create_model(State(tinker): Of, body: Bytes) -> Reply {
    let CreateModel { session_id, model_seq_id, base_model, lora_config, optimizer_config } = reply::read(&body)?;
    check_model(&tinker, &base_model, optimizer_config.as_ref())?;
    let lora = lora_config.unwrap_or(LoraConfig::WHOLE);
    let id = format!("{session_id}:train:{model_seq_id}");
    let model = id.clone();
    let creating = tinker.clone();
    blocking_refusal(move || creating.create(model, session_id, lora, None)).await?;
    Ok(pending(&id, 0, Some(&id)))
}

/// Runs work that may wait for files or for a thread.
pub(super) async fn blocking_refusal<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Refusal> + Send + 'static,
) -> Result<T, Refusal> {
    blocking(move || Ok(work())).await?
}

/// Name of an answer that is to come.
fn pending(model: &str, number: u64, id: Option<&str>) -> Response {
    let request = format!("{model}:{number}");
    let mut page = json!({"request_id": request, "future_id": request, "status": "pending"});
    if let Some(id) = id {
        page["model_id"] = id.into();
    }
    reply::page(&page)
}

#[derive(Deserialize)]
struct OfModel {
    model_id: String,
}

async fn unload_model(State(tinker): Of, body: Bytes) -> Reply {
    let OfModel { model_id } = reply::read(&body)?;
    tinker.model(&model_id)?;
    let (unloading, id) = (tinker.clone(), model_id.clone());
    blocking_refusal(move || unloading.unload(&id)).await?;
    let request = format!("{model_id}:unloaded");
    Ok(reply::page(&json!({"request_id": request, "model_id": model_id})))
}

async fn get_info(State(tinker): Of, body: Bytes) -> Reply {
    let OfModel { model_id } = reply::read(&body)?;
    let (model, config) = (tinker.model(&model_id)?, &tinker.shared.config);
    Ok(reply::page(&json!({
        "type": "get_info", "model_id": model_id, "model_name": config.name, "is_lora": model.record.lora.rank > 0,
        "lora_rank": model.record.lora.rank,
        "model_data": {"model_name": config.name, "tokenizer_id": config.folder},
    })))
}

/// Model and number of an operation.
#[derive(Clone, Deserialize)]
struct Place {
    model_id: String,
    seq_id: Option<u64>,
}

async fn submit(tinker: &Arc<Tinker>, Place { model_id, seq_id }: Place, operation: Operation) -> Reply {
    let queue = tinker.model(&model_id)?;
    let number = blocking_refusal(move || queue.submit(seq_id, operation)).await?;
    Ok(pending(&model_id, number, None))
}

/// Submits the operation of a request in JSON. One that is refused takes its number too: the client
/// has used it, and the model would wait for it.
async fn submit_json<T: DeserializeOwned>(
    tinker: &Arc<Tinker>,
    body: &Bytes,
    operation: impl FnOnce(T, &Place) -> Result<Operation, Refusal>,
) -> Reply {
    let place: Place = reply::read(body)?;
    let operation = match reply::read(body).and_then(|request| operation(request, &place)) {
        Err(refusal) if place.seq_id.is_none() => return Err(refusal),
        operation => operation.unwrap_or_else(|refusal| Operation::Refused(refusal.message().to_owned())),
    };
    submit(tinker, place, operation).await
}

#[derive(Deserialize)]
struct JsonPass {
    #[serde(alias = "forward_input")]
    forward_backward_input: PassInput,
}

/// A pass in either dialect.
async fn forward_backward(State(tinker): Of, headers: HeaderMap, body: Bytes) -> Reply {
    let is =
        |name, value: &str| headers.get(name).and_then(|found| found.to_str().ok()).is_some_and(|found| found.contains(value));
    if !is(CONTENT_TYPE, proto::MEDIA_TYPE) {
        return json_pass(&tinker, &body, false).await;
    }
    if headers.contains_key(CONTENT_ENCODING) {
        return Err(Refusal::new(415, "compressed requests are not understood"));
    }
    let place = proto::place_of_pass(&body).map_err(|why| Refusal::bad(format!("the pass can't be read: {why}")))?;
    let (model_id, seq_id) = (place.0, Some(place.1));
    // The model's thread reads the rest, and refuses it under its number.
    submit(&tinker, Place { model_id, seq_id }, Operation::Pass(body.to_vec())).await
}

async fn forward(State(tinker): Of, body: Bytes) -> Reply {
    json_pass(&tinker, &body, true).await
}

async fn json_pass(tinker: &Arc<Tinker>, body: &Bytes, forward_only: bool) -> Reply {
    let operation = |JsonPass { forward_backward_input: PassInput { data, loss_fn, loss_fn_config } }, place: &Place| {
        let Place { model_id, seq_id } = place.clone();
        let (seq_id, loss_fn_config) = (seq_id.unwrap_or(0), loss_fn_config.unwrap_or_default());
        let pass = Pass { model_id, seq_id, data, loss_fn, loss_fn_config, forward_only };
        Ok(Operation::Pass(proto::encode_pass(&pass)))
    };
    submit_json(tinker, body, operation).await
}

#[derive(Deserialize)]
struct OptimStep {
    #[serde(default)]
    adam_params: Option<AdamParams>,
}

async fn optim_step(State(tinker): Of, body: Bytes) -> Reply {
    let operation = |OptimStep { adam_params }, _: &Place| {
        let adam = adam_params.ok_or_else(|| Refusal::bad("adam_params are missing; there is no other optimizer than AdamW"))?;
        let numbers = [adam.learning_rate, adam.beta1, adam.beta2, adam.eps, adam.weight_decay, adam.grad_clip_norm];
        if numbers.iter().any(|number| !number.is_finite() || *number < 0.0) {
            return Err(Refusal::bad("a number of adam_params is negative or not finite"));
        }
        Ok(Operation::Update(adam))
    };
    submit_json(&tinker, &body, operation).await
}

#[derive(Deserialize)]
struct Save {
    path: Option<String>,
    sampling_session_seq_id: Option<u64>,
    #[serde(default)]
    overwrite: bool,
    kind: Option<String>,
    ttl_seconds: Option<Value>,
}

/// Warns once of a lifetime of saved weights, which is ignored.
fn warn_of_lifetime(tinker: &Tinker, ttl_seconds: Option<Value>) {
    if let Some(seconds) = ttl_seconds {
        let seconds = super::short(&seconds.to_string());
        let stay = "saved weights stay until a client deletes them; this is logged once";
        tinker.lifetime.call_once(|| tracing::warn!("`ttl_seconds` = {seconds} is ignored: {stay}"));
    }
}

pub(super) fn named(name: &str) -> Result<String, Refusal> {
    match is_name(name) {
        true => Ok(name.to_owned()),
        false => {
            Err(Refusal::bad(format!("the name {:?} has other characters than letters, digits and - _ . :", super::short(name))))
        }
    }
}

async fn save_weights(State(tinker): Of, body: Bytes) -> Reply {
    let operation = |Save { path, overwrite, ttl_seconds, .. }, place: &Place| {
        warn_of_lifetime(&tinker, ttl_seconds);
        if overwrite {
            return Err(Refusal::bad("`overwrite` is not possible: saved weights are never replaced; choose another name"));
        }
        let name = path.unwrap_or_else(|| format!("weights-{}", place.seq_id.unwrap_or(0)));
        Ok(Operation::Save(named(&name)?))
    };
    submit_json(&tinker, &body, operation).await
}

async fn save_for_sampler(State(tinker): Of, body: Bytes) -> Reply {
    let operation = |Save { path, sampling_session_seq_id, kind, ttl_seconds, .. }, place: &Place| {
        warn_of_lifetime(&tinker, ttl_seconds);
        if let Some(kind) = kind.filter(|kind| kind != "snapshot") {
            return Err(Refusal::bad(format!("the kind {:?} is not possible: sessions are snapshots", super::short(&kind))));
        }
        let (model, number) = (&place.model_id, sampling_session_seq_id.or(place.seq_id).unwrap_or(0));
        let name = path.as_deref().map(named).transpose()?;
        if let Some(name) = name.as_deref().filter(|name| unnamed(name).is_some()) {
            let why = "is one of sessions without a name, of which older ones are removed; choose another, such as step-3";
            return Err(Refusal::bad(format!("the name {name:?} {why}")));
        }
        let within = name.clone().unwrap_or_else(|| format!("{UNNAMED}{number}"));
        Ok(Operation::Sampler { session: format!("{model}.{within}"), name })
    };
    submit_json(&tinker, &body, operation).await
}

#[derive(Deserialize)]
struct Load {
    path: String,
    #[serde(default = "with_optimizer")]
    optimizer: bool,
}

/// Model whose weights are replaced: an existing one, or one that is created.
#[derive(Deserialize)]
struct LoadInto {
    model_id: Option<String>,
    session_id: Option<String>,
    #[serde(default)]
    model_seq_id: u64,
}

/// Servers before this field always loaded it.
fn with_optimizer() -> bool {
    true
}

async fn load_weights(State(tinker): Of, body: Bytes) -> Reply {
    let LoadInto { model_id, session_id, model_seq_id } = reply::read(&body)?;
    if model_id.is_some() {
        let operation = |Load { path, optimizer }, _: &Place| Ok(Operation::Load { path, optimizer });
        return submit_json(&tinker, &body, operation).await;
    }
    let Load { path, optimizer } = reply::read(&body)?;
    let session = session_id.ok_or_else(|| Refusal::bad("give model_id, or session_id and model_seq_id for a new model"))?;
    let id = format!("{session}:train:{model_seq_id}");
    let model = id.clone();
    let creating = move || {
        let source = path.strip_prefix("tinker://").and_then(|rest| rest.split('/').next()).unwrap_or_default();
        let missing = |_| Refusal::new(404, format!("there are no weights at {:?}", super::short(&path)));
        let of = record(&tinker.ground.models.join(named(source)?)).map_err(missing)?;
        tinker.create(model, session, of.lora, Some((path, optimizer)))
    };
    blocking_refusal(creating).await?;
    Ok(pending(&id, 0, Some(&id)))
}

#[derive(Deserialize)]
struct CreateSampling {
    base_model: Option<String>,
    model_path: Option<String>,
}

async fn create_sampling_session(State(tinker): Of, body: Bytes) -> Reply {
    let CreateSampling { base_model, model_path } = reply::read(&body)?;
    let session = match (model_path, base_model) {
        (Some(path), _) => {
            let session = Tinker::session_of(&path).filter(|session| tinker.has_session(session));
            session.ok_or_else(|| Refusal::new(404, format!("there are no weights for sampling at {:?}", super::short(&path))))?
        }
        (None, Some(base)) => {
            check_model(&tinker, &base, None)?;
            BASE.to_owned()
        }
        (None, None) => return Err(Refusal::bad("give model_path or base_model")),
    };
    Ok(reply::page(&json!({"sampling_session_id": session, "type": "create_sampling_session"})))
}

async fn sampler(State(tinker): Of, Path(id): Path<String>) -> Reply {
    if !tinker.has_session(&id) {
        return Err(Refusal::new(404, "there is no such sampling session"));
    }
    let path = id.rsplit_once('.').filter(|_| id != BASE).map(|(model, name)| format!("tinker://{model}/sampler_weights/{name}"));
    Ok(reply::page(&json!({"sampler_id": id, "base_model": tinker.shared.config.name, "model_path": path})))
}

async fn sample(State(tinker): Of, body: Bytes) -> Reply {
    let request: SampleRequest = reply::read(&body)?;
    let count = request.num_samples;
    let number = tinker.sample(request).await?;
    let request = format!("sample-{}:{number}", tinker.shared.instance);
    let sequences: Vec<String> = (0..count).map(|at| format!("{request}:{at}")).collect();
    Ok(reply::page(&json!({
        "request_id": request, "future_id": request, "status": "pending", "sample_sequence_ids": sequences,
    })))
}

#[derive(Deserialize)]
struct Retrieve {
    request_id: String,
}

async fn retrieve(State(tinker): Of, headers: HeaderMap, body: Bytes) -> Reply {
    let Retrieve { request_id } = reply::read(&body)?;
    let gone = || Refusal::new(410, format!("there is no request {:?}; the server was restarted", super::short(&request_id)));
    let (owner, number) = request_id.rsplit_once(':').ok_or_else(gone)?;
    let answer = match owner.strip_prefix("sample-") {
        _ if number == "unloaded" => return Ok(reply::page(&json!({"model_id": owner, "type": "unload_model"}))),
        Some(_) => {
            let number = tinker.sample_number(&request_id).ok_or_else(gone)?;
            let found = tinker.samples.lock().get(number);
            let answer = found.ok_or_else(gone)?.answer(HELD).await;
            if answer.is_some() {
                tinker.samples.lock().fetched(number);
            }
            answer
        }
        None => {
            let number: u64 = number.parse().map_err(|_| gone())?;
            tinker.model(owner).map_err(|_| gone())?.answer(number, HELD).await.map_err(|()| gone())?
        }
    };
    let Some(answer) = answer else {
        return Ok(reply::page(&json!({"type": "try_again", "request_id": request_id, "queue_state": "active"})));
    };
    let protobuf =
        headers.get(ACCEPT).and_then(|accept| accept.to_str().ok()).is_some_and(|accept| accept.contains(proto::MEDIA_TYPE));
    let wire = |bytes: Vec<u8>| ([(CONTENT_TYPE, proto::MEDIA_TYPE)], bytes).into_response();
    Ok(match &*answer {
        Answer::Json(page) => reply::page(page),
        Answer::Pass(output) if protobuf => wire(proto::encode_output(output)),
        Answer::Pass(output) => reply::page(&json!(output)),
        Answer::Samples(samples) if protobuf => wire(proto::encode_samples(samples)),
        Answer::Samples(samples) => {
            let mut page = json!(samples);
            page["type"] = "sample".into();
            reply::page(&page)
        }
        Answer::Failed { why, of_request } => reply::page(&Answer::failure(why, *of_request)),
    })
}

/// Ends samples that no client waits for. Operations on models are never cancelled: others follow them.
async fn cancel(State(tinker): Of, body: Bytes) -> Reply {
    let Retrieve { request_id } = reply::read(&body)?;
    if let Some(number) = tinker.sample_number(&request_id) {
        tinker.cancel(number);
    }
    Ok(reply::page(&json!({"type": "cancel_future"})))
}
