//! Streaming and configuration shared by all HTTP engines.

use std::time::Duration;

use serde::de::DeserializeOwned;
use serde_json::Value;

use super::reply::status;
use super::{Chunk, End, Ending, Fault, RemoteError, Tokens};
use crate::net::{Client, Endpoint, message};

/// Address, model and timeouts of a server.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// Address, token and certificates.
    pub endpoint: Endpoint,
    /// Model to request. Default: the first that the server lists.
    pub model: Option<String>,
    /// Longest time to the first token, and between two tokens. It includes pauses of the server.
    /// Default: 120 s.
    pub stall_timeout: Duration,
    /// Longest time of a request without generation. Default: 20 s.
    pub call: Duration,
}

impl ServerConfig {
    /// Configuration of the server at `url`, with up to 256 idle connections.
    pub fn new(url: impl Into<String>) -> Self {
        ServerConfig {
            endpoint: Endpoint { idle_connections: 256, ..Endpoint::new(url) },
            model: None,
            stall_timeout: Duration::from_secs(120),
            call: Duration::from_secs(20),
        }
    }

    /// Streaming request to the server.
    pub(super) fn stream<'a>(&self, path: &'a str, body: &'a Value) -> StreamRequest<'a> {
        StreamRequest { path, body, stall_timeout: self.stall_timeout }
    }

    /// Creates a client, which errors call `kind`.
    pub(super) fn client(&self, kind: &str) -> Result<Client, RemoteError> {
        Client::new(kind, self.endpoint.clone())
    }
}

/// Content of one event.
#[derive(Debug, Default)]
pub(super) struct StreamDelta {
    /// Index of the completion in its group.
    pub(super) choice: usize,
    pub(super) chunk: Chunk,
    pub(super) ending: Option<Ending>,
    /// If true, the stream ends here and the server stops.
    pub(super) over: bool,
}

/// Receiver of a stream.
pub(super) trait Listener {
    /// Handles an event. Returns false to end the stream, or a reason why the event is invalid.
    fn on_delta(&mut self, delta: StreamDelta) -> impl Future<Output = Result<bool, String>> + Send;

    /// Returns true if all completions have ended.
    fn is_done(&self) -> bool;
}

/// Receiver of one completion.
struct Reader<'a> {
    tokens: &'a Tokens,
    ending: Option<Ending>,
}

impl Listener for Reader<'_> {
    async fn on_delta(&mut self, StreamDelta { chunk, ending, over, .. }: StreamDelta) -> Result<bool, String> {
        if !chunk.tokens.is_empty() && !self.tokens.send(chunk).await {
            self.ending = Some(Ending { end: End::Aborted, spans: None });
            return Ok(false);
        }
        self.ending = ending.or(self.ending.take());
        Ok(!over)
    }

    fn is_done(&self) -> bool {
        self.ending.is_some()
    }
}

/// Request whose reply is a stream of events.
#[derive(Clone, Copy, Debug)]
pub(super) struct StreamRequest<'a> {
    pub(super) path: &'a str,
    pub(super) body: &'a Value,
    /// Longest time to the first event, and between two events.
    pub(super) stall_timeout: Duration,
}

/// Reads the stream of one completion and sends its tokens; `read` converts an event.
pub(super) async fn follow<E: DeserializeOwned>(
    client: &Client,
    request: StreamRequest<'_>,
    tokens: &Tokens,
    read: impl FnMut(E) -> Result<StreamDelta, EventError>,
) -> Result<Ending, RemoteError> {
    let mut reader = Reader { tokens, ending: None };
    listen(client, request, &mut reader, read).await?;
    let unexplained = || client.fault(Fault::Broke { why: format!("POST {} ended without saying why", request.path) });
    reader.ending.ok_or_else(unexplained)
}

/// Reads a stream and passes its events to `listener`.
pub(super) async fn listen<E: DeserializeOwned>(
    client: &Client,
    StreamRequest { path, body, stall_timeout }: StreamRequest<'_>,
    listener: &mut impl Listener,
    mut read: impl FnMut(E) -> Result<StreamDelta, EventError>,
) -> Result<(), RemoteError> {
    let what = format!("POST {path}");
    let mut events = client.events(path, body, stall_timeout).await?;
    loop {
        let data = match events.next().await {
            Ok(Some(data)) => data,
            Ok(None) => return Ok(()),
            // All completions have ended, so the error changes nothing.
            Err(_) if listener.is_done() => return Ok(()),
            Err(error) => return Err(error),
        };
        if data.contains("\"error\"")
            && let Ok(error) = serde_json::from_str::<Value>(&data)
            && error.get("error").is_some_and(|error| !error.is_null())
        {
            return Err(client.refusal(&what, status(&error), &message(&error)));
        }
        let event = serde_json::from_str(&data)
            .map_err(|error| client.nonsense(&what, format!("an event that is not as expected ({error})"), &data))?;
        let delta = read(event).map_err(|wrong| match wrong {
            EventError::Nonsense(why) => client.nonsense(&what, why, &data),
            EventError::Refused { status, message } => client.refusal(&what, status, &message),
        })?;
        let more = listener.on_delta(delta).await.map_err(|why| client.nonsense(&what, why, &data))?;
        if !more {
            return Ok(());
        }
    }
}

/// Error in an event.
#[derive(Debug)]
pub(super) enum EventError {
    /// Contradiction, or violation of the protocol.
    Nonsense(String),
    /// Failure that the event reports.
    Refused {
        /// Equivalent HTTP status.
        status: u16,
        /// Message of the server.
        message: String,
    },
}

impl From<String> for EventError {
    fn from(why: String) -> Self {
        EventError::Nonsense(why)
    }
}
