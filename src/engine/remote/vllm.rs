//! vLLM: tokens in and out by its own route, or by `/v1/completions` on servers without it.
//!
//! The first request reads the server's list of routes. Log-probabilities are those of the sampled
//! distribution only with `--logprobs-mode processed_logprobs`. Otherwise they are correct only at
//! temperature 1 without truncation, and other requests are rejected.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::OnceCell;

use super::group_request::{GroupRequest, GroupRequests};
use super::reply::{WireSpan, chunk, spans};
use super::server::{EventError, ServerConfig, StreamDelta, follow, listen};
use super::vllm_weights::VllmWeights;
use super::{
    Attempt, Capabilities, End, Ending, Fault, InferenceEngine, Pending, RemoteError, Tokens, WeightControl, completions,
};
use crate::net::Client;

/// vLLM's own route, which `--enable-scale-out` enables.
const GENERATE: &str = "/inference/v1/generate";

/// Advice for a server without routes for weights.
const DEV_MODE: &str = "VLLM_SERVER_DEV_MODE=1 in the server's environment turns on its routes for weights (/pause, /collective_rpc and others), \
     which it lacks; they take no token, so keep it on a network of your own";

/// vLLM server.
#[derive(Clone)]
pub struct VllmEngine {
    client: Client,
    config: ServerConfig,
    probed: Arc<OnceCell<Probed>>,
    groups: GroupRequests,
    control: VllmWeights,
}

#[derive(Clone, Debug)]
struct Probed {
    capabilities: Capabilities,
    /// If true, the server has its own route for generation.
    generates: bool,
    /// If true, log-probabilities are those before temperature and truncation.
    raw: bool,
}

impl VllmEngine {
    /// Connects to the server at `http://host:port`, with the first request.
    pub fn new(url: &str) -> Result<Self, RemoteError> {
        VllmEngine::with(ServerConfig::new(url))
    }

    /// Connects with this configuration.
    pub fn with(config: ServerConfig) -> Result<Self, RemoteError> {
        let client = config.client("vLLM")?;
        let control = VllmWeights::new(&client);
        Ok(VllmEngine { client, config, probed: Arc::default(), groups: GroupRequests::default(), control })
    }

    async fn ask(&self) -> Result<&Probed, RemoteError> {
        self.probed.get_or_try_init(|| self.look()).await
    }

    async fn look(&self) -> Result<Probed, RemoteError> {
        let call = self.config.call;
        let version = self.client.get("/version", call).await?;
        let models = self.client.get("/v1/models", call).await?;
        let first = models.pointer("/data/0").cloned().unwrap_or_default();
        let served = first.get("id").and_then(Value::as_str).map(str::to_owned);
        let Some(model) = self.config.model.clone().or(served) else {
            return Err(self.client.nonsense("GET /v1/models", "no model".into(), &models.to_string()));
        };
        let routes = self.routes().await?;
        let has = |route: &str| routes.contains(route);
        let weights = has("/pause") && has("/collective_rpc");
        let raw = has("/server_info") && self.reports_raw().await;
        let generates = has(GENERATE);
        let capabilities = Capabilities {
            server: format!("vLLM {}", version.get("version").and_then(Value::as_str).unwrap_or("of unknown version")),
            model,
            context: first.get("max_model_len").and_then(Value::as_u64).map(|context| context as usize),
            streams: true,
            spans: generates,
            cache_keys: true,
            weights,
            checksums: has("/weight_checker"),
            adapters: has("/v1/load_lora_adapter"),
            lacks: (!weights).then(|| DEV_MODE.to_owned()).into_iter().collect(),
        };
        Ok(Probed { capabilities, generates, raw })
    }

    /// List of routes, or of those that answer if the server hides its list.
    async fn routes(&self) -> Result<BTreeSet<String>, RemoteError> {
        match self.client.get("/openapi.json", self.config.call).await {
            Ok(list) => {
                let paths = list.get("paths").and_then(Value::as_object);
                Ok(paths.into_iter().flatten().map(|(path, _)| path.clone()).collect())
            }
            Err(RemoteError { fault: Fault::Refused { .. }, .. }) => {
                // An existing route rejects an empty request.
                let own = self.client.post(GENERATE, &json!({}), self.config.call).await;
                let missing = matches!(&own, Err(RemoteError { fault: Fault::Refused { status: 404 | 405, .. }, .. }));
                let paused = self.client.get("/is_paused", self.config.call).await.is_ok();
                let own = (!missing).then_some([GENERATE].as_slice());
                let dev = paused.then_some(["/pause", "/collective_rpc", "/weight_checker"].as_slice());
                Ok([own, dev].into_iter().flatten().flatten().map(|route| route.to_string()).collect())
            }
            Err(error) => Err(error),
        }
    }

    async fn reports_raw(&self) -> bool {
        let info = self.client.get("/server_info", self.config.call).await;
        info.is_ok_and(|info| {
            info.to_string().contains("logprobs_mode=raw_logprobs") || info.to_string().contains("'raw_logprobs'")
        })
    }

    /// Sends a group as one request.
    async fn answer(self, mut group: GroupRequest, model: String) {
        let (first, samples) = group.first();
        let question = question(first, samples, &model);
        let channels = group.channels();
        let request = self.config.stream(GENERATE, &question);
        tokio::select! {
            answered = listen(&self.client, request, &mut group, delta) => group.end(answered, self.client.name()),
            // Closing the connection stops the server.
            () = GroupRequest::deserted(channels) => {}
        }
    }

    /// Rejects requests that the server would fail.
    fn check(&self, attempt: &Attempt, probed: &Probed) -> Result<(), RemoteError> {
        let refuse = |begins: String, advice: &str| {
            Err(self.client.fault(Fault::Refused { what: "the request".into(), status: 400, begins, advice: advice.into() }))
        };
        if let Some(context) = probed.capabilities.context
            && attempt.tokens.len() + attempt.rest() > context
        {
            let (there, rest) = (attempt.tokens.len(), attempt.rest());
            return refuse(
                format!("{there} tokens and up to {rest} more don't fit the context of {context}"),
                "shorten the prompt or max_new_tokens, or start the server with a larger --max-model-len",
            );
        }
        let params = &attempt.params;
        if probed.raw && !(params.greedy() || (params.temperature == 1.0 && params.keeps_all())) {
            return refuse(
                format!("its log-probabilities are those from before temperature {} and truncation", params.temperature),
                "start the server with --logprobs-mode processed_logprobs, or sample at temperature 1 without top_p, top_k and min_p",
            );
        }
        Ok(())
    }
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
    let mut question = json!({
        "request_id": attempt.id(), "model": attempt.adapter.as_deref().unwrap_or(model), "token_ids": &attempt.tokens[..],
        "sampling_params": sampling, "stream": true, "output_mode": "tokens",
    });
    if let Some(key) = &attempt.cache_key {
        question["cache_salt"] = key.clone().into();
    }
    question
}

#[derive(Debug, Deserialize)]
struct Event {
    #[serde(default)]
    choices: Vec<Choice>,
}

#[derive(Debug, Deserialize)]
struct Choice {
    #[serde(default)]
    index: usize,
    #[serde(default)]
    token_ids: Vec<u32>,
    logprobs: Option<LogProbs>,
    finish_reason: Option<String>,
    weight_versions: Option<Vec<WireSpan>>,
}

#[derive(Debug, Deserialize)]
struct LogProbs {
    content: Vec<Entry>,
}

#[derive(Debug, Deserialize)]
struct Entry {
    token_id: Option<u32>,
    logprob: Option<f64>,
}

fn delta(event: Event) -> Result<StreamDelta, EventError> {
    let Some(Choice { index, token_ids, logprobs, finish_reason, weight_versions }) = event.choices.into_iter().next() else {
        return Ok(StreamDelta::default());
    };
    let entries = logprobs.map(|log_probs| log_probs.content).unwrap_or_default();
    if let Some((entry, token)) =
        entries.iter().zip(&token_ids).find(|(entry, token)| entry.token_id.is_some_and(|id| id != **token))
    {
        return Err(EventError::Nonsense(format!("a log-probability of token {:?} for token {token}", entry.token_id)));
    }
    let chunk = chunk(token_ids, entries.into_iter().map(|entry| entry.logprob).collect())?;
    let end = finish_reason.as_deref().map(completions::end).transpose()?;
    Ok(StreamDelta {
        choice: index,
        chunk,
        ending: end.map(|end: End| Ending { end, spans: spans(weight_versions) }),
        over: false,
    })
}

impl InferenceEngine for VllmEngine {
    fn name(&self) -> String {
        self.client.name().to_owned()
    }

    fn generate<'a>(&'a self, attempt: &'a Attempt, tokens: &'a Tokens) -> Pending<'a, Ending> {
        Box::pin(async move {
            let probed = self.ask().await?;
            self.check(attempt, probed)?;
            let model = &probed.capabilities.model;
            if !probed.generates {
                let question = completions::question(attempt, model);
                return follow(&self.client, self.config.stream(completions::PATH, &question), tokens, completions::Event::delta)
                    .await;
            }
            let ask = |group| self.clone().answer(group, model.clone());
            if attempt.together > 1
                && let Some(ended) = self.groups.join(attempt, tokens, ask).await
            {
                return ended;
            }
            follow(&self.client, self.config.stream(GENERATE, &question(attempt, 1, model)), tokens, delta).await
        })
    }

    fn probe(&self) -> Pending<'_, Capabilities> {
        Box::pin(async { Ok(self.ask().await?.capabilities.clone()) })
    }

    fn healthy(&self, limit: Duration) -> Pending<'_, ()> {
        Box::pin(async move { self.client.get("/health", limit).await.map(drop) })
    }

    fn score<'a>(&'a self, tokens: &'a [u32], adapter: Option<&'a str>) -> Pending<'a, Vec<f32>> {
        Box::pin(async move {
            let model = adapter.unwrap_or(&self.ask().await?.capabilities.model);
            let what = format!("POST {}", completions::PATH);
            let question = json!({
                "model": model, "prompt": tokens, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0,
                "return_token_ids": true,
            });
            let reply = self.client.post(completions::PATH, &question, self.config.stall_timeout).await?;
            let listed = reply.pointer("/choices/0/prompt_logprobs").and_then(Value::as_array);
            let of = |(entry, token): (&Value, &u32)| entry.pointer(&format!("/{token}/logprob"))?.as_f64();
            let log_probs: Option<Vec<f32>> =
                listed.and_then(|listed| listed.iter().zip(tokens).skip(1).map(|pair| of(pair).map(|p| p as f32)).collect());
            match log_probs {
                Some(log_probs) if log_probs.len() + 1 == tokens.len() => Ok(log_probs),
                _ => {
                    Err(self.client.nonsense(&what, "no log-probability for each token of the prompt".into(), &reply.to_string()))
                }
            }
        })
    }

    fn weights(&self) -> Option<&dyn WeightControl> {
        Some(&self.control)
    }
}
