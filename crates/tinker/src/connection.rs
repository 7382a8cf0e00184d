//! A connection: a session that a heartbeat keeps alive, operations, and their answers.

mod archive;

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use reqwest::header::{ACCEPT, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use rollflow_net::{Answer, Client, Endpoint, Fault, RemoteError, Tasks, backoff, message, now};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::TinkerError;
use crate::message::{Pass, PassInput, PassOutput, SampleRequest, SampleResponse};
use crate::proto;

/// Longest time of a request that the server answers without waiting.
const CALL: Duration = Duration::from_secs(30);

/// Longest time that an answer is waited for before it is asked for again. Servers hold the request
/// until the answer is there.
const POLL: Duration = Duration::from_secs(60);

const HEARTBEAT: Duration = Duration::from_secs(10);

/// Failures after which a server is taken to fail at protobuf.
const FAILS: u32 = 3;

/// Longest pause before a retry.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// Dialect of passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    /// JSON, with a separate route for forward passes.
    Json,
    /// Protobuf.
    Protobuf,
}

/// What an operation does to its model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Nothing: it may be sent twice.
    Nothing,
    /// It changes the model: sent again only to a server that recognises repeated numbers.
    Changes,
}

/// Time limits.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// Longest time of an operation.
    pub operation: Duration,
    /// Longest time for which the server may be unreachable.
    pub unreachable: Duration,
    /// Pause before the first retry. It doubles up to 10 s.
    pub pause: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Patience {
            operation: Duration::from_secs(1800),
            unreachable: Duration::from_secs(120),
            pause: Duration::from_millis(200),
        }
    }
}

/// A session with a server of the Tinker API. Dropping it ends the heartbeat.
pub struct Connection {
    client: Client,
    headers: HeaderMap,
    /// Certificate authorities that are trusted in addition to the system's.
    ca_file: Option<PathBuf>,
    session: String,
    encoding: std::sync::OnceLock<Encoding>,
    /// If true, the server does a numbered operation once however often it is sent.
    recognises_repeats: AtomicBool,
    patience: Patience,
    _heartbeat: Tasks,
}

/// An answer's page, as protobuf or as JSON.
enum Page {
    Protobuf(Vec<u8>),
    Json(Value),
}

impl Connection {
    /// Opens a session. `key` is sent as `X-API-Key`, in addition to the endpoint's own token.
    ///
    /// # Errors
    /// The server cannot be reached, or opens no session.
    pub async fn open(endpoint: Endpoint, key: Option<&str>, patience: Patience) -> Result<Self, TinkerError> {
        let ca_file = endpoint.ca_file.clone();
        let client = Client::new("Tinker server", endpoint)?;
        let mut headers = HeaderMap::new();
        if let Some(mut key) = key.and_then(|key| HeaderValue::from_str(key).ok()) {
            key.set_sensitive(true);
            headers.insert(HeaderName::from_static("x-api-key"), key);
        }
        let threads = |error: std::io::Error| RemoteError::new(client.name(), Fault::Threads(error.to_string()));
        let heartbeat = Tasks::new().map_err(threads)?;
        let mut opened = Connection {
            client,
            headers,
            ca_file,
            session: String::new(),
            encoding: std::sync::OnceLock::new(),
            recognises_repeats: AtomicBool::new(false),
            patience,
            _heartbeat: heartbeat,
        };
        let body = json!({
            "tags": ["rollflow"], "user_metadata": null, "sdk_version": concat!("rollflow-", env!("CARGO_PKG_VERSION")),
            "type": "create_session",
        });
        let answer = opened.call("create_session", &body).await?;
        opened.session = opened.text(&answer, "session_id", "create_session")?;
        opened.keep_alive();
        Ok(opened)
    }

    fn keep_alive(&self) {
        let (client, headers) = (self.client.clone(), self.headers.clone());
        let body = json!({"session_id": self.session, "type": "session_heartbeat"}).to_string().into_bytes();
        self._heartbeat.spawn(async move {
            let mut well = true;
            loop {
                tokio::time::sleep(HEARTBEAT).await;
                let sent = client.exchange("/api/v1/session_heartbeat", headers.clone(), body.clone(), CALL).await;
                // Operations report what is wrong; this only says when it began.
                let ok = sent.is_ok_and(|answer| answer.status < 400);
                if well && !ok {
                    tracing::warn!("{} does not answer the session's heartbeat", client.name());
                }
                well = ok;
            }
        });
    }

    /// Name in errors: kind and address.
    pub fn name(&self) -> &str {
        self.client.name()
    }

    /// Address.
    pub fn address(&self) -> &str {
        self.client.base()
    }

    /// Id of the session.
    pub fn session(&self) -> &str {
        &self.session
    }

    /// Records that the server does a numbered operation once however often it is sent.
    pub fn recognises_repeats(&self) {
        self.recognises_repeats.store(true, Ordering::Relaxed);
    }

    /// Dialect of passes, once a pass was sent.
    pub fn encoding(&self) -> Option<Encoding> {
        self.encoding.get().copied()
    }

    /// A text in an answer.
    ///
    /// # Errors
    /// It is missing.
    pub fn text(&self, answer: &Value, key: &str, operation: &str) -> Result<String, TinkerError> {
        let found = answer.get(key).and_then(Value::as_str).map(str::to_owned);
        found.ok_or_else(|| self.nonsense(operation, format!("no `{key}`"), &answer.to_string()))
    }

    fn nonsense(&self, operation: &str, why: String, page: &str) -> TinkerError {
        self.client.nonsense(operation, why, page).into()
    }

    /// Calls a route that answers without a future and changes no model: `create_session`,
    /// `create_sampling_session`, `get_info`.
    ///
    /// # Errors
    /// The server cannot be reached for long, or refuses.
    pub async fn call(&self, route: &str, body: &Value) -> Result<Value, TinkerError> {
        let answer = self.send(route, route, HeaderMap::new(), body.to_string().into_bytes(), Effect::Nothing).await?;
        self.json(route, &answer)
    }

    /// Reads a page.
    ///
    /// # Errors
    /// The server cannot be reached, or refuses.
    pub async fn get(&self, route: &str) -> Result<Value, TinkerError> {
        Ok(self.client.get(&format!("/api/v1/{route}"), CALL).await?)
    }

    /// Submits an operation, and returns the name of its answer.
    ///
    /// # Errors
    /// Those of sending: see [`TinkerError`].
    pub async fn submit(&self, operation: &str, route: &str, body: &Value, effect: Effect) -> Result<String, TinkerError> {
        let answer = self.send(operation, route, HeaderMap::new(), body.to_string().into_bytes(), effect).await?;
        self.request_id(operation, &answer)
    }

    /// Submits a pass in the server's dialect. The first pass finds it out, and must be only forward.
    ///
    /// # Errors
    /// Those of sending: see [`TinkerError`].
    pub async fn submit_pass(&self, operation: &str, pass: &Pass) -> Result<String, TinkerError> {
        let effect = if pass.forward_only { Effect::Nothing } else { Effect::Changes };
        if self.encoding().is_none() {
            self.find_encoding(proto::encode_pass(pass)).await?;
        }
        if self.encoding() == Some(Encoding::Protobuf) {
            let sent = self.send(operation, "forward_backward", protobuf(), proto::encode_pass(pass), effect).await?;
            return self.request_id(operation, &sent);
        }
        let config = (!pass.loss_fn_config.is_empty()).then(|| pass.loss_fn_config.clone());
        let input = PassInput { data: pass.data.clone(), loss_fn: pass.loss_fn.clone(), loss_fn_config: config };
        let (route, field) = match pass.forward_only {
            true => ("forward", "forward_input"),
            false => ("forward_backward", "forward_backward_input"),
        };
        let body = json!({"model_id": pass.model_id, "seq_id": pass.seq_id, field: input});
        self.submit(operation, route, &body, effect).await
    }

    /// Sends a pass in protobuf. A server of the JSON dialect refuses it, or fails each time.
    async fn find_encoding(&self, pass: Vec<u8>) -> Result<(), TinkerError> {
        let mut headers = protobuf();
        headers.extend(self.headers.clone());
        let (started, mut failures, mut nth) = (now(), 0, 0);
        let found = loop {
            let fault = match self.client.exchange("/api/v1/forward_backward", headers.clone(), pass.clone(), CALL).await {
                Ok(answer) if answer.status < 300 => break Encoding::Protobuf,
                Ok(answer) if answer.status < 500 || failures == FAILS => break Encoding::Json,
                Ok(answer) => {
                    failures += 1;
                    self.refusal("forward_backward", &answer).fault
                }
                Err(error) if now() > started + self.patience.unreachable => return Err(error.into()),
                Err(error) => error.fault,
            };
            nth += 1;
            self.rest(&fault, nth, started + self.patience.unreachable).await;
        };
        self.encoding.set(found).ok();
        Ok(())
    }

    /// The answer to a submitted operation, in JSON.
    ///
    /// # Errors
    /// The operation failed, is unknown, or takes too long.
    pub async fn answer(&self, operation: &str, request: &str) -> Result<Value, TinkerError> {
        match self.wait(operation, request, false).await? {
            Page::Json(value) => Ok(value),
            Page::Protobuf(page) => Err(self.nonsense(operation, "protobuf".to_owned(), &String::from_utf8_lossy(&page))),
        }
    }

    /// The answer to a pass.
    ///
    /// # Errors
    /// As [`Connection::answer`].
    pub async fn pass_output(&self, operation: &str, request: &str) -> Result<PassOutput, TinkerError> {
        let page = self.wait(operation, request, true).await?;
        self.read(operation, page, proto::decode_output)
    }

    /// Samples a prompt, and waits for the samples.
    ///
    /// # Errors
    /// As [`Connection::answer`].
    pub async fn sample(&self, operation: &str, request: &SampleRequest) -> Result<SampleResponse, TinkerError> {
        let body = serde_json::to_value(request).unwrap_or_default();
        let id = self.submit(operation, "asample", &body, Effect::Nothing).await?;
        let page = self.wait(operation, &id, true).await?;
        self.read(operation, page, proto::decode_samples)
    }

    fn read<T: DeserializeOwned>(
        &self,
        operation: &str,
        page: Page,
        decode: fn(&[u8]) -> Result<T, String>,
    ) -> Result<T, TinkerError> {
        match page {
            Page::Protobuf(page) => decode(&page).map_err(|why| self.nonsense(operation, why, "protobuf")),
            Page::Json(value) => {
                let page = value.to_string();
                serde_json::from_value(value).map_err(|error| self.nonsense(operation, error.to_string(), &page))
            }
        }
    }

    fn json(&self, operation: &str, answer: &Answer) -> Result<Value, TinkerError> {
        let page = String::from_utf8_lossy(&answer.page);
        serde_json::from_str(&page).map_err(|error| self.nonsense(operation, error.to_string(), &page))
    }

    fn request_id(&self, operation: &str, answer: &Answer) -> Result<String, TinkerError> {
        self.text(&self.json(operation, answer)?, "request_id", operation)
    }

    /// Posts until the server takes it.
    async fn send(
        &self,
        operation: &str,
        route: &str,
        mut headers: HeaderMap,
        body: Vec<u8>,
        effect: Effect,
    ) -> Result<Answer, TinkerError> {
        headers.extend(self.headers.clone());
        let (path, started, mut nth) = (format!("/api/v1/{route}"), now(), 0);
        loop {
            let error = match self.client.exchange(&path, headers.clone(), body.clone(), CALL).await {
                Ok(answer) if answer.status < 300 => return Ok(answer),
                Ok(answer) => self.refusal(operation, &answer),
                Err(error) => error,
            };
            let sent = matches!(error.fault, Fault::Broke(_) | Fault::Late { .. } | Fault::Failed { .. });
            let again = match &error.fault {
                Fault::Unreachable(_) | Fault::Busy { .. } | Fault::Refused { status: 408 | 425, .. } => true,
                _ if sent && effect == Effect::Changes && !self.recognises_repeats.load(Ordering::Relaxed) => {
                    let (server, operation, why) = (self.name().to_owned(), operation.to_owned(), error.fault.to_string());
                    return Err(TinkerError::Unknown { server, operation, why });
                }
                _ => sent,
            };
            let limit =
                if matches!(error.fault, Fault::Busy { .. }) { self.patience.operation } else { self.patience.unreachable };
            if !again || now() > started + limit {
                return Err(error.into());
            }
            nth += 1;
            self.rest(&error.fault, nth, started + limit).await;
        }
    }

    /// Pauses before the `nth` retry: for as long as the server asks, but at most until `until`.
    async fn rest(&self, fault: &Fault, nth: u32, until: Instant) {
        let asked = if let Fault::Busy { retry_after, .. } = fault { retry_after.unwrap_or_default() } else { Duration::ZERO };
        let pause = backoff(self.patience.pause, LONGEST_PAUSE, u64::from(nth), nth);
        let left = until.saturating_duration_since(now());
        // Never in a loop without a pause.
        tokio::time::sleep(asked.min(left).max(pause)).await;
    }

    fn refusal(&self, operation: &str, answer: &Answer) -> RemoteError {
        self.client.refusal(operation, answer.status, &error_text(answer))
    }

    /// Asks for an answer until it is there.
    async fn wait(&self, operation: &str, request: &str, reads_protobuf: bool) -> Result<Page, TinkerError> {
        let mut headers = self.headers.clone();
        if reads_protobuf {
            headers.insert(ACCEPT, HeaderValue::from_static("application/x-protobuf, application/json"));
        }
        let body = json!({"request_id": request}).to_string().into_bytes();
        let (started, mut heard, mut nth): (Instant, Instant, u32) = (now(), now(), 0);
        let end = started + self.patience.operation;
        loop {
            if now() > end {
                let (server, operation) = (self.name().to_owned(), operation.to_owned());
                return Err(TinkerError::Late { server, operation, seconds: self.patience.operation.as_secs_f64() });
            }
            let asked = self.client.exchange("/api/v1/retrieve_future", headers.clone(), body.clone(), POLL).await;
            let fault = match asked {
                Ok(answer) => match self.judge(operation, answer)? {
                    Judged::There(page) => return Ok(page),
                    Judged::NotYet => {
                        (heard, nth) = (now(), nth.min(3) + 1);
                        Fault::Busy { status: 408, retry_after: None }
                    }
                    Judged::Ill(error) => error.fault,
                },
                Err(RemoteError { fault: Fault::Late { .. }, .. }) => continue,
                Err(error) => error.fault,
            };
            if now() > heard + self.patience.unreachable {
                return Err(RemoteError::new(self.name(), fault).into());
            }
            nth += 1;
            self.rest(&fault, nth, end.min(heard + self.patience.unreachable)).await;
        }
    }

    fn judge(&self, operation: &str, answer: Answer) -> Result<Judged, TinkerError> {
        let (server, operation) = (self.name().to_owned(), operation.to_owned());
        match answer.status {
            200..300 => {}
            408 | 425 => return Ok(Judged::NotYet),
            404 | 410 => return Err(TinkerError::Forgotten { server, operation }),
            500.. => return Ok(Judged::Ill(self.refusal(&operation, &answer))),
            _ => {
                let message = error_text(&answer).chars().take(500).collect();
                return Err(TinkerError::Failed { server, operation, message });
            }
        }
        let protobuf = |kind: &HeaderValue| kind.to_str().is_ok_and(|kind| kind.contains(proto::MEDIA_TYPE));
        if answer.headers.get(CONTENT_TYPE).is_some_and(protobuf) {
            return Ok(Judged::There(Page::Protobuf(answer.page)));
        }
        let value = self.json(&operation, &answer)?;
        if value.get("type").and_then(Value::as_str) == Some("try_again") {
            return Ok(Judged::NotYet);
        }
        match value.get("error").filter(|error| !error.is_null()) {
            Some(_) => Err(TinkerError::Failed { server, operation, message: message(&value).chars().take(500).collect() }),
            None => Ok(Judged::There(Page::Json(value))),
        }
    }
}

/// Error message of an answer that is not a success.
fn error_text(answer: &Answer) -> String {
    let page = String::from_utf8_lossy(&answer.page);
    serde_json::from_str::<Value>(&page).map_or_else(|_| page.into_owned(), |error| message(&error))
}

fn protobuf() -> HeaderMap {
    HeaderMap::from_iter([(CONTENT_TYPE, HeaderValue::from_static(proto::MEDIA_TYPE))])
}

enum Judged {
    There(Page),
    NotYet,
    Ill(RemoteError),
}
