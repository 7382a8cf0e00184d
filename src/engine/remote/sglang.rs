//! SGLang and `rollflow serve`: `POST /generate`, streamed.
//!
//! Events hold the whole completion or only its new part, depending on the server's flags. The
//! reported number of tokens tells which.
//!
//! SGLang's log-probabilities are those from before truncation, so that truncated requests for training are
//! rejected.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::Mutex;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::OnceCell;
use tokio::sync::mpsc::Sender;

use super::control::unload_namesake;
use super::server::{CALL, EventError, Server, StreamDelta, WireSpan, add_adjustments, chunk, ending, text};
use super::sync::Carry;
use super::transfer::{self, TensorSource};
use super::upload;
use super::{
    Attempt, Capabilities, Ending, EngineMemory, Fault, InferenceEngine, PauseMode, RemoteError, WeightControl, wire_routes,
};
use crate::data::{RouteShape, TopK, TopTokens};
use crate::engine::FinishReason;
use crate::net::Endpoint;

const GENERATE: &str = "/generate";

/// Name of SGLang's servers; others that speak its protocol have another.
pub(super) const SGLANG: &str = "SGLang";

const ROUTES: &str =
    "this server has no such route: an SGLang older or newer than 0.5, or one started with an admin token that it was not given";

pub(super) struct SglangEngine {
    kind: &'static str,
    server: Server,
    probed: OnceCell<Capabilities>,
    /// Id of the process that loaded the newest weights, if the server has one: a restarted server
    /// is not taken for one that holds them, whatever its label (law V4).
    loaded_by: Mutex<Option<Value>>,
    slept: Mutex<Slept>,
}

/// Parts that sleep of a server with this label.
#[derive(Default)]
struct Slept {
    parts: Vec<EngineMemory>,
    label: String,
}

/// Ends of labels, and the parts that sleep then. SGLang can't be asked whether it sleeps, and ends if what
/// is awake is woken. Its label shows this to other clients, such as the next run after one that was
/// killed.
const ASLEEP: [(&str, &[EngineMemory]); 3] = [
    (" (asleep)", &[EngineMemory::Weights, EngineMemory::Cache]),
    (" (weights asleep)", &[EngineMemory::Weights]),
    (" (cache asleep)", &[EngineMemory::Cache]),
];

/// Label of a server that was given no weights.
const UNLABELLED: &str = "default";

/// A label without its end, and what sleeps by it.
fn split(label: &str) -> (&str, &'static [EngineMemory]) {
    let ended = ASLEEP.into_iter().find_map(|(end, parts)| Some((label.strip_suffix(end)?, parts)));
    ended.unwrap_or((label, &[]))
}

/// A label's end while these parts sleep.
fn end_of(parts: &[EngineMemory]) -> &'static str {
    ASLEEP.into_iter().find(|(_, asleep)| *asleep == parts).map_or("", |(end, _)| end)
}

impl SglangEngine {
    /// A server that errors call `kind`.
    pub(super) fn new(kind: &'static str, endpoint: Endpoint, model: Option<String>) -> Result<Self, RemoteError> {
        let server = Server::new(kind, endpoint, model, |_| ROUTES)?;
        Ok(SglangEngine { kind, server, probed: OnceCell::new(), loaded_by: Mutex::default(), slept: Mutex::default() })
    }

    async fn ask(&self) -> Result<&Capabilities, RemoteError> {
        self.probed.get_or_try_init(|| self.look()).await
    }

    /// Reads a page; servers without it have `old`.
    async fn get(&self, new: &str, old: &str, limit: Duration) -> Result<Value, RemoteError> {
        match self.server.client.get(new, limit).await {
            Err(RemoteError { fault: Fault::Refused { status: 404, .. }, .. }) => self.server.client.get(old, limit).await,
            answer => answer,
        }
    }

    /// The page of the served weights, their label without its end, and what sleeps.
    async fn standing(&self) -> Result<(Value, String, Vec<EngineMemory>), RemoteError> {
        let page = self.server.info("/model_info").await?;
        let label = text(&page, "weight_version").unwrap_or_default();
        let (own, told) = split(&label);
        let mut slept = self.slept.lock();
        // A request may change what sleeps, and the next one not the label. A restarted server is awake.
        if slept.label != label || label == UNLABELLED {
            *slept = Slept { parts: told.to_vec(), label: label.clone() };
        }
        Ok((page, own.to_owned(), slept.parts.clone()))
    }

    /// Parts that sleep. Only SGLang is asked: other servers accept requests for memory that they have.
    async fn asleep(&self) -> Result<Vec<EngineMemory>, RemoteError> {
        if self.kind == SGLANG { Ok(self.standing().await?.2) } else { Ok(Vec::new()) }
    }

    /// Labels weights of which `parts` sleep.
    async fn relabel(&self, label: &str, parts: Vec<EngineMemory>) -> Result<(), RemoteError> {
        let label = format!("{}{}", if label.is_empty() { UNLABELLED } else { label }, end_of(&parts));
        // The server's default aborts all requests.
        let body = json!({"new_version": label, "abort_all_requests": false});
        self.server.post_success("/update_weight_version", &body).await?;
        *self.slept.lock() = Slept { parts, label };
        Ok(())
    }

    async fn look(&self) -> Result<Capabilities, RemoteError> {
        let model = self.get("/model_info", "/get_model_info", CALL).await?;
        let server = self.get("/server_info", "/get_server_info", CALL).await?;
        let context = ["context_length", "max_req_input_len"].iter().find_map(|key| server.get(*key)?.as_u64());
        let is_true = |key: &str| server.get(key).and_then(Value::as_bool).unwrap_or(false);
        let served = text(&model, "served_model_name").or_else(|| text(&model, "model_path"));
        Ok(Capabilities {
            server: format!("{} {}", self.kind, text(&server, "version").unwrap_or_else(|| "of unknown version".into())),
            model: self.server.model.clone().or(served).unwrap_or_default(),
            context: context.map(|context| context as usize),
            rotates_by_context: is_true("rotates_by_context"),
            spans: model.get("weight_version").is_some(),
            weights: true,
            checksums: model.get("weight_version").is_some(),
            adapters: is_true("enable_lora"),
            routes: is_true("enable_return_routed_experts"),
            raw_log_probs: false,
            transfers: vec![Carry::Broadcast],
            // Without a copy in the host's memory SGLang's weights are lost.
            sleeps: is_true("enable_memory_saver") && (self.kind != SGLANG || is_true("enable_weights_cpu_backup")),
            lacks: Vec::new(),
        })
    }
}

fn question(attempt: &Attempt) -> Value {
    let params = &attempt.params;
    let top_k = if params.top_k == 0 { -1 } else { params.top_k as i64 };
    let mut sampling = json!({
        "max_new_tokens": attempt.rest(), "temperature": params.temperature, "top_p": params.top_p, "top_k": top_k,
        "min_p": params.min_p, "stop_token_ids": params.stop_token_ids, "ignore_eos": params.ignore_eos, "n": 1,
        "skip_special_tokens": false, "no_stop_trim": true, "sampling_seed": attempt.seed & 0x7fff_ffff,
    });
    if !params.stop.is_empty() {
        sampling["stop"] = params.stop.clone().into();
    }
    add_adjustments(&mut sampling, params);
    let mut question = json!({
        "rid": attempt.id(), "input_ids": &attempt.tokens[..], "sampling_params": sampling, "return_logprob": true,
        "logprob_start_len": -1, "top_logprobs_num": 0, "return_text_in_logprobs": false, "stream": true,
        // A flag of SGLang's servers, which `rollflow serve` takes with each request.
        "incremental_streaming_output": true,
    });
    if let Some(key) = &attempt.cache_key {
        question["extra_key"] = key.clone().into();
    }
    if let Some(adapter) = &attempt.adapter {
        question["lora_path"] = adapter.clone().into();
    }
    if attempt.routes.is_some() {
        question["return_routed_experts"] = true.into();
    }
    question
}

/// A restarted server has no adapters and rejects requests that name one like bad requests. Status
/// 404 keeps such samples from being given up.
fn without_adapter(mut error: RemoteError, attempt: &Attempt) -> RemoteError {
    if let Fault::Refused { status, begins, .. } = &mut error.fault
        && attempt.adapter.is_some()
        && begins.contains("LoRA")
    {
        *status = 404;
    }
    error
}

#[derive(Debug, Deserialize)]
struct Event {
    #[serde(default)]
    output_ids: Vec<u32>,
    meta_info: Meta,
}

#[derive(Debug, Deserialize)]
struct Meta {
    finish_reason: Option<Finish>,
    completion_tokens: Option<usize>,
    #[serde(default)]
    output_token_logprobs: Vec<(Option<f64>, u32, Option<String>)>,
    weight_versions: Option<Vec<WireSpan>>,
    routed_experts: Option<String>,
}

#[derive(Debug, Deserialize)]
struct Finish {
    #[serde(rename = "type")]
    kind: String,
    message: Option<String>,
    status_code: Option<u16>,
}

/// Removes what was read already from a column that ends at entry `all` of the completion.
fn newest<T>(column: &mut Vec<T>, read: usize, all: usize) {
    column.truncate(all);
    let first = all - column.len();
    column.drain(..read.saturating_sub(first).min(column.len()));
}

/// Number of tokens read, and the stop tokens to watch for.
#[derive(Debug, Default)]
struct Reader {
    read: usize,
    /// Stop tokens of the request, which the server ignores if it ignores end-of-text tokens.
    stops: Vec<u32>,
    /// Tokens of the request.
    given: usize,
    /// Sizes of the experts that the request asks for.
    routes: Option<RouteShape>,
}

impl Reader {
    fn delta(&mut self, event: Event) -> Result<StreamDelta, EventError> {
        let Event { mut output_ids, meta_info: meta } = event;
        let mut log_probs = meta.output_token_logprobs;
        // Either column may hold the whole completion or its newest part, and ends at the reported
        // count. Entries beyond that come again.
        let all = meta.completion_tokens.unwrap_or(output_ids.len());
        newest(&mut output_ids, self.read, all);
        newest(&mut log_probs, self.read, all);
        if let Some(((_, id, _), token)) = log_probs.iter().zip(&output_ids).find(|((_, id, _), token)| id != *token) {
            return Err(EventError::Nonsense(format!("a log-probability of token {id} for token {token}")));
        }
        let mut chunk = chunk(output_ids, log_probs.into_iter().map(|(log_prob, ..)| log_prob).collect())?;
        self.read += chunk.len();
        if self.read != all {
            return Err(EventError::Nonsense(format!("{} tokens, of which it counts {all}", self.read)));
        }
        if let Some(stop) = chunk.iter().position(|(token, _)| self.stops.contains(token)) {
            chunk.truncate(stop + 1);
            // The server's spans count the tokens after the stop token, too.
            let ending = Some(Ending { finish: Some(FinishReason::Stop), ..Ending::default() });
            return Ok(StreamDelta { chunk, ending, over: true, ..StreamDelta::default() });
        }
        let Some(finish) = meta.finish_reason else { return Ok(StreamDelta { chunk, ..StreamDelta::default() }) };
        let finish = match (finish.kind.as_str(), finish.status_code) {
            ("stop", _) => Some(FinishReason::Stop),
            ("length", _) => Some(FinishReason::Length),
            ("abort", Some(status)) if status >= 400 => {
                return Err(EventError::Refused { status, message: finish.message.unwrap_or_default() });
            }
            ("abort", _) => None,
            (other, _) => return Err(EventError::Nonsense(format!("finish_reason {other:?}, which is unknown here"))),
        };
        let routes = match (self.routes.filter(|_| finish.is_some()), &meta.routed_experts) {
            (None, _) => None,
            (Some(shape), Some(text)) => Some(wire_routes::read(text, shape, self.given + self.read)?),
            (Some(_), None) => return Err(EventError::Nonsense("the end of a completion without its experts".into())),
        };
        // `weight_version` alone is the newest version, not that of each token.
        let ending = Some(Ending { routes, ..ending(finish, meta.weight_versions) });
        Ok(StreamDelta { chunk, ending, ..StreamDelta::default() })
    }
}

#[async_trait]
impl InferenceEngine for SglangEngine {
    fn name(&self) -> String {
        self.server.name()
    }

    fn address(&self) -> Option<&str> {
        Some(self.server.client.base())
    }

    async fn generate(&self, attempt: &Attempt, tokens: &Sender<Vec<(u32, f32)>>) -> Result<Ending, RemoteError> {
        self.server.check_context(attempt, self.ask().await?.context, "--context-length")?;
        if self.kind == SGLANG && attempt.log_probs && !attempt.params.greedy() && !attempt.params.keeps_all() {
            return self.server.refuse(
                "its log-probabilities are those from before truncation".to_owned(),
                "leave out generate.top_p, generate.top_k and generate.min_p, or use \"rollflow\" or \"vllm\" servers",
            );
        }
        let stops = if attempt.params.ignore_eos { attempt.params.stop_token_ids.clone() } else { Vec::new() };
        let mut reader = Reader { read: 0, stops, given: attempt.tokens.len(), routes: attempt.routes };
        let ended = self.server.follow(GENERATE, &question(attempt), tokens, |event| reader.delta(event)).await;
        ended.map_err(|error| without_adapter(error, attempt))
    }

    async fn probe(&self) -> Result<Capabilities, RemoteError> {
        self.ask().await.cloned()
    }

    /// Uses `/ready`, because `/health` generates a token and takes a second.
    async fn healthy(&self, limit: Duration) -> Result<(), RemoteError> {
        self.get("/ready", "/get_model_info", limit).await.map(drop)
    }

    async fn score(&self, tokens: &[u32], adapter: Option<&str>) -> Result<Vec<f32>, RemoteError> {
        let question = scoring(tokens, adapter, 0);
        self.server.score(GENERATE, question, "of the prompt", |reply| scores_of(reply, tokens)).await
    }

    async fn score_top(&self, tokens: &[u32], of: TopK) -> Result<(Vec<f32>, TopTokens), RemoteError> {
        let listed = |reply: &Value| {
            let (log_probs, mut top) = (scores_of(reply, tokens)?, TopTokens::new(1, tokens.len(), of.k));
            let places = reply.pointer("/meta_info/input_top_logprobs")?.as_array()?;
            let from = places.len().checked_sub(tokens.len().saturating_sub(1))?;
            for (place, position) in places[from..].iter().zip(1..) {
                let entry = |entry: &Value| Some((entry.get(1)?.as_u64()? as u32, entry.get(0)?.as_f64()? as f32));
                top.set_all(position, place.as_array()?.iter().map(entry).collect::<Option<Vec<_>>>()?, of.below)?;
            }
            Some((log_probs, top))
        };
        self.server.score(GENERATE, scoring(tokens, None, of.k), "in each place", listed).await
    }

    fn weights(&self) -> Option<&dyn WeightControl> {
        Some(self)
    }
}

/// Request to score `tokens`, with the `k` likeliest tokens in their places.
fn scoring(tokens: &[u32], adapter: Option<&str>, k: usize) -> Value {
    json!({
        "input_ids": tokens, "sampling_params": { "max_new_tokens": 1, "temperature": 0.0 }, "return_logprob": true,
        "logprob_start_len": 0, "top_logprobs_num": k, "stream": false, "lora_path": adapter,
    })
}

/// Log-probabilities of all tokens but the first in a reply. The first may be listed without one, or not
/// at all. The server lists ids of the vocabulary's end as 0; their log-probabilities are correct.
fn scores_of(reply: &Value, tokens: &[u32]) -> Option<Vec<f32>> {
    let listed = reply.pointer("/meta_info/input_token_logprobs")?.as_array()?;
    let from = listed.len().checked_sub(tokens.len().saturating_sub(1))?;
    let of = |(entry, token): (&Value, &u32)| {
        let id = entry.get(1)?.as_u64()?;
        (id == u64::from(*token) || id == 0).then_some(entry.get(0)?.as_f64()? as f32)
    };
    listed[from..].iter().zip(&tokens[1..]).map(of).collect()
}

/// Routes for weights (tested with 0.5.23).
#[async_trait]
impl WeightControl for SglangEngine {
    async fn pause(&self, mode: PauseMode) -> Result<(), RemoteError> {
        let mode = match mode {
            PauseMode::Keep => "in_place",
            PauseMode::Recompute => "retract",
            PauseMode::Abort => "abort",
            PauseMode::Finish => {
                let what = "finishing what is in flight; set engine.pause to \"keep\", \"recompute\" or \"abort\"";
                return Err(self.server.client.fault(Fault::Unsupported(what)));
            }
        };
        self.server.post_control("/pause_generation", &json!({"mode": mode})).await.map(drop)
    }

    async fn upload(&self, folder: &Path) -> Result<PathBuf, RemoteError> {
        upload::send(&self.server, folder).await
    }

    async fn prepare(&self, folder: &Path, label: &str) -> Result<(), RemoteError> {
        let body = json!({"model_path": folder, "weight_version": label});
        match self.server.post_success("/prepare_weights", &body).await {
            // SGLang has no such route.
            Err(RemoteError { fault: Fault::Refused { status: 404 | 405, .. }, .. }) => Ok(()),
            done => done.map(drop),
        }
    }

    async fn load(&self, folder: &Path, label: &str) -> Result<(), RemoteError> {
        let parts = self.asleep().await?;
        let label = format!("{label}{}", end_of(&parts));
        // The sync flushes separately: a flush fails while requests are paused in place.
        let body = json!({"model_path": folder, "weight_version": label, "flush_cache": false, "abort_all_requests": false});
        let reply = self.server.post_success("/update_weights_from_disk", &body).await?;
        *self.loaded_by.lock() = reply.get("instance").cloned();
        *self.slept.lock() = Slept { parts, label };
        Ok(())
    }

    async fn prepare_tensors(&self, tensors: &Arc<dyn TensorSource>) -> Result<(), RemoteError> {
        // SGLang writes them into the weights that it computes with.
        if self.kind == SGLANG { Ok(()) } else { transfer::sglang::send(&self.server, tensors).await }
    }

    async fn load_tensors(&self, tensors: &Arc<dyn TensorSource>, _carry: Carry) -> Result<(), RemoteError> {
        if self.kind == SGLANG {
            transfer::sglang::send(&self.server, tensors).await?;
        }
        let instance = transfer::sglang::end(&self.server).await?;
        *self.loaded_by.lock() = instance;
        Ok(())
    }

    async fn load_adapter(&self, name: &str, folder: &Path) -> Result<(), RemoteError> {
        unload_namesake(self, name).await?;
        self.server.post_success("/load_lora_adapter", &json!({"lora_name": name, "lora_path": folder})).await.map(drop)
    }

    async fn unload_adapter(&self, name: &str) -> Result<(), RemoteError> {
        self.server.post_success("/unload_lora_adapter", &json!({"lora_name": name})).await.map(drop)
    }

    async fn adapters(&self) -> Result<Vec<String>, RemoteError> {
        self.server.adapters().await
    }

    async fn label(&self, label: &str) -> Result<(), RemoteError> {
        self.relabel(label, self.asleep().await?).await
    }

    async fn served(&self) -> Result<Option<String>, RemoteError> {
        let (page, label, _) = self.standing().await?;
        let restarted = self.loaded_by.lock().as_ref().is_some_and(|loaded_by| page.get("instance") != Some(loaded_by));
        Ok(Some(label).filter(|label| !restarted && !label.is_empty() && label != UNLABELLED))
    }

    async fn checksums(&self) -> Result<Option<BTreeMap<String, String>>, RemoteError> {
        self.server.checksums("/weights_checker", &["per_engine_checksum", "ranks"], true).await
    }

    async fn flush_cache(&self) -> Result<(), RemoteError> {
        self.server.post_control("/flush_cache", &Value::Null).await.map(drop)
    }

    async fn sleep(&self) -> Result<(), RemoteError> {
        // The scheduler of SGLang ends if it is asked while it works, or to free what sleeps.
        self.pause(PauseMode::Abort).await?;
        let (all, asleep) = ([EngineMemory::Weights, EngineMemory::Cache], self.asleep().await?);
        let tags: Vec<&str> = all.into_iter().filter(|part| !asleep.contains(part)).map(EngineMemory::tag).collect();
        if !tags.is_empty() {
            self.server.post_control("/release_memory_occupation", &json!({"tags": tags})).await?;
        }
        if self.kind != SGLANG {
            return Ok(());
        }
        self.slept.lock().parts = all.to_vec();
        let label = self.slept.lock().label.clone();
        self.relabel(split(&label).0, all.to_vec()).await
    }

    async fn wake(&self, part: EngineMemory) -> Result<(), RemoteError> {
        // The scheduler of SGLang ends if it is asked for what it has, such as after a restart.
        let mut asleep = self.asleep().await?;
        if self.kind == SGLANG && !asleep.contains(&part) {
            return Ok(());
        }
        self.server.post_control("/resume_memory_occupation", &json!({"tags": [part.tag()]})).await?;
        if self.kind != SGLANG {
            return Ok(());
        }
        asleep.retain(|other| *other != part);
        self.slept.lock().parts = asleep.clone();
        let label = self.slept.lock().label.clone();
        self.relabel(split(&label).0, asleep).await
    }

    async fn resume(&self) -> Result<(), RemoteError> {
        self.server.post_control("/continue_generation", &json!({})).await.map(drop)
    }
}
