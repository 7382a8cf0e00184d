//! Table of routes, and the pages that describe the server.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::header::CONTENT_TYPE;
use axum::middleware::{Next, from_fn};
use axum::response::IntoResponse;
use axum::routing::{get, post};
use serde_json::{Value, json};

use super::reply::{self, Refusal, Reply};
use super::shared::{Ask, Shared};
use super::tinker::Tinker;
use super::worker::Command;
use super::{control, generate, openai, receive, sleep, tinker, token, uploads};
use crate::engine::SamplingParams;
use crate::net::guard;
use crate::observe::{Metric, Metrics};

/// Longest request, in bytes.
const LONGEST: usize = 64 << 20;

/// Longest wait of `/health_generate`.
const HEALTH: Duration = Duration::from_secs(20);

/// Version in `/server_info` and `/version`.
const VERSION: &str = concat!("rollflow-", env!("CARGO_PKG_VERSION"));

type Of = State<Arc<Shared>>;

/// All routes. Without a token, a server on a loopback address answers only to names of this machine.
pub(super) fn routes(shared: &Arc<Shared>, tinker: Option<&Arc<Tinker>>, loopback: bool) -> Router {
    let changes = Router::new()
        .route("/pause_generation", post(control::pause))
        .route("/continue_generation", post(control::resume))
        .route("/release_memory_occupation", post(sleep::release))
        .route("/resume_memory_occupation", post(sleep::resume))
        .route("/prepare_weights", post(control::prepare))
        .route("/update_weights_from_disk", post(control::update))
        .route("/init_weights_update_group", post(receive::init))
        .route("/destroy_weights_update_group", post(receive::destroy))
        .route("/begin_weight_update", post(receive::begin))
        .route("/update_weights_from_distributed", post(receive::update))
        .route("/end_weight_update", post(receive::end))
        .route("/update_weight_version", post(control::label))
        .route("/load_lora_adapter", post(control::load_lora))
        .route("/unload_lora_adapter", post(control::unload_lora))
        .route_layer(from_fn(run_to_end));
    let routes = Router::new()
        .route("/health", get(alive))
        .route("/health_generate", get(health_generate))
        .route("/ready", get(ready))
        .route("/model_info", get(model_info))
        .route("/get_model_info", get(model_info))
        .route("/weight_info", get(model_info))
        .route("/server_info", get(server_info))
        .route("/get_server_info", get(server_info))
        .route("/version", get(async || reply::page(&json!({ "version": VERSION }))))
        .route("/v1/models", get(models))
        .route("/generate", post(generate::generate))
        .route("/v1/completions", post(openai::completions))
        .route("/v1/chat/completions", post(openai::chat))
        .route("/abort_request", post(control::abort))
        .route("/flush_cache", get(flush).post(flush))
        .route("/weights_checker", post(control::checksums))
        .route("/uploads", post(uploads::begin))
        .route("/uploads/{id}", post(uploads::end))
        .route("/uploads/{id}/{name}/{at}", post(uploads::piece))
        .route("/metrics", get(metrics))
        .merge(changes)
        .fallback(async || Refusal::new(404, "there is no such route"))
        .with_state(shared.clone());
    let routes = tinker.into_iter().fold(routes, |routes, tinker| routes.merge(tinker::routes(tinker)));
    let routes = routes.layer(DefaultBodyLimit::max(LONGEST));
    let routes = counted(routes, shared.metrics.clone());
    match &shared.config.token {
        Some(token) => token::authenticated(routes, token.clone()),
        // A web page that gives its name to this address knows no token.
        None if loopback => guard(routes, &[]),
        // Other hosts may reach it under any host name.
        None => routes,
    }
}

/// Runs a change to its end though its client leaves, so that the engine and the pages agree on the served
/// weights.
async fn run_to_end(request: Request, next: Next) -> Reply {
    let change = tokio::spawn(next.run(request));
    change.await.map_err(|_| Refusal::new(500, "the change failed; look into the server's log"))
}

/// Counts requests by their response.
fn counted(routes: Router, metrics: Metrics) -> Router {
    routes.layer(from_fn(move |request: Request, next: Next| {
        let metrics = metrics.clone();
        async move {
            let response = next.run(request).await;
            let outcome = match response.status().as_u16() {
                429 | 503 => "busy",
                400..500 => "refused",
                500.. => "failed",
                _ => "ok",
            };
            metrics.add(Metric::ServedRequests, &[outcome], 1.0);
            response
        }
    }))
}

async fn metrics(State(shared): Of) -> Reply {
    Ok(([(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], shared.metrics.render()).into_response())
}

async fn flush(State(shared): Of) -> Reply {
    shared.send(Command::Flush);
    Ok("Cache flushed.\n".into_response())
}

async fn alive(State(shared): Of) -> Reply {
    match shared.failure() {
        None => Ok("ok\n".into_response()),
        Some(_) => Err(shared.gone()),
    }
}

async fn ready(State(shared): Of) -> Reply {
    let served = shared.served.lock();
    served.asleep.check()?;
    match served.paused {
        false => Ok(reply::success("ready")),
        true => Err(Refusal::new(503, "generation is paused")),
    }
}

/// Generates one token.
async fn health_generate(State(shared): Of) -> Reply {
    let params = SamplingParams { max_new_tokens: 1, temperature: 0.0, ..SamplingParams::default() };
    let ask = Ask { rid: None, prompts: vec![[0].into()], samples: 1, params, seed: None, adapter: None, routes: false };
    let mut ticket = shared.submit(ask)?;
    match tokio::time::timeout(HEALTH, ticket.finish()).await {
        Ok(done) => done.map(|()| "ok\n".into_response()),
        Err(_) => Err(Refusal::new(503, format!("no token within {} s; is generation paused?", HEALTH.as_secs()))),
    }
}

async fn model_info(State(shared): Of) -> Reply {
    let served = shared.served.lock();
    Ok(reply::page(&json!({
        "model_path": served.folder, "tokenizer_path": shared.config.folder, "served_model_name": shared.config.name,
        "is_generation": true, "weight_version": &*served.label, "instance": shared.instance,
    })))
}

async fn server_info(State(shared): Of) -> Reply {
    let (config, label) = (&shared.config, shared.served.lock().label.clone());
    Ok(reply::page(&json!({
        "version": VERSION, "served_model_name": config.name, "context_length": shared.context(),
        "max_running_requests": config.slots.max(1), "max_queued_requests": config.max_queue, "enable_lora": true,
        "enable_return_routed_experts": shared.model.experts.is_some(), "enable_memory_saver": shared.config.tinker.is_none(), "rotates_by_context": true,
        "device": shared.compute.device_name(), "dtype": shared.compute.dtype.word(), "weight_version": &*label,
    })))
}

async fn models(State(shared): Of) -> Reply {
    let model = |id: &str, parent: Option<&str>| -> Value {
        json!({
            "id": id, "object": "model", "created": 0, "owned_by": "rollflow", "parent": parent,
            "max_model_len": shared.context(),
        })
    };
    let name = shared.config.name.as_str();
    let served = shared.served.lock();
    let adapters = served.adapters.keys().map(|adapter| model(adapter, Some(name)));
    let all: Vec<Value> = std::iter::once(model(name, None)).chain(adapters).collect();
    Ok(reply::page(&json!({ "object": "list", "data": all })))
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};

    use super::super::tests::{config, policy};
    use super::*;
    use crate::model::{FrozenWeights, save_hf};
    use crate::net::Server;

    /// The test is the engine's thread, which holds each change until the client has left.
    #[test]
    fn a_change_that_began_is_made_whole_though_its_client_leaves() {
        let (policy, state) = (policy(), tempfile::tempdir().unwrap());
        save_hf(state.path(), policy.config(), &policy.weights()).unwrap();
        let (shared, mut commands) = Shared::new(&policy, config(state.path()), Metrics::new()).unwrap();
        let shared = Arc::new(shared);
        let update = json!({"model_path": state.path(), "weight_version": "7"});
        let changes =
            [("/pause_generation", json!({})), ("/update_weights_from_disk", update), ("/release_memory_occupation", json!({}))];
        let mut given: Vec<Arc<FrozenWeights>> = Vec::new();
        for (path, body) in changes {
            let server = Server::start(TcpListener::bind("127.0.0.1:0").unwrap(), routes(&shared, None, true)).unwrap();
            let mut client = TcpStream::connect(server.address()).unwrap();
            let body = body.to_string();
            write!(client, "POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n{body}", body.len()).unwrap();
            let command = commands.blocking_recv().unwrap();
            drop(client);
            server.close();
            let until = std::time::Instant::now() + std::time::Duration::from_secs(60);
            while !server.has_ended() {
                assert!(std::time::Instant::now() < until, "{path}: the connection does not end");
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
            match command {
                Command::Pause { reply, .. } => reply.send(()).unwrap(),
                Command::Install { what, reply } => {
                    given.push(what.weights);
                    reply.send(()).unwrap();
                }
                Command::Sleep { what, reply } => {
                    given.push(what.weights);
                    reply.send(Ok(())).unwrap();
                }
                _ => panic!("{path} sends no other command"),
            }
            drop(shared.changing.blocking_lock());
            let served = shared.served.lock();
            assert!(served.paused, "{path}");
            if let Some(given) = given.last() {
                assert!(&*served.label == "7" && Arc::ptr_eq(given, &served.weights), "{path}");
            }
        }
        assert_eq!(given.len(), 2);
        assert!(shared.served.lock().asleep.check().is_err());
    }
}
