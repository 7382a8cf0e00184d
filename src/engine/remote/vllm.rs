//! vLLM: tokens in and out by its own route, or by `/v1/completions` on servers without it.
//!
//! The first request reads the server's list of routes. Log-probabilities are those of the sampled
//! distribution only with `--logprobs-mode processed_logprobs`. Otherwise they are correct only at
//! temperature 1 without truncation, and other requests for training are rejected.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::try_join_all;
use serde_json::{Value, json};
use tokio::sync::OnceCell;
use tokio::sync::mpsc::Sender;

use super::control::{label, unload_namesake};
use super::group_request::{GroupRequest, GroupRequests};
use super::openai::{self, Event};
use super::server::{CALL, Server, add_adjustments, text};
use super::sync::Carry;
use super::transfer::{self, TensorSource};
use super::{Attempt, Capabilities, Ending, EngineMemory, Fault, InferenceEngine, PauseMode, RemoteError, WeightControl};
use crate::data::{TopK, TopTokens};
use crate::engine::SamplingParams;
use crate::net::Endpoint;

/// vLLM's own route, which `--enable-scale-out` enables.
const GENERATE: &str = "/inference/v1/generate";

const DEV_MODE: &str = "vLLM has its routes for weights (/pause, /collective_rpc and others) only in developer mode: start it with \
                        VLLM_SERVER_DEV_MODE=1 (`rollflow engine launch` does), on a private network, because these routes ask for no token";

const ADAPTERS: &str = "vLLM loads adapters at run time only with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora (max-lora-rank: at least theirs)";

pub(super) struct VllmEngine {
    server: Server,
    probed: OnceCell<Capabilities>,
    groups: GroupRequests,
}

impl VllmEngine {
    pub(super) fn new(endpoint: Endpoint, model: Option<String>) -> Result<Self, RemoteError> {
        let advice = |path: &str| if path.contains("lora") { ADAPTERS } else { DEV_MODE };
        let server = Server::new("vLLM", endpoint, model, advice)?;
        Ok(VllmEngine { server, probed: OnceCell::new(), groups: GroupRequests::default() })
    }

    async fn ask(&self) -> Result<&Capabilities, RemoteError> {
        self.probed.get_or_try_init(|| self.look()).await
    }

    async fn look(&self) -> Result<Capabilities, RemoteError> {
        let version = self.server.get("/version").await?;
        let (listed, model) = self.server.first_model().await?;
        let routes = self.routes().await?;
        let has = |route: &str| routes.contains(route);
        let weights = has("/pause") && has("/collective_rpc");
        let config = if has("/server_info") { self.config().await? } else { Value::Null };
        let mode = config.pointer("/model_config/logprobs_mode").and_then(Value::as_str);
        // Without sleep mode vLLM has the route, and keeps its memory.
        let sleeps = has("/sleep") && config.pointer("/model_config/enable_sleep_mode").and_then(Value::as_bool).unwrap_or(true);
        let transfer = config.pointer("/weight_transfer_config/backend").and_then(Value::as_str);
        Ok(Capabilities {
            server: format!("vLLM {}", text(&version, "version").unwrap_or_else(|| "of unknown version".into())),
            model,
            context: listed.get("max_model_len").and_then(Value::as_u64).map(|context| context as usize),
            rotates_by_context: true,
            spans: has(GENERATE),
            weights,
            checksums: has("/weight_checker"),
            adapters: has("/v1/load_lora_adapter"),
            // They come in numpy's format, and on GPUs only.
            routes: false,
            raw_log_probs: mode.is_some_and(|mode| mode != "processed_logprobs"),
            transfers: transfer.and_then(carry_of).into_iter().collect(),
            sleeps,
            lacks: (!weights).then(|| DEV_MODE.to_owned()).into_iter().collect(),
        })
    }

    /// List of routes, or of those that answer if the server hides its list.
    async fn routes(&self) -> Result<BTreeSet<String>, RemoteError> {
        match self.server.get("/openapi.json").await {
            Ok(list) => {
                let paths = list.get("paths").and_then(Value::as_object);
                Ok(paths.into_iter().flatten().map(|(path, _)| path.clone()).collect())
            }
            Err(RemoteError { fault: Fault::Refused { .. }, .. }) => {
                // An existing route rejects an empty request.
                let own = self.server.client.post(GENERATE, &json!({}), CALL).await;
                let missing = matches!(&own, Err(RemoteError { fault: Fault::Refused { status: 404 | 405, .. }, .. }));
                let paused = self.server.get("/is_paused").await.is_ok();
                let own = (!missing).then_some([GENERATE].as_slice());
                let dev = paused.then_some(["/pause", "/collective_rpc", "/weight_checker", "/server_info"].as_slice());
                Ok([own, dev].into_iter().flatten().flatten().map(|route| route.to_string()).collect())
            }
            Err(error) => Err(error),
        }
    }

    /// The server's settings; null where it does not tell them.
    async fn config(&self) -> Result<Value, RemoteError> {
        match self.server.get("/server_info?config_format=json").await {
            Ok(mut info) => Ok(info.get_mut("vllm_config").map(Value::take).unwrap_or_default()),
            Err(RemoteError { fault: Fault::Refused { .. }, .. }) => Ok(Value::Null),
            Err(error) => Err(error),
        }
    }

    /// Rejects requests that the server would fail.
    fn check(&self, attempt: &Attempt, found: &Capabilities) -> Result<(), RemoteError> {
        self.server.check_context(attempt, found.context, "--max-model-len")?;
        let params = &attempt.params;
        if found.raw_log_probs && attempt.log_probs && !params.keeps_log_probs() {
            return self.server.refuse(
                format!("its log-probabilities are those from before penalties, temperature {} and truncation", params.temperature),
                "start the server with --logprobs-mode processed_logprobs, or sample at temperature 1 without penalties, top_p, top_k and min_p",
            );
        }
        Ok(())
    }
}

/// Way of weights of a backend for weight transfer.
fn carry_of(backend: &str) -> Option<Carry> {
    match backend {
        "nccl" => Some(Carry::Broadcast),
        "ipc" => Some(Carry::Ipc),
        _ => None,
    }
}

/// Sends a group as one request.
async fn answer(server: Server, group: GroupRequest, model: String) {
    let (first, samples) = group.first();
    let question = question(first, samples, &model);
    group.read(server.stream(GENERATE, &question, Event::delta), server.client.name()).await;
}

/// Request body for `samples` samples, the first of which is `attempt`. Sample `i` draws with seed
/// + `i`.
fn question(attempt: &Attempt, samples: usize, model: &str) -> Value {
    let params = &attempt.params;
    let mut sampling = json!({
        "n": samples, "temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k, "min_p": params.min_p,
        "seed": attempt.seed & 0x7fff_ffff, "max_tokens": attempt.rest(), "stop_token_ids": params.stop_token_ids,
        "ignore_eos": params.ignore_eos, "logprobs": 0, "detokenize": false, "skip_special_tokens": false,
    });
    if !params.stop.is_empty() {
        // The server finds stop strings only in text.
        sampling["detokenize"] = true.into();
        sampling["stop"] = params.stop.clone().into();
        sampling["include_stop_str_in_output"] = true.into();
    }
    add_adjustments(&mut sampling, params);
    let mut question = json!({
        "request_id": attempt.id(), "model": attempt.adapter.as_deref().unwrap_or(model), "token_ids": &attempt.tokens[..],
        "sampling_params": sampling, "stream": true, "output_mode": "tokens",
    });
    if let Some(key) = &attempt.cache_key {
        question["cache_salt"] = key.clone().into();
    }
    question
}

/// A request for completions with what it would leave out: the server then takes that from the folder's
/// `generation_config.json`, which often has a penalty or a truncation.
fn with_all(mut question: Value, params: &SamplingParams) -> Value {
    // Old versions know -1 alone for all.
    question["top_k"] = if params.top_k == 0 { json!(-1) } else { json!(params.top_k) };
    question["min_p"] = params.min_p.into();
    question["repetition_penalty"] = params.repetition_penalty.into();
    question
}

impl VllmEngine {
    /// Log-probability of a token after others. Together with other requests, log-probabilities of
    /// prompts under an adapter end vLLM's engine (vllm-project/vllm#16668).
    async fn score_next(&self, before: &[u32], next: u32, adapter: &str) -> Result<f32, RemoteError> {
        let question = json!({
            "model": adapter, "prompt": before, "max_tokens": 1, "temperature": 1.0, "top_p": 1.0, "logprobs": 1,
            "logprob_token_ids": [next], "return_tokens_as_token_ids": true,
        });
        let question = with_all(question, &SamplingParams::default());
        let place = format!("/choices/0/logprobs/top_logprobs/0/token_id:{next}");
        let listed = |reply: &Value| Some(reply.pointer(&place)?.as_f64()? as f32);
        self.server.score(openai::PATH, question, "(logprob_token_ids)", listed).await
    }
}

#[async_trait]
impl InferenceEngine for VllmEngine {
    fn name(&self) -> String {
        self.server.name()
    }

    fn address(&self) -> Option<&str> {
        Some(self.server.client.base())
    }

    async fn generate(&self, attempt: &Attempt, tokens: &Sender<Vec<(u32, f32)>>) -> Result<Ending, RemoteError> {
        let found = self.ask().await?;
        self.check(attempt, found)?;
        let model = &found.model;
        if !found.spans {
            let question = with_all(openai::question(attempt, model), &attempt.params);
            return self.server.follow(openai::PATH, &question, tokens, Event::delta).await;
        }
        let ask = |group| answer(self.server.clone(), group, model.clone());
        if attempt.together > 1
            && let Some(ended) = self.groups.join(attempt, tokens, ask).await
        {
            return ended;
        }
        self.server.follow(GENERATE, &question(attempt, 1, model), tokens, Event::delta).await
    }

    async fn probe(&self) -> Result<Capabilities, RemoteError> {
        Ok(self.ask().await?.clone())
    }

    async fn healthy(&self, limit: Duration) -> Result<(), RemoteError> {
        self.server.client.get("/health", limit).await.map(drop)
    }

    async fn score_top(&self, tokens: &[u32], of: TopK) -> Result<(Vec<f32>, TopTokens), RemoteError> {
        let question = json!({
            "model": self.ask().await?.model, "prompt": tokens, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": of.k,
            "return_token_ids": true,
        });
        // Each place lists the likeliest tokens with their ranks from 1, and the given one.
        let listed = |reply: &Value| {
            let (mut log_probs, mut top) = (Vec::new(), TopTokens::new(1, tokens.len(), of.k));
            for (position, token) in tokens.iter().enumerate().skip(1) {
                let place = reply.pointer("/choices/0/prompt_logprobs")?.get(position)?.as_object()?;
                let number = |entry: &Value| Some(entry.get("logprob")?.as_f64()? as f32);
                log_probs.push(number(place.get(&token.to_string())?)?);
                let entry =
                    |(id, entry): (&String, &Value)| Some((entry.get("rank")?.as_u64()?, id.parse().ok()?, number(entry)?));
                let mut entries = place.iter().map(entry).collect::<Option<Vec<(u64, u32, f32)>>>()?;
                entries.sort_by_key(|(rank, ..)| *rank);
                top.set_all(position, entries.into_iter().map(|(_, id, log_prob)| (id, log_prob)), of.below)?;
            }
            Some((log_probs, top))
        };
        self.server.score(openai::PATH, question, "in each place (start vLLM with a larger --max-logprobs)", listed).await
    }

    async fn score(&self, tokens: &[u32], adapter: Option<&str>) -> Result<Vec<f32>, RemoteError> {
        let model = &self.ask().await?.model;
        if let Some(adapter) = adapter {
            return try_join_all((1..tokens.len()).map(|at| self.score_next(&tokens[..at], tokens[at], adapter))).await;
        }
        let question = json!({
            "model": model, "prompt": tokens, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0,
            "return_token_ids": true,
        });
        let listed = |reply: &Value| {
            let listed = reply.pointer("/choices/0/prompt_logprobs")?.as_array()?.iter().zip(tokens).skip(1);
            let found = listed.map(|(entry, token)| Some(entry.pointer(&format!("/{token}/logprob"))?.as_f64()? as f32));
            found.collect::<Option<Vec<f32>>>().filter(|found| found.len() + 1 == tokens.len())
        };
        self.server.score(openai::PATH, question, "of the prompt", listed).await
    }

    fn weights(&self) -> Option<&dyn WeightControl> {
        Some(self)
    }
}

/// Routes of the developer mode (tested with 0.32 and 0.33).
#[async_trait]
impl WeightControl for VllmEngine {
    async fn pause(&self, mode: PauseMode) -> Result<(), RemoteError> {
        let mode = match mode {
            PauseMode::Keep => "keep",
            PauseMode::Finish => "wait",
            PauseMode::Abort => "abort",
            PauseMode::Recompute => {
                let what = "recomputing keys and values under new weights; set engine.pause to \"keep\", \"finish\" or \"abort\"";
                return Err(self.server.client.fault(Fault::Unsupported(what)));
            }
        };
        // By default 0.32 clears the keys and values of paused requests. A sync flushes by itself.
        self.server.post_control(&format!("/pause?mode={mode}&clear_cache=false"), &Value::Null).await.map(drop)
    }

    async fn load(&self, folder: &Path, _label: &str) -> Result<(), RemoteError> {
        let path = "/collective_rpc";
        let body = json!({"method": "reload_weights", "args": [], "kwargs": {"weights_path": folder}});
        let reply = self.server.post_control(path, &body).await?;
        // Without a result from a worker, nothing was loaded.
        match reply["results"].as_array() {
            Some(results) if !results.is_empty() => Ok(()),
            _ => Err(self.server.nonsense(path, "no results", &reply)),
        }
    }

    async fn load_tensors(&self, tensors: &Arc<dyn TensorSource>, carry: Carry) -> Result<(), RemoteError> {
        match carry {
            Carry::Ipc => transfer::vllm::share(&self.server, tensors).await,
            _ => transfer::vllm::broadcast(&self.server, tensors).await,
        }
    }

    async fn load_adapter(&self, name: &str, folder: &Path) -> Result<(), RemoteError> {
        unload_namesake(self, name).await?;
        // Not in place: the server would read the folder again with every request.
        let body = json!({"lora_name": name, "lora_path": folder});
        self.server.post_control("/v1/load_lora_adapter", &body).await.map(drop)
    }

    async fn unload_adapter(&self, name: &str) -> Result<(), RemoteError> {
        self.server.post_control("/v1/unload_lora_adapter", &json!({"lora_name": name})).await.map(drop)
    }

    async fn adapters(&self) -> Result<Vec<String>, RemoteError> {
        self.server.adapters().await
    }

    async fn label(&self, label: &str) -> Result<(), RemoteError> {
        self.server.post_success("/update_weight_version", &json!({"new_version": label})).await.map(drop)
    }

    async fn served(&self) -> Result<Option<String>, RemoteError> {
        Ok(label(&self.server.info("/weight_info").await?))
    }

    async fn checksums(&self) -> Result<Option<BTreeMap<String, String>>, RemoteError> {
        self.server.checksums("/weight_checker", &["checksums"], false).await
    }

    async fn flush_cache(&self) -> Result<(), RemoteError> {
        self.server.post_success("/reset_prefix_cache", &Value::Null).await.map(drop)
    }

    async fn sleep(&self) -> Result<(), RemoteError> {
        self.server.post_control("/sleep?level=1", &Value::Null).await.map(drop)
    }

    async fn wake(&self, part: EngineMemory) -> Result<(), RemoteError> {
        self.server.post_control(&format!("/wake_up?tags={}", part.tag()), &Value::Null).await.map(drop)
    }

    async fn resume(&self) -> Result<(), RemoteError> {
        self.server.post_control("/resume", &Value::Null).await.map(drop)
    }
}
