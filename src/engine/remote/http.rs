//! JSON and server-sent events over HTTP, on connections that are kept open between requests.
//!
//! Every call ends within the time that it is given. A dropped call closes its connection, so that the server can stop its work.

use std::error::Error;
use std::fmt;
use std::time::Duration;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use hyper::{Method, Request, Response, StatusCode, Uri};
use hyper_util::client::legacy::Client as Pool;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use memchr::memmem;
use serde_json::Value;
use tokio::time::timeout;

use super::reply::message;
use super::{Fault, RemoteError};

/// Longest page that is read, in bytes.
const LONGEST: usize = 64 << 20;

/// Longest event of a stream, in bytes.
const LONGEST_EVENT: usize = 16 << 20;

/// How much of a page that makes no sense is shown.
const SHOWN: usize = 200;

/// How long the end of a stream whose last event has come is waited for, so that its connection can be used again.
const LAST_BYTES: Duration = Duration::from_millis(200);

/// A secret that is sent as `Authorization: Bearer …`, and is never shown.
#[derive(Clone, PartialEq)]
pub struct Token(HeaderValue);

impl Token {
    /// Of this text; `None` where it can't stand in a header.
    pub fn new(text: &str) -> Option<Self> {
        let mut value = HeaderValue::from_str(&format!("Bearer {text}")).ok()?;
        value.set_sensitive(true);
        Some(Token(value))
    }

    /// What stands in the header.
    pub(crate) fn header(&self) -> HeaderValue {
        self.0.clone()
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token")
    }
}

/// One server.
#[derive(Clone, Debug)]
pub struct Client {
    name: String,
    base: String,
    token: Option<Token>,
    pool: Pool<HttpConnector, Full<Bytes>>,
}

impl Client {
    /// A client of `http://host:port`, that calls it `kind http://host:port` in errors. Nothing is sent yet. `token` goes as
    /// `Authorization: Bearer …`. Up to `connections` are kept open while nothing is asked.
    pub fn new(kind: &str, url: &str, token: Option<&str>, connections: usize) -> Result<Self, RemoteError> {
        let refuse =
            || RemoteError::new(kind, Fault::Url { url: url.to_owned(), why: "its token can't stand in a header".into() });
        let token = token.map(|token| Token::new(token).ok_or_else(refuse)).transpose()?;
        Client::with_token(kind, url, token, connections)
    }

    /// The same with a token that was read already.
    pub fn with_token(kind: &str, url: &str, token: Option<Token>, connections: usize) -> Result<Self, RemoteError> {
        let name = format!("{kind} {url}");
        let refuse = |why: &str| Err(RemoteError::new(kind, Fault::Url { url: url.to_owned(), why: why.to_owned() }));
        let base = url.trim_end_matches('/').to_owned();
        match base.parse::<Uri>() {
            Err(error) => return refuse(&error.to_string()),
            Ok(uri) if uri.scheme_str() != Some("http") => {
                return refuse("only http:// is spoken here; put a proxy before anything else");
            }
            Ok(uri) if uri.host().is_none_or(str::is_empty) => return refuse("it names no host"),
            // It would stand in recipes, logs and reports.
            Ok(uri) if uri.authority().is_some_and(|authority| authority.as_str().contains('@')) => {
                let url = url.split_once('@').map_or_else(String::new, |(_, rest)| format!("http://…@{rest}"));
                let why = "it has a name or a password in it; give the server a token instead".to_owned();
                return Err(RemoteError::new(kind, Fault::Url { url, why }));
            }
            Ok(_) => {}
        }
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(Duration::from_secs(10)));
        let pool = Pool::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(Duration::from_secs(4))
            .pool_max_idle_per_host(connections)
            .build(connector);
        Ok(Client { name, base, token, pool })
    }

    /// What it is called in errors.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its address, without a slash at the end.
    pub fn base(&self) -> &str {
        &self.base
    }

    /// Asks for a page.
    pub async fn get(&self, path: &str, limit: Duration) -> Result<Value, RemoteError> {
        self.json(Method::GET, path, None, limit).await
    }

    /// Posts JSON; the answer is JSON too, or nothing, or words (then text).
    pub async fn post(&self, path: &str, body: &Value, limit: Duration) -> Result<Value, RemoteError> {
        self.json(Method::POST, path, Some(body), limit).await
    }

    async fn json(&self, method: Method, path: &str, body: Option<&Value>, limit: Duration) -> Result<Value, RemoteError> {
        let what = format!("{method} {path}");
        let page = async {
            let response = self.send(method, path, body, &what).await?;
            self.page(response, &what).await
        };
        let page = timeout(limit, page).await.map_err(|_| self.late(&what, limit))??;
        let text = String::from_utf8_lossy(&page);
        if text.trim_start().starts_with(['{', '[']) {
            return serde_json::from_str(&text)
                .map_err(|error| self.nonsense(&what, format!("JSON that breaks off ({error})"), &text));
        }
        if text.trim_start().starts_with('<') {
            return Err(self.nonsense(&what, "a page for browsers".into(), &text));
        }
        Ok(Value::String(text.into_owned()))
    }

    /// Posts JSON; the answer comes as server-sent events. `between` bounds the time to the first and from each to the next.
    pub async fn events(&self, path: &str, body: &Value, between: Duration) -> Result<Events, RemoteError> {
        let what = format!("POST {path}");
        let response =
            timeout(between, self.send(Method::POST, path, Some(body), &what)).await.map_err(|_| self.late(&what, between))??;
        Ok(Events { client: self.clone(), what, body: response.into_body(), read: Vec::new(), seen: 0, between })
    }

    async fn send(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
        what: &str,
    ) -> Result<Response<Incoming>, RemoteError> {
        let mut request = Request::builder().method(method).uri(format!("{}{path}", self.base));
        if let Some(token) = &self.token {
            request = request.header(AUTHORIZATION, token.header());
        }
        let body = match body {
            None => Bytes::new(),
            Some(body) => {
                request = request.header(CONTENT_TYPE, "application/json");
                Bytes::from(serde_json::to_vec(body).map_err(|error| self.fault(Fault::Broke { why: error.to_string() }))?)
            }
        };
        let request = request.body(Full::new(body)).map_err(|error| self.fault(Fault::Broke { why: error.to_string() }))?;
        let response = self.pool.request(request).await.map_err(|error| {
            let why = told(&error);
            self.fault(if error.is_connect() { Fault::Unreachable { why } } else { Fault::Broke { why } })
        })?;
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let retry_after = retry_after(&response);
        if matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE) {
            return Err(self.fault(Fault::Busy { status: status.as_u16(), retry_after }));
        }
        let page = self.page(response, what).await.unwrap_or_default();
        let text = String::from_utf8_lossy(&page);
        // Of an error in JSON, the words for people.
        let told = serde_json::from_str::<Value>(&text).map(|error| message(&error));
        Err(self.refusal(what, status.as_u16(), told.as_deref().unwrap_or(&text)))
    }

    /// What an answer of this status means, that says `told`.
    pub(super) fn refusal(&self, what: &str, status: u16, told: &str) -> RemoteError {
        let (what, begins) = (what.to_owned(), begins(told));
        self.fault(match status {
            429 | 503 => Fault::Busy { status, retry_after: None },
            400..500 => Fault::Refused { what, status, begins, advice: advice(status).to_owned() },
            _ => Fault::Failed { what, status, begins },
        })
    }

    async fn page(&self, response: Response<Incoming>, what: &str) -> Result<Bytes, RemoteError> {
        let page = Limited::new(response.into_body(), LONGEST).collect().await;
        page.map(|page| page.to_bytes())
            .map_err(|error| self.fault(Fault::Broke { why: format!("{what}: {}", told(error.as_ref())) }))
    }

    /// This about the server.
    pub(super) fn fault(&self, fault: Fault) -> RemoteError {
        RemoteError::new(&self.name, fault)
    }

    fn late(&self, what: &str, limit: Duration) -> RemoteError {
        self.fault(Fault::Late { what: what.to_owned(), seconds: limit.as_secs_f64() })
    }

    /// An answer to `what` that makes no sense, `why`, and begins like `page`.
    pub fn nonsense(&self, what: &str, why: String, page: &str) -> RemoteError {
        self.fault(Fault::Nonsense { what: what.to_owned(), why, begins: begins(page) })
    }
}

/// Server-sent events, as they come. Dropping them closes the connection.
#[derive(Debug)]
pub struct Events {
    client: Client,
    what: String,
    body: Incoming,
    read: Vec<u8>,
    /// No event ends before this byte.
    seen: usize,
    between: Duration,
}

impl Events {
    /// The data of the next event; `None` after the last, which is `[DONE]`. A stream that ends without it broke.
    pub async fn next(&mut self) -> Result<Option<String>, RemoteError> {
        loop {
            if let Some(end) = memmem::find(&self.read[self.seen..], b"\n\n") {
                let event: Vec<u8> = self.read.drain(..self.seen + end + 2).collect();
                self.seen = 0;
                let event = String::from_utf8_lossy(&event).into_owned();
                let data: Vec<&str> = event
                    .lines()
                    .filter_map(|line| line.strip_prefix("data:"))
                    .map(|data| data.strip_prefix(' ').unwrap_or(data))
                    .collect();
                match data.join("\n").trim() {
                    "" => continue,
                    "[DONE]" => {
                        // Whatever comes of it, all was said.
                        let _end = timeout(LAST_BYTES, self.body.frame()).await;
                        return Ok(None);
                    }
                    data => return Ok(Some(data.to_owned())),
                }
            }
            self.seen = self.read.len().saturating_sub(1);
            if self.read.len() > LONGEST_EVENT {
                return Err(self.client.nonsense(
                    &self.what,
                    "an event without end".into(),
                    &String::from_utf8_lossy(&self.read),
                ));
            }
            let frame = timeout(self.between, self.body.frame()).await.map_err(|_| self.client.late(&self.what, self.between))?;
            match frame {
                Some(Ok(frame)) => self.read.extend(frame.into_data().unwrap_or_default().iter().filter(|byte| **byte != b'\r')),
                Some(Err(error)) => return Err(self.client.fault(Fault::Broke { why: told(&error) })),
                None if self.read.iter().all(u8::is_ascii_whitespace) => {
                    return Err(self.client.fault(Fault::Broke { why: format!("{} ended before it was done", self.what) }));
                }
                None => {
                    let rest = String::from_utf8_lossy(&self.read).into_owned();
                    return Err(self.client.nonsense(&self.what, "no stream of events".into(), &rest));
                }
            }
        }
    }
}

/// How long a server asks to be left alone: the header in its form of seconds. Dates are rare, and then the usual pause is made.
pub(crate) fn retry_after<B>(response: &Response<B>) -> Option<Duration> {
    let seconds: u64 = response.headers().get(RETRY_AFTER)?.to_str().ok()?.trim().parse().ok()?;
    Some(Duration::from_secs(seconds))
}

fn begins(page: &str) -> String {
    page.chars().take(SHOWN).collect()
}

fn advice(status: u16) -> &'static str {
    match status {
        401 | 403 => "check the token",
        404 | 405 => "the server has no such route: check its kind, its version and the flags that it was started with",
        400 | 422 => "check that prompt and answer fit its context, and that it knows every sampling parameter",
        _ => "look into the server's log",
    }
}

/// An error with what caused it.
pub(crate) fn told(error: &dyn Error) -> String {
    let (mut told, mut cause) = (error.to_string(), error.source());
    while let Some(error) = cause {
        told += &format!(": {error}");
        cause = error.source();
    }
    told
}
