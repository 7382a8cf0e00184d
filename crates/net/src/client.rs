//! One server: JSON, bytes and server-sent events over pooled connections.
//!
//! Every call ends within the time that it is given. Dropping a call closes its connection
//! (HTTP/1.1) or resets its stream (HTTP/2), so that the server can stop its work.

use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use reqwest::header::{AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderValue, RETRY_AFTER};
use reqwest::{Body, Method, Request, Response, Url};
use serde_json::Value;
use tokio::time::timeout;

use super::endpoint::{Endpoint, is_loopback, parse};
use super::error::{Fault, RemoteError};
use super::tasks::SharedRuntime;
use super::{Events, tls};
use rollflow_util::causes::full_message;
use rollflow_util::secrets::masked;

/// Longest beginning of a page that an error shows, in characters.
const SHOWN: usize = 200;

/// Bytes of an error's page that are read.
const ERROR_PAGE: usize = 1 << 16;

/// A server's clock may be wrong, and its answer to the next request may be another.
const LONGEST_RETRY_AFTER: Duration = Duration::from_secs(60);

const CONNECT: Duration = Duration::from_secs(10);

/// Idle connections are closed after this time: before most servers close theirs, at 5 seconds.
const IDLE: Duration = Duration::from_secs(4);

/// One server.
#[derive(Clone, Debug)]
pub struct Client {
    name: String,
    base: String,
    url: Url,
    token: Option<HeaderValue>,
    longest_page: usize,
    http: reqwest::Client,
    runtime: Arc<SharedRuntime>,
}

/// Answer to a request.
#[derive(Clone, Debug)]
pub struct Answer {
    /// Its status.
    pub status: u16,
    /// Its headers.
    pub headers: HeaderMap,
    /// Its page.
    pub page: Vec<u8>,
}

impl Client {
    /// A client of the server at `endpoint`, which errors call `kind` and its address. Sends
    /// nothing yet.
    ///
    /// # Errors
    ///
    /// [`Fault::Url`] if the address is invalid, [`Fault::Certificates`] if certificates cannot be
    /// read, [`Fault::Threads`] if the machine gives no threads.
    pub fn new(kind: &str, endpoint: impl Into<Endpoint>) -> Result<Self, RemoteError> {
        let Endpoint { url, token, ca_file, idle_connections, longest_page } = endpoint.into();
        let refuse = |server: &str, fault| RemoteError::new(server, fault);
        let parsed = parse(&url).map_err(|why| refuse(kind, Fault::Url { url: masked(&url), why }))?;
        let base = url.trim_end_matches('/').to_owned();
        let name = format!("{kind} {}", masked(&base));
        // Reading the system's certificates takes milliseconds.
        let tls = if parsed.scheme() == "https" { tls::config(ca_file.as_deref()) } else { tls::none() };
        let mut http = builder(tls.map_err(|fault| refuse(&name, fault))?).pool_max_idle_per_host(idle_connections);
        if is_loopback(&parsed) {
            http = http.no_proxy();
        }
        let http = http.build().map_err(|error| refuse(&name, Fault::Certificates(full_message(&error))))?;
        let runtime = SharedRuntime::get().map_err(|error| refuse(&name, Fault::Threads(error.to_string())))?;
        Ok(Client { name, base, url: parsed, token, longest_page, http, runtime })
    }

    /// The name that errors use: kind and address, without secrets.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The address, without a slash at the end.
    pub fn base(&self) -> &str {
        &self.base
    }

    /// Host and port of the address.
    pub fn host_and_port(&self) -> (String, u16) {
        let host = self.url.host_str().unwrap_or_default().trim_start_matches('[').trim_end_matches(']').to_owned();
        (host, self.url.port_or_known_default().unwrap_or(80))
    }

    /// Reads a page of JSON, text or nothing.
    pub async fn get(&self, path: &str, limit: Duration) -> Result<Value, RemoteError> {
        self.json(Method::GET, path, None, limit).await
    }

    /// Reads a page of any kind, as bytes.
    pub async fn get_bytes(&self, path: &str, limit: Duration) -> Result<Vec<u8>, RemoteError> {
        self.bytes(Method::GET, path, None, limit).await
    }

    /// Posts JSON. The answer is JSON, nothing, or text, which becomes a JSON string.
    pub async fn post(&self, path: &str, body: &Value, limit: Duration) -> Result<Value, RemoteError> {
        self.json(Method::POST, path, Some(body.to_string().into_bytes()), limit).await
    }

    /// Posts `body`, which is JSON, and returns the answer's bytes.
    pub async fn post_bytes(&self, path: &str, body: Vec<u8>, limit: Duration) -> Result<Vec<u8>, RemoteError> {
        self.bytes(Method::POST, path, Some(body), limit).await
    }

    async fn bytes(&self, method: Method, path: &str, body: Option<Vec<u8>>, limit: Duration) -> Result<Vec<u8>, RemoteError> {
        let what = what(&method, path);
        let page = async { self.page(self.send(method, path, body, &what).await?, &what).await };
        timeout(limit, page).await.map_err(|_| self.late(&what, limit))?
    }

    async fn json(&self, method: Method, path: &str, body: Option<Vec<u8>>, limit: Duration) -> Result<Value, RemoteError> {
        let what = what(&method, path);
        let page = self.bytes(method, path, body, limit).await?;
        let text = String::from_utf8_lossy(&page);
        match text.trim_start().chars().next() {
            Some('{' | '[') => serde_json::from_str(&text)
                .map_err(|error| self.nonsense(&what, format!("JSON that breaks off ({error})"), &text)),
            Some('<') => Err(self.nonsense(&what, "a page for browsers".into(), &text)),
            _ => Ok(Value::String(text.into_owned())),
        }
    }

    /// Posts JSON. The answer comes as server-sent events; `stall` bounds the time to the first,
    /// and from each to the next.
    pub async fn events(&self, path: &str, body: &Value, stall: Duration) -> Result<Events, RemoteError> {
        self.stream(Method::POST, path, Some(body.to_string().into_bytes()), stall).await
    }

    /// Opens a stream of server-sent events, such as one that lasts as long as its server; `stall` as
    /// in [`Client::events`].
    pub async fn get_events(&self, path: &str, stall: Duration) -> Result<Events, RemoteError> {
        self.stream(Method::GET, path, None, stall).await
    }

    async fn stream(&self, method: Method, path: &str, body: Option<Vec<u8>>, stall: Duration) -> Result<Events, RemoteError> {
        let what = what(&method, path);
        let response = timeout(stall, self.send(method, path, body, &what));
        let response = response.await.map_err(|_| self.late(&what, stall))??;
        Ok(Events::new(self.clone(), what, response, stall))
    }

    async fn send(&self, method: Method, path: &str, body: Option<Vec<u8>>, what: &str) -> Result<Response, RemoteError> {
        let response = self.request(method, path, HeaderMap::new(), body).await?;
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        if let Some(busy) = self.busy(&response) {
            return Err(busy);
        }
        let page = beginning(response).await;
        let text = String::from_utf8_lossy(&page);
        // The part of an error in JSON that is meant for people.
        let told = serde_json::from_str::<Value>(&text).map(|error| message(&error));
        Err(self.refusal(what, status.as_u16(), told.as_deref().unwrap_or(&text)))
    }

    /// Posts `body`, and returns the answer whatever its status is, as long as the server is not
    /// busy. Without a `content-type` among the headers it is JSON.
    pub async fn exchange(&self, path: &str, headers: HeaderMap, body: Vec<u8>, limit: Duration) -> Result<Answer, RemoteError> {
        let what = what(&Method::POST, path);
        let exchange = async {
            let response = self.request(Method::POST, path, headers, Some(body)).await?;
            if let Some(busy) = self.busy(&response) {
                return Err(busy);
            }
            let (status, headers) = (response.status().as_u16(), response.headers().clone());
            Ok(Answer { status, headers, page: self.page(response, &what).await? })
        };
        timeout(limit, exchange).await.map_err(|_| self.late(&what, limit))?
    }

    /// Sends one request and returns the answer whatever its status is.
    pub async fn request(
        &self,
        method: Method,
        path: &str,
        headers: HeaderMap,
        body: Option<Vec<u8>>,
    ) -> Result<Response, RemoteError> {
        let url = match path {
            "" => self.url.clone(),
            path => Url::parse(&format!("{}{path}", self.base)).map_err(|error| {
                self.fault(Fault::Url { url: masked(&format!("{}{path}", self.base)), why: error.to_string() })
            })?,
        };
        let mut request = Request::new(method, url);
        *request.headers_mut() = headers;
        if let Some(token) = &self.token {
            request.headers_mut().insert(AUTHORIZATION, token.clone());
        }
        if let Some(body) = body {
            request.headers_mut().entry(CONTENT_TYPE).or_insert(HeaderValue::from_static("application/json"));
            *request.body_mut() = Some(Body::from(body));
        }
        // Connections belong to the runtime that they were opened on, and must outlive the
        // caller's.
        let http = self.http.clone();
        let sent = self.runtime.run(async move { http.execute(request).await });
        sent.await.map_err(|error| self.broken(error))
    }

    /// The fault of a request that has no answer.
    pub fn broken(&self, error: reqwest::Error) -> RemoteError {
        let connecting = error.is_connect();
        // Addresses may hold secrets, and the server's name says which it is.
        let error = error.without_url();
        let host = self.url.host_str().unwrap_or_default();
        if let Some(fault) = tls::fault(&error, host) {
            return self.fault(fault);
        }
        // "error sending request" itself says nothing.
        let why = full_message(error.source().unwrap_or(&error));
        self.fault(match connecting {
            true if why.contains("tunnel") => {
                let why = format!("{why}; HTTPS_PROXY names the proxy, and NO_PROXY the hosts that are reached without it");
                Fault::Unreachable(why)
            }
            true => Fault::Unreachable(why),
            false => Fault::Broke(why),
        })
    }

    fn busy(&self, response: &Response) -> Option<RemoteError> {
        let (status, retry_after) = (response.status().as_u16(), retry_after(response.headers()));
        matches!(status, 429 | 503).then(|| self.fault(Fault::Busy { status, retry_after }))
    }

    /// Error of an answer whose status may change with a retry.
    pub fn busy_or_failed(&self, response: &Response) -> Option<RemoteError> {
        let status = response.status().as_u16();
        let failed = matches!(status, 408 | 425 | 500..=599).then(|| self.refusal("the request", status, ""));
        self.busy(response).or(failed)
    }

    /// The error for an answer with this status that says `told`.
    pub fn refusal(&self, what: &str, status: u16, told: &str) -> RemoteError {
        let (what, begins) = (what.to_owned(), begins(told));
        self.fault(match status {
            429 | 503 => Fault::Busy { status, retry_after: None },
            300..500 => Fault::Refused { what, status, begins, advice: advice(status).to_owned() },
            _ => Fault::Failed { what, status, begins },
        })
    }

    async fn page(&self, mut response: Response, what: &str) -> Result<Vec<u8>, RemoteError> {
        let mut page = Vec::new();
        loop {
            match response.chunk().await {
                Ok(Some(chunk)) if page.len() + chunk.len() > self.longest_page => {
                    return Err(self.fault(Fault::TooLong { what: what.to_owned(), limit: self.longest_page }));
                }
                Ok(Some(chunk)) => page.extend_from_slice(&chunk),
                Ok(None) => return Ok(page),
                Err(error) => return Err(self.broken(error)),
            }
        }
    }

    /// An error of this server.
    pub fn fault(&self, fault: Fault) -> RemoteError {
        RemoteError::new(&self.name, fault)
    }

    /// The error of a request that was not answered within `limit`.
    pub fn late(&self, what: &str, limit: Duration) -> RemoteError {
        self.fault(Fault::Late { what: what.to_owned(), seconds: limit.as_secs_f64() })
    }

    /// The error for an answer to `what` that makes no sense, `why`, and begins like `page`.
    pub fn nonsense(&self, what: &str, why: String, page: &str) -> RemoteError {
        self.fault(Fault::Nonsense { what: what.to_owned(), why, begins: begins(page) })
    }
}

/// HTTP for a library that makes its own requests and retries them, such as one for object stores:
/// with the TLS, proxies and timeouts of [`Client`]. An answer may pause for `stall` at most.
///
/// # Errors
///
/// [`Fault::Certificates`] if certificates cannot be read.
pub fn bare_client(ca_file: Option<&Path>, stall: Duration) -> Result<reqwest::Client, Fault> {
    let http = builder(tls::config(ca_file)?).read_timeout(stall).build();
    http.map_err(|error| Fault::Certificates(full_message(&error)))
}

fn builder(tls: rustls::ClientConfig) -> reqwest::ClientBuilder {
    reqwest::Client::builder()
        .tls_backend_preconfigured(tls)
        .redirect(reqwest::redirect::Policy::none())
        .retry(reqwest::retry::never())
        .referer(false)
        .user_agent(concat!("rollflow/", env!("CARGO_PKG_VERSION")))
        .connect_timeout(CONNECT)
        .pool_idle_timeout(IDLE)
}

/// The first [`ERROR_PAGE`] bytes of an error's page, or as many as arrive.
async fn beginning(mut response: Response) -> Vec<u8> {
    let mut page = Vec::new();
    while page.len() < ERROR_PAGE
        && let Ok(Some(chunk)) = response.chunk().await
    {
        page.extend_from_slice(&chunk);
    }
    page.truncate(ERROR_PAGE);
    page
}

fn what(method: &Method, path: &str) -> String {
    format!("{method} {path}").trim_end().to_owned()
}

/// The server's `Retry-After`, in seconds or as a date; [`LONGEST_RETRY_AFTER`] at most.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
    let asked = match text.parse() {
        Ok(seconds) => Duration::from_secs(seconds),
        Err(_) => {
            let until = jiff::fmt::rfc2822::DateTimeParser::new().parse_timestamp(text).ok()?;
            Duration::try_from(until.duration_since(jiff::Timestamp::now())).unwrap_or_default()
        }
    };
    Some(asked.min(LONGEST_RETRY_AFTER))
}

/// The part of an error in JSON that is meant for people, or all of it.
pub fn message(error: &Value) -> String {
    let inner = [error.pointer("/error/message"), error.get("message"), error.get("error"), error.get("detail")];
    match inner.into_iter().flatten().next() {
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
        None => error.to_string(),
    }
}

fn begins(page: &str) -> String {
    page.chars().take(SHOWN).collect()
}

fn advice(status: u16) -> &'static str {
    match status {
        300..=399 => "redirects are not followed: give the address where the server itself is",
        401 | 403 => "check the token",
        404 | 405 => "the server has no such route: check its kind, its version and the flags that it was started with",
        400 | 422 => "check that prompt and answer fit its context, and that it knows every sampling parameter",
        _ => "look into the server's log",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_may_ask_to_be_retried_after_seconds_or_at_a_date() {
        let header = |value: &str| HeaderMap::from_iter([(RETRY_AFTER, HeaderValue::from_str(value).unwrap())]);
        assert_eq!(retry_after(&header("7")), Some(Duration::from_secs(7)));
        assert_eq!(retry_after(&header("Wed, 21 Oct 2015 07:28:00 GMT")), Some(Duration::ZERO));
        // Clocks are wrong, and instants overflow.
        for long in ["Wed, 21 Oct 2116 07:28:00 GMT", "18446744073709551615"] {
            assert_eq!(retry_after(&header(long)), Some(LONGEST_RETRY_AFTER), "{long}");
        }
        assert_eq!(retry_after(&header("soon")), None);
        assert_eq!(retry_after(&HeaderMap::new()), None);
    }
}
