//! Scripted server with the protocols of vLLM 0.33 and SGLang 0.5, which computes with this library: it serves the weights that it
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
        ModelServer::reading(64)
    }

    /// One whose prompts and answers have so many tokens together at most.
    pub fn reading(context: usize) -> Self {
        let (runtime, served) = (Runtime::new().unwrap(), Arc::<Mutex<Served>>::default());
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let routes = routes(&served, context);
        runtime.spawn(async move { axum::serve(listener, routes).await });
        ModelServer { url, served, _runtime: runtime }
    }

    pub fn asked(&self) -> Vec<Asked> {
        self.served.lock().unwrap().asked.clone()
    }
}

fn routes(served: &Arc<Mutex<Served>>, context: usize) -> Router {
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
        .route("/v1/models", page(json!({ "data": [{ "id": "policy", "max_model_len": context }] })))
        .route("/openapi.json", page(json!({ "paths": serde_json::Map::from_iter(known) })))
        .route("/weight_info", info.clone())
        .route("/pause", post(|_, _| "{}".to_owned()))
        .route("/resume", post(|_, _| "{}".to_owned()))
        .route("/reset_prefix_cache", post(|_, _| json!({ "success": true }).to_string()))
        .route("/collective_rpc", post(load))
        .route("/update_weight_version", post(label))
        .route("/inference/v1/generate", post(generate))
        .route("/v1/completions", post(score))
        .route("/ready", routing::get(|| async {}))
        .route("/model_info", info)
        .route("/server_info", page(json!({ "version": "0.5.23", "context_length": context })))
        .route("/pause_generation", post(|_, _| "{}".to_owned()))
        .route("/continue_generation", post(|_, _| "{}".to_owned()))
        .route("/flush_cache", post(|_, _| "{}".to_owned()))
        .route("/update_weights_from_disk", post(sglang_load))
        .route("/generate", post(sglang_generate))
}

fn load(served: &Mutex<Served>, body: &Value) -> String {
    read(served, &body["kwargs"]["weights_path"]);
    json!({ "results": [null] }).to_string()
}

fn sglang_load(served: &Mutex<Served>, body: &Value) -> String {
    read(served, &body["model_path"]);
    json!({ "success": true }).to_string()
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

fn generate(served: &Mutex<Served>, body: &Value) -> String {
    stream(served, body, "token_ids", ["max_tokens", "seed"], |finished, label| {
        let content = finished.tokens.iter().zip(&finished.log_probs);
        let content: Vec<Value> = content.map(|(token, log)| json!({ "token_id": token, "logprob": log })).collect();
        let choice = json!({
            "index": finished.index, "finish_reason": reason(finished), "token_ids": finished.tokens,
            "logprobs": { "content": content }, "weight_versions": spans(finished, label),
        });
        json!({ "choices": [choice] })
    })
}

fn sglang_generate(served: &Mutex<Served>, body: &Value) -> String {
    if body["stream"] == false {
        let prompt = tokens(&body["input_ids"]);
        let entries = prompt[1..].iter().zip(log_probs(served, &prompt)).map(|(token, log)| json!([log, token, null]));
        let listed: Vec<Value> = std::iter::once(json!([null, prompt[0], null])).chain(entries).collect();
        return json!({ "meta_info": { "input_token_logprobs": listed } }).to_string();
    }
    stream(served, body, "input_ids", ["max_new_tokens", "sampling_seed"], |finished, label| {
        let columns = finished.tokens.iter().zip(&finished.log_probs);
        let columns: Vec<Value> = columns.map(|(token, log)| json!([log, token, null])).collect();
        let info = json!({
            "finish_reason": { "type": reason(finished) }, "completion_tokens": finished.tokens.len(),
            "output_token_logprobs": columns, "weight_versions": spans(finished, label),
        });
        json!({ "output_ids": finished.tokens, "meta_info": info })
    })
}

fn reason(finished: &Finished) -> &'static str {
    if finished.finish == Ok(FinishReason::Length) { "length" } else { "stop" }
}

fn spans(finished: &Finished, label: &str) -> Value {
    json!([{ "version": label, "start": 0, "end": finished.tokens.len() }])
}

/// One event for each finished completion.
fn stream(
    served: &Mutex<Served>,
    body: &Value,
    prompt: &str,
    [limit, seed]: [&str; 2],
    event: impl Fn(&Finished, &str) -> Value,
) -> String {
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
        max_new_tokens: number(limit) as usize,
        stop: serde_json::from_value(sampling["stop"].clone()).unwrap_or_default(),
        ..SamplingParams::default()
    };
    let mut engine = policy.engine(number("n") as usize, number(seed));
    let prompt: Arc<[u32]> = tokens(&body[prompt]).into();
    engine.submit(Request::new(0, prompt, number("n") as u32, Arc::new(params))).unwrap();
    let mut events = String::new();
    while !engine.is_idle() {
        for finished in engine.step().unwrap() {
            events += &format!("data: {}\n\n", event(&finished, &label));
        }
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
