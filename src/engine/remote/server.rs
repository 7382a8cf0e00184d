//! What all servers that speak HTTP have in common.

use std::time::Duration;

use serde::de::DeserializeOwned;
use serde_json::Value;

use super::reply::status;
use super::{Chunk, End, Ending, Fault, RemoteError, Tokens};
use crate::net::{Client, Endpoint, message};

/// Where a server is, and how patiently it is asked.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// Its address, token and certificates.
    pub endpoint: Endpoint,
    /// The model to ask for; the first that it serves unless told otherwise.
    pub model: Option<String>,
    /// Longest time to the first token and from each to the next. A server that is paused says nothing, either.
    pub stall_timeout: Duration,
    /// Longest time for a question whose answer is known, such as what model it serves.
    pub call: Duration,
}

impl ServerConfig {
    /// With 256 idle connections, two minutes to a token and 20 seconds for the rest.
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

    /// Its client, called by this kind in errors.
    pub(super) fn client(&self, kind: &str) -> Result<Client, RemoteError> {
        Client::new(kind, self.endpoint.clone())
    }
}

/// What one event of a stream says.
#[derive(Debug, Default)]
pub(super) struct StreamDelta {
    /// Which of the answers it is about.
    pub(super) choice: usize,
    pub(super) chunk: Chunk,
    pub(super) ending: Option<Ending>,
    /// Nothing that comes after it is wanted; the server is to stop.
    pub(super) over: bool,
}

/// Whoever a stream tells.
pub(super) trait Listener {
    /// Hears of an event: whether it wants more, or why that can't be.
    fn hear(&mut self, delta: StreamDelta) -> impl Future<Output = Result<bool, String>> + Send;

    /// Whether all was delta.
    fn is_done(&self) -> bool;
}

/// The reader of one answer.
struct Reader<'a> {
    tokens: &'a Tokens,
    ending: Option<Ending>,
}

impl Listener for Reader<'_> {
    async fn hear(&mut self, StreamDelta { chunk, ending, over, .. }: StreamDelta) -> Result<bool, String> {
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

/// A request whose reply is a stream of events.
#[derive(Clone, Copy, Debug)]
pub(super) struct StreamRequest<'a> {
    pub(super) path: &'a str,
    pub(super) body: &'a Value,
    /// Longest time to the first event, and between two events.
    pub(super) stall_timeout: Duration,
}

/// Reads the stream of one answer to its end and tells its tokens. `read` makes sense of one event, or says why there is none.
pub(super) async fn follow<E: DeserializeOwned>(
    client: &Client,
    request: StreamRequest<'_>,
    tokens: &Tokens,
    read: impl FnMut(E) -> Result<StreamDelta, EventError>,
) -> Result<Ending, RemoteError> {
    let mut reader = Reader { tokens, ending: None };
    listen(client, request, &mut reader, read).await?;
    let unsaid = || client.fault(Fault::Broke { why: format!("POST {} ended without saying why", request.path) });
    reader.ending.ok_or_else(unsaid)
}

/// Reads a stream to its end and tells `listener`.
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
            // All was delta; how the connection ends changes nothing.
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
            EventError::Refused { status, told } => client.refusal(&what, status, &told),
        })?;
        let more = listener.hear(delta).await.map_err(|why| client.nonsense(&what, why, &data))?;
        if !more {
            return Ok(());
        }
    }
}

/// What is wrong with an event.
#[derive(Debug)]
pub(super) enum EventError {
    /// It contradicts itself, or the protocol.
    Nonsense(String),
    /// It says that the request failed.
    Refused {
        /// What status that would have been.
        status: u16,
        /// What it says.
        told: String,
    },
}

impl From<String> for EventError {
    fn from(why: String) -> Self {
        EventError::Nonsense(why)
    }
}
