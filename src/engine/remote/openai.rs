//! `POST /v1/completions` with token ids: servers with OpenAI's API, and vLLM without its own route.
//!
//! Servers with OpenAI's API report nothing about weights. Verify their log-probabilities before
//! training with them.

use std::time::Duration;

use async_trait::async_trait;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::OnceCell;
use tokio::sync::mpsc::Sender;

use super::server::{EventError, Server, StreamDelta, WireSpan, add_adjustments, chunk, ending};
use super::{Attempt, Capabilities, Ending, InferenceEngine, RemoteError};
use crate::engine::FinishReason;
use crate::net::Endpoint;

pub(super) const PATH: &str = "/v1/completions";

pub(super) struct OpenAiEngine {
    server: Server,
    model: OnceCell<String>,
}

impl OpenAiEngine {
    pub(super) fn new(endpoint: Endpoint, model: Option<String>) -> Result<Self, RemoteError> {
        let server = Server::new("OpenAI-like server", endpoint, model.clone(), |_| "")?;
        Ok(OpenAiEngine { server, model: OnceCell::new_with(model) })
    }

    async fn model(&self) -> Result<&String, RemoteError> {
        self.model.get_or_try_init(|| async { Ok(self.server.first_model().await?.1) }).await
    }
}

#[async_trait]
impl InferenceEngine for OpenAiEngine {
    fn name(&self) -> String {
        self.server.name()
    }

    async fn generate(&self, attempt: &Attempt, tokens: &Sender<Vec<(u32, f32)>>) -> Result<Ending, RemoteError> {
        let question = question(attempt, self.model().await?);
        self.server.follow(PATH, &question, tokens, Event::delta).await
    }

    async fn probe(&self) -> Result<Capabilities, RemoteError> {
        let (server, model) = ("OpenAI-like server".to_owned(), self.model().await?.clone());
        Ok(Capabilities { server, model, ..Capabilities::default() })
    }

    async fn healthy(&self, limit: Duration) -> Result<(), RemoteError> {
        self.server.client.get("/v1/models", limit).await.map(drop)
    }

    async fn score(&self, tokens: &[u32], adapter: Option<&str>) -> Result<Vec<f32>, RemoteError> {
        let model = adapter.unwrap_or(self.model().await?);
        let question = json!({
            "model": model, "prompt": tokens, "max_tokens": 1, "temperature": 0.0, "echo": true, "logprobs": 1,
        });
        let listed = |reply: &Value| {
            let listed = reply.pointer("/choices/0/logprobs/token_logprobs")?.as_array()?;
            let found = listed.iter().take(tokens.len()).skip(1).map(|entry| Some(entry.as_f64()? as f32));
            found.collect::<Option<Vec<f32>>>().filter(|found| found.len() + 1 == tokens.len())
        };
        self.server.score(PATH, question, "(echo)", listed).await
    }
}

/// Request body of an attempt. Unknown keys are ignored or rejected by name, depending on the
/// server.
pub(super) fn question(attempt: &Attempt, model: &str) -> Value {
    let params = &attempt.params;
    let mut question = json!({
        "model": attempt.adapter.as_deref().unwrap_or(model), "prompt": &attempt.tokens[..], "max_tokens": attempt.rest(), "temperature": params.temperature,
        "top_p": params.top_p, "seed": attempt.seed & 0x7fff_ffff, "logprobs": 0, "stream": true, "return_token_ids": true,
        "return_tokens_as_token_ids": true, "return_weight_versions": true, "request_id": attempt.id(),
        "include_stop_str_in_output": true, "skip_special_tokens": false,
    });
    // Only values that differ from the default: some servers reject unknown keys.
    for (key, differs, value) in [
        ("top_k", params.top_k > 0, json!(params.top_k)),
        ("min_p", params.min_p > 0.0, json!(params.min_p)),
        ("stop", !params.stop.is_empty(), json!(params.stop)),
        ("stop_token_ids", !params.stop_token_ids.is_empty(), json!(params.stop_token_ids)),
        ("ignore_eos", params.ignore_eos, json!(true)),
        ("cache_salt", attempt.cache_key.is_some(), json!(attempt.cache_key)),
    ] {
        if differs {
            question[key] = value;
        }
    }
    add_adjustments(&mut question, params);
    question
}

/// One event of the stream, of this route or of vLLM's own.
#[derive(Debug, Deserialize)]
pub(super) struct Event {
    #[serde(default)]
    choices: Vec<Choice>,
}

#[derive(Debug, Deserialize)]
struct Choice {
    #[serde(default)]
    index: usize,
    token_ids: Option<Vec<u32>>,
    logprobs: Option<LogProbs>,
    finish_reason: Option<String>,
    weight_versions: Option<Vec<WireSpan>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct LogProbs {
    tokens: Vec<String>,
    token_logprobs: Vec<Option<f64>>,
    /// Entries of vLLM's own route. Other servers may add them to `token_logprobs`, or null.
    content: Option<Vec<Entry>>,
}

#[derive(Debug, Deserialize)]
struct Entry {
    token_id: Option<u32>,
    logprob: Option<f64>,
}

impl Event {
    pub(super) fn delta(self) -> Result<StreamDelta, EventError> {
        let Some(Choice { index, token_ids, logprobs, finish_reason, weight_versions }) = self.choices.into_iter().next() else {
            return Ok(StreamDelta::default());
        };
        let LogProbs { tokens, mut token_logprobs, content } = logprobs.unwrap_or_default();
        let content = content.unwrap_or_default();
        let ids = match token_ids {
            Some(ids) => ids,
            None => tokens.iter().map(|token| id(token)).collect::<Result<_, _>>()?,
        };
        let differs = |(entry, token): &(&Entry, &u32)| entry.token_id.is_some_and(|id| id != **token);
        if let Some((entry, token)) = content.iter().zip(&ids).find(differs) {
            return Err(EventError::Nonsense(format!("a log-probability of token {:?} for token {token}", entry.token_id)));
        }
        if token_logprobs.is_empty() {
            token_logprobs = content.into_iter().map(|entry| entry.logprob).collect();
        }
        let chunk = chunk(ids, token_logprobs)?;
        let finish = finish_reason.as_deref().map(finish).transpose()?;
        let ending = finish.map(|finish| ending(finish, weight_versions));
        Ok(StreamDelta { choice: index, chunk, ending, over: false })
    }
}

/// Id in `token_id:123`.
fn id(token: &str) -> Result<u32, String> {
    let id = token.strip_prefix("token_id:").and_then(|id| id.parse().ok());
    id.ok_or_else(|| format!("the token {token:?} as text: the server must give token ids (return_token_ids)"))
}

/// Converts `finish_reason`; `None` is an abort.
fn finish(reason: &str) -> Result<Option<FinishReason>, EventError> {
    match reason {
        // `repetition` is vLLM's end of a looping completion.
        "stop" | "repetition" => Ok(Some(FinishReason::Stop)),
        "length" => Ok(Some(FinishReason::Length)),
        "abort" => Ok(None),
        "error" => Err(EventError::Refused { status: 500, message: "it ended with finish_reason \"error\"".into() }),
        other => Err(EventError::Nonsense(format!("finish_reason {other:?}, which is unknown here"))),
    }
}
