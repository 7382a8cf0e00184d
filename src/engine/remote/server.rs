//! Parts of all HTTP engines: requests, streams of completions, and parts of replies.

use std::ops::Range;
use std::time::Duration;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::sync::mpsc::Sender;

use super::{Attempt, Ending, Fault, RemoteError};
use crate::engine::{FinishReason, SamplingParams};
use crate::net::{Client, Endpoint, Events, message};

/// Longest time of a request without generation.
pub(super) const CALL: Duration = Duration::from_secs(20);

/// Longest time of any other request, and of a pause within a stream. The timeouts of a fleet and
/// of a weight sync are shorter.
pub(super) const LIMIT: Duration = Duration::from_secs(3600);

/// Adds changes of scores to a request's sampling parameters, if there are any: some servers reject keys that
/// they don't know.
pub(super) fn add_adjustments(sampling: &mut Value, params: &SamplingParams) {
    if params.repetition_penalty != 1.0 {
        sampling["repetition_penalty"] = params.repetition_penalty.into();
    }
    if !params.logit_bias.is_empty() {
        sampling["logit_bias"] = params.logit_bias.iter().map(|(token, bias)| (token.to_string(), Value::from(*bias))).collect();
    }
}

#[derive(Clone, Debug)]
pub(super) struct Server {
    pub(super) client: Client,
    /// Model to request. Default: the first that the server lists.
    pub(super) model: Option<String>,
    /// Advice of errors about a missing route for weights, by the route.
    pub(super) advice: fn(&str) -> &'static str,
}

/// Longest page that is read, in bytes. Those with the likeliest tokens in each place are long.
const LONGEST_PAGE: usize = 256 << 20;

impl Server {
    /// A server that errors call `kind`. Sends nothing yet. Up to 256 connections stay open.
    pub(super) fn new(
        kind: &str,
        endpoint: Endpoint,
        model: Option<String>,
        advice: fn(&str) -> &'static str,
    ) -> Result<Self, RemoteError> {
        let client = Client::new(kind, Endpoint { idle_connections: 256, longest_page: LONGEST_PAGE, ..endpoint })?;
        Ok(Server { client, model, advice })
    }

    pub(super) fn name(&self) -> String {
        self.client.name().to_owned()
    }

    pub(super) async fn get(&self, path: &str) -> Result<Value, RemoteError> {
        self.client.get(path, CALL).await
    }

    /// The first listed model, and the name to request.
    pub(super) async fn first_model(&self) -> Result<(Value, String), RemoteError> {
        let models = self.get("/v1/models").await?;
        let first = models.pointer("/data/0").cloned().unwrap_or_default();
        match self.model.clone().or_else(|| text(&first, "id")) {
            Some(model) => Ok((first, model)),
            None => Err(self.client.nonsense("GET /v1/models", "no model".into(), &models.to_string())),
        }
    }

    /// Error of a request that the server would fail.
    pub(super) fn refuse<T>(&self, begins: String, advice: &str) -> Result<T, RemoteError> {
        let (what, advice) = ("the request".to_owned(), advice.to_owned());
        Err(self.client.fault(Fault::Refused { what, status: 400, begins, advice }))
    }

    /// Rejects an attempt longer than the server's context, which the flag `flag` sets.
    pub(super) fn check_context(&self, attempt: &Attempt, context: Option<usize>, flag: &str) -> Result<(), RemoteError> {
        let (there, rest) = (attempt.tokens.len(), attempt.rest());
        match context {
            Some(context) if there + rest > context => self.refuse(
                format!("{there} tokens and up to {rest} more don't fit the context of {context}"),
                &format!("shorten the prompt or max_new_tokens, or start the server with a larger {flag}"),
            ),
            _ => Ok(()),
        }
    }

    /// Posts a request to score a text; `listed` finds the log-probabilities of its tokens in the reply,
    /// all but the first. The error about a missing one ends with `lacks`.
    pub(super) async fn score<T>(
        &self,
        path: &str,
        body: Value,
        lacks: &str,
        listed: impl FnOnce(&Value) -> Option<T>,
    ) -> Result<T, RemoteError> {
        let reply = self.client.post(path, &body, LIMIT).await?;
        match listed(&reply) {
            Some(found) => Ok(found),
            None => {
                let why = format!("no log-probability for each token {lacks}");
                Err(self.client.nonsense(&format!("POST {path}"), why, &reply.to_string()))
            }
        }
    }

    /// Starts a request whose reply is a stream of events; `read` converts an event.
    pub(super) async fn stream<E: DeserializeOwned, R>(&self, path: &str, body: &Value, read: R) -> Result<Deltas<R>, RemoteError>
    where
        R: FnMut(E) -> Result<StreamDelta, EventError>,
    {
        let events = self.client.events(path, body, LIMIT).await?;
        Ok(Deltas { client: self.client.clone(), what: format!("POST {path}"), events, data: String::new(), read })
    }

    /// Reads the stream of one completion and sends its tokens.
    pub(super) async fn follow<E: DeserializeOwned>(
        &self,
        path: &str,
        body: &Value,
        tokens: &Sender<Vec<(u32, f32)>>,
        read: impl FnMut(E) -> Result<StreamDelta, EventError>,
    ) -> Result<Ending, RemoteError> {
        let mut deltas = self.stream(path, body, read).await?;
        let mut ended = None;
        while let Some(StreamDelta { chunk, ending, over, .. }) = deltas.next(ended.is_some()).await? {
            if !chunk.is_empty() && tokens.send(chunk).await.is_err() {
                return Ok(Ending::default());
            }
            ended = ending.or(ended);
            if over {
                break;
            }
        }
        ended.ok_or_else(|| self.client.fault(Fault::Broke(format!("POST {path} ended without saying why"))))
    }
}

#[derive(Debug, Default)]
pub(super) struct StreamDelta {
    /// Index of the completion in its group.
    pub(super) choice: usize,
    pub(super) chunk: Vec<(u32, f32)>,
    pub(super) ending: Option<Ending>,
    /// If true, the stream ends here and the server stops.
    pub(super) over: bool,
}

/// Stream of completions. Dropping it closes the connection, which stops the server.
pub(super) struct Deltas<R> {
    client: Client,
    what: String,
    events: Events,
    data: String,
    read: R,
}

impl<R> Deltas<R> {
    /// The next event; `None` after the last. If all completions have ended, `done`, a connection
    /// that breaks changes nothing.
    pub(super) async fn next<E: DeserializeOwned>(&mut self, done: bool) -> Result<Option<StreamDelta>, RemoteError>
    where
        R: FnMut(E) -> Result<StreamDelta, EventError>,
    {
        self.data = match self.events.next().await {
            Ok(Some(data)) => data,
            Ok(None) => return Ok(None),
            Err(_) if done => return Ok(None),
            Err(error) => return Err(error),
        };
        if self.data.contains("\"error\"")
            && let Ok(error) = serde_json::from_str::<Value>(&self.data)
            && error.get("error").is_some_and(|error| !error.is_null())
        {
            return Err(self.client.refusal(&self.what, status(&error), &message(&error)));
        }
        let event = serde_json::from_str(&self.data)
            .map_err(|error| self.nonsense(format!("an event that is not as expected ({error})")))?;
        match (self.read)(event) {
            Ok(delta) => Ok(Some(delta)),
            Err(EventError::Nonsense(why)) => Err(self.nonsense(why)),
            Err(EventError::Refused { status, message }) => Err(self.client.refusal(&self.what, status, &message)),
        }
    }

    pub(super) fn nonsense(&self, why: String) -> RemoteError {
        self.client.nonsense(&self.what, why, &self.data)
    }
}

#[derive(Debug)]
pub(super) enum EventError {
    /// Contradiction, or violation of the protocol.
    Nonsense(String),
    /// Failure that the event reports, with the equivalent HTTP status.
    Refused { status: u16, message: String },
}

impl From<String> for EventError {
    fn from(why: String) -> Self {
        EventError::Nonsense(why)
    }
}

/// Span of tokens of one version, as vLLM and SGLang write it.
#[derive(Debug, Deserialize)]
pub(super) struct WireSpan {
    version: String,
    start: usize,
    end: usize,
}

/// End of a completion with the spans that the server reports; an empty list is `None`.
pub(super) fn ending(finish: Option<FinishReason>, spans: Option<Vec<WireSpan>>) -> Ending {
    let range = |WireSpan { version, start, end }| -> (String, Range<usize>) { (version, start..end) };
    let spans = spans.filter(|spans| !spans.is_empty());
    Ending { finish, spans: spans.map(|spans| spans.into_iter().map(range).collect()), routes: None }
}

/// Pairs tokens with their log-probabilities.
pub(super) fn chunk(tokens: Vec<u32>, log_probs: Vec<Option<f64>>) -> Result<Vec<(u32, f32)>, String> {
    if tokens.len() != log_probs.len() {
        return Err(format!("{} tokens and {} log-probabilities", tokens.len(), log_probs.len()));
    }
    let pairs = tokens.into_iter().zip(log_probs).map(|(token, log_prob)| Some((token, log_prob? as f32)));
    pairs.collect::<Option<_>>().ok_or_else(|| "a token without log-probability".to_owned())
}

pub(super) fn text(of: &Value, key: &str) -> Option<String> {
    of.get(key).and_then(Value::as_str).map(str::to_owned)
}

/// Status of an error in a reply. Default: 500.
fn status(error: &Value) -> u16 {
    let code = [error.pointer("/error/code"), error.get("code"), error.get("status_code")].into_iter().flatten().next();
    code.and_then(Value::as_u64).and_then(|code| u16::try_from(code).ok()).filter(|code| (400..600).contains(code)).unwrap_or(500)
}
