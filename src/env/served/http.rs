//! Environments on a server.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::Value;
use tokio::sync::Semaphore;

use super::{Connection, Reply, ServedEnvironment};
use crate::env::{EnvError, MakeEnvironment, Room};
use crate::net::{Client, Endpoint, Fault, RemoteError, RetryPolicy, Tasks};

/// Timeout of the message that a rollout was abandoned.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// Environments on a server, one per rollout. They share connections; at most `concurrency` requests
/// are in flight. `retry` repeats failed and malformed requests; a step's deadline bounds all
/// attempts together. Sends nothing yet.
pub fn served_environment(
    endpoint: impl Into<Endpoint>,
    retry: RetryPolicy,
    concurrency: usize,
) -> Result<MakeEnvironment, EnvError> {
    let endpoint = Endpoint { idle_connections: concurrency, ..endpoint.into() };
    let client = Client::new("environment", endpoint).map_err(EnvError::new)?;
    let tasks = Tasks::new().map_err(|error| EnvError::new(format!("no threads for requests of environments: {error}")))?;
    let server = Arc::new(Server { client, room: Arc::new(Semaphore::new(concurrency.max(1))), retry, tasks });
    Ok(Arc::new(move || Box::new(ServedEnvironment::new(Box::new(server.clone())))))
}

struct Server {
    client: Client,
    retry: RetryPolicy,
    room: Arc<Semaphore>,
    tasks: Tasks,
}

impl Server {
    async fn ask(&self, question: &Value, deadline: Instant) -> Result<Reply, EnvError> {
        let what = question["do"].as_str().unwrap_or_default();
        let episode = question["episode"].as_str().and_then(|episode| episode.get(..16)).unwrap_or_default();
        let key = u64::from_str_radix(episode, 16).unwrap_or_default();
        let asked = self.retry.run(key, deadline, || async {
            let page = self.client.post("", question, deadline.saturating_duration_since(Instant::now())).await?;
            let shown = page.to_string();
            Reply::read(page).map_err(|why| self.client.nonsense(what, why, &shown))
        });
        asked.await.map_err(|error: RemoteError| match error.fault {
            Fault::Late { .. } => EnvError::late(error),
            _ => EnvError::new(error),
        })
    }
}

impl Connection for Arc<Server> {
    fn name(&self) -> &str {
        self.client.name()
    }

    fn room(&mut self) -> Result<Room, EnvError> {
        let permit = self.tasks.block_on(self.room.clone().acquire_owned());
        Ok(Box::new(permit.map_err(EnvError::new)?))
    }

    fn ask(&mut self, question: &Value, deadline: Instant) -> Result<Reply, EnvError> {
        self.tasks.block_on(Server::ask(self, question, deadline))
    }

    fn abandon(&mut self, question: Value) {
        let client = self.client.clone();
        self.tasks.spawn(async move {
            if let Err(error) = client.post("", &question, CLOSE_TIMEOUT).await {
                tracing::debug!("{error}");
            }
        });
    }
}
