//! The page of a run that another process works on. A dashboard on the same machine passes its events
//! on to readers, and their orders to it.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use axum::http::HeaderMap;
use parking_lot::Mutex;
use rollflow::net::{Answer, Client, Endpoint, RemoteError};
use tokio::task::JoinHandle;

use super::live::LiveEvent;
use crate::run::record::Record;

/// Longest wait for an answer.
const LIMIT: Duration = Duration::from_secs(30);
/// Longest time without a byte of the stream of events, which has signs of life every 15 seconds.
const STALL: Duration = Duration::from_secs(40);

/// The page of a run's process.
#[derive(Clone)]
pub(super) struct Relay {
    client: Client,
    /// Path of the run's routes.
    run: String,
}

impl Relay {
    /// The page of the process that works on the run in `folder`, if it has one. A page at an address
    /// of this machine alone gets `token`: a record may name any address.
    pub fn of(folder: &Path, token: Option<&str>) -> Option<Self> {
        let address = Record::unmeasured(folder).ok()?.page()?;
        let mut endpoint = Endpoint::new(format!("http://{address}"));
        if let Some(token) = token.filter(|_| address.ip().is_loopback()) {
            endpoint = endpoint.with_token(token)?;
        }
        let name = folder.file_name()?.to_string_lossy();
        Some(Relay { client: Client::new("live page", endpoint).ok()?, run: format!("/api/runs/{}", as_part(&name)) })
    }

    /// Reads `route` of the run.
    pub async fn get(&self, route: &str) -> Result<String, RemoteError> {
        self.client.get(&format!("{}/{route}", self.run), LIMIT).await.map(|value| value.to_string())
    }

    /// Posts to `route` of the run.
    pub async fn post(&self, route: &str, body: Vec<u8>) -> Result<Answer, RemoteError> {
        self.client.exchange(&format!("{}/{route}", self.run), HeaderMap::new(), body, LIMIT).await
    }

    /// Begins to read events.
    pub fn follow(self) -> Relayed {
        let newest = Arc::new(Mutex::new(None));
        let (to, relay) = (newest.clone(), self);
        let task = tokio::spawn(async move { relay.read(&to).await.unwrap_or_default() });
        Relayed { newest, task }
    }

    async fn read(&self, newest: &Mutex<Option<LiveEvent>>) -> Result<(), RemoteError> {
        let mut events = self.client.get_events(&format!("{}/events", self.run), STALL).await?;
        while let Some(event) = events.next().await? {
            // The other event names the files that have grown, which this process sees.
            if let Ok(live) = serde_json::from_str::<LiveEvent>(&event)
                && !live.flow.stages.is_empty()
            {
                *newest.lock() = Some(live);
            }
        }
        Ok(())
    }
}

/// Events of a run's page as they come. Dropping it closes the connection.
pub(super) struct Relayed {
    newest: Arc<Mutex<Option<LiveEvent>>>,
    task: JoinHandle<()>,
}

impl Relayed {
    /// The newest event, once.
    pub fn take(&self) -> Option<LiveEvent> {
        self.newest.lock().take()
    }

    /// Returns true if the connection is lost.
    pub fn has_ended(&self) -> bool {
        self.task.is_finished()
    }
}

impl Drop for Relayed {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A name as a part of a path.
pub(crate) fn as_part(name: &str) -> String {
    form_urlencoded::byte_serialize(name.as_bytes()).collect::<String>().replace('+', "%20")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_one_part_of_a_path() {
        assert_eq!(as_part("deeper/my run+1"), "deeper%2Fmy%20run%2B1");
    }
}
