//! SGLang: `POST /generate`, streamed.
//!
//! Events hold the whole completion or only its new part, depending on the server's flags. The
//! reported number of tokens tells which.

use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::OnceCell;

use super::reply::{WireSpan, chunk, spans};
use super::server::{EventError, ServerConfig, StreamDelta, follow};
use super::sglang_weights::SglangWeights;
use super::{Attempt, Capabilities, End, Ending, Fault, InferenceEngine, Pending, RemoteError, Tokens, WeightControl};
use crate::net::Client;

const GENERATE: &str = "/generate";

/// SGLang server.
#[derive(Clone)]
pub struct SglangEngine {
    client: Client,
    config: ServerConfig,
    probed: Arc<OnceCell<Capabilities>>,
    control: SglangWeights,
}

impl SglangEngine {
    /// Connects to the server at `http://host:port`, with the first request.
    pub fn new(url: &str) -> Result<Self, RemoteError> {
        SglangEngine::with(ServerConfig::new(url))
    }

    /// Connects with this configuration.
    pub fn with(config: ServerConfig) -> Result<Self, RemoteError> {
        let client = config.client("SGLang")?;
        let control = SglangWeights::new(&client);
        Ok(SglangEngine { client, config, probed: Arc::default(), control })
    }

    async fn ask(&self) -> Result<&Capabilities, RemoteError> {
        self.probed.get_or_try_init(|| self.look()).await
    }

    async fn look(&self) -> Result<Capabilities, RemoteError> {
        let call = self.config.call;
        // Older servers have only the second name.
        let named = |new: &'static str, old: &'static str| async move {
            match self.client.get(new, call).await {
                Err(RemoteError { fault: Fault::Refused { status: 404, .. }, .. }) => self.client.get(old, call).await,
                answer => answer,
            }
        };
        let model = named("/model_info", "/get_model_info").await?;
        let server = named("/server_info", "/get_server_info").await?;
        let text = |of: &Value, key: &str| of.get(key).and_then(Value::as_str).map(str::to_owned);
        let context = ["context_length", "max_req_input_len"].iter().find_map(|key| server.get(*key)?.as_u64());
        let served = text(&model, "served_model_name").or_else(|| text(&model, "model_path"));
        Ok(Capabilities {
            server: format!("SGLang {}", text(&server, "version").unwrap_or_else(|| "of unknown version".into())),
            model: self.config.model.clone().or(served).unwrap_or_default(),
            context: context.map(|context| context as usize),
            streams: true,
            spans: model.get("weight_version").is_some(),
            cache_keys: true,
            weights: true,
            checksums: model.get("weight_version").is_some(),
            adapters: server.get("enable_lora").and_then(Value::as_bool).unwrap_or(false),
            lacks: Vec::new(),
        })
    }

    fn check(&self, attempt: &Attempt, context: Option<usize>) -> Result<(), RemoteError> {
        let (there, rest) = (attempt.tokens.len(), attempt.rest());
        match context {
            Some(context) if there + rest > context => Err(self.client.fault(Fault::Refused {
                what: "the request".into(),
                status: 400,
                begins: format!("{there} tokens and up to {rest} more don't fit the context of {context}"),
                advice: "shorten the prompt or max_new_tokens, or start the server with a larger --context-length".into(),
            })),
            _ => Ok(()),
        }
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
    let mut question = json!({
        "rid": attempt.id(), "input_ids": &attempt.tokens[..], "sampling_params": sampling, "return_logprob": true,
        "logprob_start_len": -1, "top_logprobs_num": 0, "return_text_in_logprobs": false, "stream": true,
    });
    if let Some(key) = &attempt.cache_key {
        question["extra_key"] = key.clone().into();
    }
    if let Some(adapter) = &attempt.adapter {
        question["lora_path"] = adapter.clone().into();
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
        let chunk = chunk(output_ids, log_probs.into_iter().map(|(log_prob, ..)| log_prob).collect())?;
        self.read += chunk.tokens.len();
        if self.read != all {
            return Err(EventError::Nonsense(format!("{} tokens, of which it counts {all}", self.read)));
        }
        if let Some(stop) = chunk.tokens.iter().position(|token| self.stops.contains(token)) {
            let mut chunk = chunk;
            chunk.tokens.truncate(stop + 1);
            chunk.log_probs.truncate(stop + 1);
            return Ok(StreamDelta {
                chunk,
                ending: Some(Ending { end: End::Stop, spans: None }),
                over: true,
                ..StreamDelta::default()
            });
        }
        let Some(finish) = meta.finish_reason else { return Ok(StreamDelta { chunk, ..StreamDelta::default() }) };
        let end = match (finish.kind.as_str(), finish.status_code) {
            ("stop", _) => End::Stop,
            ("length", _) => End::Length,
            ("abort", Some(status)) if status >= 400 => {
                return Err(EventError::Refused { status, message: finish.message.unwrap_or_default() });
            }
            ("abort", _) => End::Aborted,
            (other, _) => return Err(EventError::Nonsense(format!("finish_reason {other:?}, which is unknown here"))),
        };
        // `weight_version` alone is the newest version, not that of each token.
        Ok(StreamDelta { chunk, ending: Some(Ending { end, spans: spans(meta.weight_versions) }), ..StreamDelta::default() })
    }
}

impl InferenceEngine for SglangEngine {
    fn name(&self) -> String {
        self.client.name().to_owned()
    }

    fn generate<'a>(&'a self, attempt: &'a Attempt, tokens: &'a Tokens) -> Pending<'a, Ending> {
        Box::pin(async move {
            self.check(attempt, self.ask().await?.context)?;
            let stops = if attempt.params.ignore_eos { attempt.params.stop_token_ids.clone() } else { Vec::new() };
            let mut reader = Reader { read: 0, stops };
            let question = question(attempt);
            let ended = follow(&self.client, self.config.stream(GENERATE, &question), tokens, |event| reader.delta(event)).await;
            ended.map_err(|error| without_adapter(error, attempt))
        })
    }

    fn probe(&self) -> Pending<'_, Capabilities> {
        Box::pin(async { Ok(self.ask().await?.clone()) })
    }

    /// Uses `/ready`, because `/health` generates a token and takes a second.
    fn healthy(&self, limit: Duration) -> Pending<'_, ()> {
        Box::pin(async move {
            match self.client.get("/ready", limit).await {
                Err(RemoteError { fault: Fault::Refused { status: 404, .. }, .. }) => {
                    self.client.get("/get_model_info", limit).await
                }
                answer => answer,
            }
            .map(drop)
        })
    }

    fn score<'a>(&'a self, tokens: &'a [u32], adapter: Option<&'a str>) -> Pending<'a, Vec<f32>> {
        Box::pin(async move {
            let question = json!({
                "input_ids": tokens, "sampling_params": { "max_new_tokens": 1, "temperature": 0.0 }, "return_logprob": true,
                "logprob_start_len": 0, "stream": false, "lora_path": adapter,
            });
            let reply = self.client.post(GENERATE, &question, self.config.stall_timeout).await?;
            let listed = reply.pointer("/meta_info/input_token_logprobs").and_then(Value::as_array);
            // The first token may be listed without a log-probability, or not at all. The server
            // lists ids of the vocabulary's end as 0; their log-probabilities are correct.
            let of = |(entry, token): (&Value, &u32)| {
                let id = entry.get(1)?.as_u64()?;
                (id == u64::from(*token) || id == 0).then_some(entry.get(0)?.as_f64()? as f32)
            };
            let log_probs = listed.and_then(|listed| {
                let from = listed.len().checked_sub(tokens.len().saturating_sub(1))?;
                listed[from..].iter().zip(&tokens[1..]).map(of).collect::<Option<Vec<f32>>>()
            });
            let what = "POST /generate";
            log_probs.ok_or_else(|| {
                self.client.nonsense(what, "no log-probability for each token of the prompt".into(), &reply.to_string())
            })
        })
    }

    fn weights(&self) -> Option<&dyn WeightControl> {
        Some(&self.control)
    }
}
