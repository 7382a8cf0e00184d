//! Scripted server with the protocol of vLLM 0.33, which computes with this library: it serves the weights that it
//! loads, to the bit.

use std::path::Path;
use std::sync::{Arc, Mutex};

use axum::body::Bytes;
use axum::{Router, routing};
use rollflow::algo::Aggregation;
use rollflow::engine::{FinishReason, Finished, Request, TokenEngine};
use rollflow::prelude::*;
use rollflow::train::{Scorer, collate};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;

/// What was asked of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Asked {
    /// The version that it served then.
    pub label: String,
    pub temperature: f64,
}

#[derive(Default)]
struct Served {
    policy: Option<Policy>,
    label: String,
    asked: Vec<Asked>,
}

pub struct ModelServer {
    pub url: String,
    served: Arc<Mutex<Served>>,
    _runtime: Runtime,
}

impl ModelServer {
    pub fn new() -> Self {
        let (runtime, served) = (Runtime::new().unwrap(), Arc::<Mutex<Served>>::default());
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let routes = routes(&served);
        runtime.spawn(async move { axum::serve(listener, routes).await });
        ModelServer { url, served, _runtime: runtime }
    }

    pub fn asked(&self) -> Vec<Asked> {
        self.served.lock().unwrap().asked.clone()
    }
}

fn routes(served: &Arc<Mutex<Served>>) -> Router {
    let known = ["/inference/v1/generate", "/pause", "/collective_rpc"].map(|path| (path.to_owned(), json!({})));
    let page = |page: Value| routing::get(move || async move { page.to_string() });
    let post = |answer: fn(&Mutex<Served>, &Value) -> String| {
        let served = served.clone();
        routing::post(move |body: Bytes| async move {
            let answer = move || answer(&served, &serde_json::from_slice(&body).unwrap_or_default());
            tokio::task::spawn_blocking(answer).await.unwrap()
        })
    };
    let info = served.clone();
    let info = routing::get(move || async move {
        json!({ "model_path": "policy", "weight_version": info.lock().unwrap().label }).to_string()
    });
    Router::new()
        .route("/health", routing::get(|| async {}))
        .route("/version", page(json!({ "version": "0.33.0" })))
        .route("/v1/models", page(json!({ "data": [{ "id": "policy", "max_model_len": 64 }] })))
        .route("/openapi.json", page(json!({ "paths": serde_json::Map::from_iter(known) })))
        .route("/weight_info", info)
        .route("/pause", post(|_, _| "{}".to_owned()))
        .route("/resume", post(|_, _| "{}".to_owned()))
        .route("/reset_prefix_cache", post(|_, _| json!({ "success": true }).to_string()))
        .route("/collective_rpc", post(load))
        .route("/update_weight_version", post(label))
        .route("/inference/v1/generate", post(generate))
        .route("/v1/completions", post(score))
}

fn load(served: &Mutex<Served>, body: &Value) -> String {
    read(served, &body["kwargs"]["weights_path"]);
    json!({ "results": [null] }).to_string()
}

fn read(served: &Mutex<Served>, folder: &Value) {
    served.lock().unwrap().policy = Some(Policy::load(Path::new(folder.as_str().unwrap())).unwrap());
}

fn label(served: &Mutex<Served>, body: &Value) -> String {
    served.lock().unwrap().label = body["new_version"].as_str().unwrap().to_owned();
    json!({ "success": true }).to_string()
}

fn tokens(of: &Value) -> Vec<u32> {
    of.as_array().unwrap().iter().map(|token| token.as_u64().unwrap() as u32).collect()
}

/// One event for each finished completion.
fn generate(served: &Mutex<Served>, body: &Value) -> String {
    let sampling = &body["sampling_params"];
    let number = |key: &str| sampling[key].as_u64().unwrap();
    let temperature = sampling["temperature"].as_f64().unwrap();
    let (policy, label) = {
        let mut served = served.lock().unwrap();
        let asked = Asked { label: served.label.clone(), temperature };
        served.asked.push(asked);
        (served.policy.clone().unwrap(), served.label.clone())
    };
    let params = SamplingParams {
        temperature: temperature as f32,
        max_new_tokens: number("max_tokens") as usize,
        stop: serde_json::from_value(sampling["stop"].clone()).unwrap_or_default(),
        ..SamplingParams::default()
    };
    let mut engine = policy.engine(number("n") as usize, number("seed"));
    let prompt: Arc<[u32]> = tokens(&body["token_ids"]).into();
    engine.submit(Request::new(0, prompt, number("n") as u32, Arc::new(params))).unwrap();
    let event = |finished: &Finished| {
        let content = finished.tokens.iter().zip(&finished.log_probs);
        let content: Vec<Value> = content.map(|(token, log)| json!({ "token_id": token, "logprob": log })).collect();
        let reason = if finished.finish == Ok(FinishReason::Length) { "length" } else { "stop" };
        let choice = json!({
            "index": finished.index, "finish_reason": reason, "token_ids": finished.tokens, "logprobs": { "content": content },
            "weight_versions": [{ "version": label, "start": 0, "end": finished.tokens.len() }],
        });
        format!("data: {}\n\n", json!({ "choices": [choice] }))
    };
    let mut events = String::new();
    while !engine.is_idle() {
        events.extend(engine.step().unwrap().iter().map(event));
    }
    events + "data: [DONE]\n\n"
}

/// Log-probability of each token but the first.
fn log_probs(served: &Mutex<Served>, prompt: &[u32]) -> Vec<f64> {
    let policy = served.lock().unwrap().policy.clone().unwrap();
    let loss_mask = [vec![0.0], vec![1.0; prompt.len() - 1]].concat();
    let sample = Sample { tokens: prompt.to_vec(), loss_mask, ..Sample::default() };
    let batch = collate(&[sample], Aggregation::TokenMean).unwrap();
    let config = LocalConfig::new(CrossEntropy, Schedule::constant(0.0));
    Scorer::new(config, policy.config().clone()).score(&policy.frozen(), &batch).concat()
}

fn score(served: &Mutex<Served>, body: &Value) -> String {
    let prompt = tokens(&body["prompt"]);
    let entry = |(token, log): (&u32, f64)| json!({ token.to_string(): { "logprob": log } });
    let entries: Vec<Value> = prompt[1..].iter().zip(log_probs(served, &prompt)).map(entry).collect();
    let listed = [vec![Value::Null], entries].concat();
    json!({ "choices": [{ "prompt_logprobs": listed }] }).to_string()
}
