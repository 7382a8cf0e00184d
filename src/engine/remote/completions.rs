//! `POST /v1/completions` with token ids, for vLLM without its own route and for servers with
//! OpenAI's API.

use serde::Deserialize;
use serde_json::{Value, json};

use super::reply::{WireSpan, chunk, spans};
use super::server::{EventError, StreamDelta};
use super::{Attempt, End, Ending};

pub(super) const PATH: &str = "/v1/completions";

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
    let mut set = |key: &str, value: Value| question[key] = value;
    if params.top_k > 0 {
        set("top_k", params.top_k.into());
    }
    if params.min_p > 0.0 {
        set("min_p", params.min_p.into());
    }
    if !params.stop.is_empty() {
        set("stop", params.stop.clone().into());
    }
    if !params.stop_token_ids.is_empty() {
        set("stop_token_ids", params.stop_token_ids.clone().into());
    }
    if params.ignore_eos {
        set("ignore_eos", true.into());
    }
    if let Some(key) = &attempt.cache_key {
        set("cache_salt", key.clone().into());
    }
    question
}

/// One event of the stream.
#[derive(Debug, Deserialize)]
pub(super) struct Event {
    #[serde(default)]
    choices: Vec<Choice>,
}

#[derive(Debug, Deserialize)]
struct Choice {
    token_ids: Option<Vec<u32>>,
    logprobs: Option<LogProbs>,
    finish_reason: Option<String>,
    weight_versions: Option<Vec<WireSpan>>,
}

#[derive(Debug, Default, Deserialize)]
struct LogProbs {
    #[serde(default)]
    tokens: Vec<String>,
    #[serde(default)]
    token_logprobs: Vec<Option<f64>>,
}

impl Event {
    /// Converts the event.
    pub(super) fn delta(self) -> Result<StreamDelta, EventError> {
        let Some(Choice { token_ids, logprobs, finish_reason, weight_versions }) = self.choices.into_iter().next() else {
            return Ok(StreamDelta::default());
        };
        let LogProbs { tokens, token_logprobs } = logprobs.unwrap_or_default();
        let ids = match token_ids {
            Some(ids) => ids,
            None => tokens.iter().map(|token| id(token)).collect::<Result<_, _>>()?,
        };
        let chunk = chunk(ids, token_logprobs)?;
        let end = finish_reason.as_deref().map(end).transpose()?;
        Ok(StreamDelta { chunk, ending: end.map(|end| Ending { end, spans: spans(weight_versions) }), ..StreamDelta::default() })
    }
}

/// Id in `token_id:123`.
fn id(token: &str) -> Result<u32, String> {
    let id = token.strip_prefix("token_id:").and_then(|id| id.parse().ok());
    id.ok_or_else(|| format!("the token {token:?} as text: the server must give token ids (return_token_ids)"))
}

/// Converts `finish_reason` of vLLM and OpenAI.
pub(super) fn end(reason: &str) -> Result<End, EventError> {
    match reason {
        // `repetition` is vLLM's end of a looping completion.
        "stop" | "repetition" => Ok(End::Stop),
        "length" => Ok(End::Length),
        "abort" => Ok(End::Aborted),
        "error" => Err(EventError::Refused { status: 500, message: "it ended with finish_reason \"error\"".into() }),
        other => Err(EventError::Nonsense(format!("finish_reason {other:?}, which is unknown here"))),
    }
}
