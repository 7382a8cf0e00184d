//! Server-sent events, as they arrive.

use std::time::Duration;

use memchr::memmem;
use reqwest::Response;
use tokio::time::timeout;

use super::client::Client;
use super::error::{Fault, RemoteError};

/// Longest event of a stream, in bytes. The largest hold the experts of tokens: of 100,000 tokens, 48
/// layers and 8 experts, 205 MB.
const LONGEST_EVENT: usize = 256 << 20;

/// Longest wait for the end of a stream after its last event, so that its connection can be used
/// again.
const LAST_BYTES: Duration = Duration::from_millis(200);

/// A stream of events. Dropping it closes the connection, so that the server can stop.
#[derive(Debug)]
pub struct Events {
    client: Client,
    what: String,
    response: Response,
    read: Vec<u8>,
    /// No event ends before this byte.
    seen: usize,
    stall: Duration,
}

impl Events {
    pub(super) fn new(client: Client, what: String, response: Response, stall: Duration) -> Self {
        Events { client, what, response, read: Vec::new(), seen: 0, stall }
    }

    /// The data of the next event; `None` after the last, which is `[DONE]`.
    ///
    /// # Errors
    ///
    /// [`Fault::Broke`] if the stream ends without `[DONE]`, [`Fault::Late`] if it stalls,
    /// [`Fault::Nonsense`] if it is no stream of events.
    pub async fn next(&mut self) -> Result<Option<String>, RemoteError> {
        loop {
            if let Some(end) = memmem::find(&self.read[self.seen..], b"\n\n") {
                let event: Vec<u8> = self.read.drain(..self.seen + end + 2).collect();
                self.seen = 0;
                let event = String::from_utf8_lossy(&event);
                let data = event.lines().filter_map(|line| line.strip_prefix("data:"));
                let data: Vec<&str> = data.map(|data| data.strip_prefix(' ').unwrap_or(data)).collect();
                match data.join("\n").trim() {
                    "" => continue,
                    "[DONE]" => {
                        // How it ends changes nothing.
                        let _end = timeout(LAST_BYTES, self.response.chunk()).await;
                        return Ok(None);
                    }
                    data => return Ok(Some(data.to_owned())),
                }
            }
            self.seen = self.read.len().saturating_sub(1);
            if self.read.len() > LONGEST_EVENT {
                let read = String::from_utf8_lossy(&self.read);
                return Err(self.client.nonsense(&self.what, "an event without end".into(), &read));
            }
            let chunk = timeout(self.stall, self.response.chunk()).await;
            match chunk.map_err(|_| self.client.late(&self.what, self.stall))? {
                Ok(Some(chunk)) => self.read.extend(chunk.iter().filter(|byte| **byte != b'\r')),
                Err(error) => return Err(self.client.broken(error)),
                Ok(None) if self.read.iter().all(u8::is_ascii_whitespace) => {
                    return Err(self.client.fault(Fault::Broke(format!("{} ended before it was done", self.what))));
                }
                Ok(None) => {
                    let rest = String::from_utf8_lossy(&self.read).into_owned();
                    return Err(self.client.nonsense(&self.what, "no stream of events".into(), &rest));
                }
            }
        }
    }
}
