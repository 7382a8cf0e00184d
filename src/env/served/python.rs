//! Environments in Python processes of this run.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::Value;
use tokio::time::timeout;

use super::{Connection, Reply, ServedEnvironment};
use crate::env::{EnvError, MakeEnvironment, Room};
use crate::python::{PythonError, Session, Workers};

/// Timeout of the message that a rollout was abandoned.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// Environments in Python processes, one per rollout. A rollout stays in its process; if that ends, the
/// rollout is retried in a new environment.
pub fn python_environment(workers: Workers) -> MakeEnvironment {
    Arc::new(move || Box::new(ServedEnvironment::new(Box::new(Episode { workers: workers.clone(), session: None }))))
}

struct Episode {
    workers: Workers,
    /// None before the first question.
    session: Option<Arc<Session>>,
}

impl Episode {
    async fn session(&mut self) -> Result<Arc<Session>, PythonError> {
        Ok(match &self.session {
            Some(session) => session.clone(),
            None => self.session.insert(Arc::new(self.workers.session().await?)).clone(),
        })
    }
}

impl Connection for Episode {
    fn name(&self) -> &str {
        self.workers.name()
    }

    fn room(&mut self) -> Result<Room, EnvError> {
        let workers = self.workers.clone();
        let permit = workers.block_on(async { self.session().await?.room().await });
        Ok(Box::new(permit.map_err(EnvError::new)?))
    }

    fn ask(&mut self, question: &Value, deadline: Instant) -> Result<Reply, EnvError> {
        let workers = self.workers.clone();
        let limit = deadline.saturating_duration_since(Instant::now());
        let asked = workers.block_on(async { self.session().await?.ask(question.clone(), limit).await });
        let page = asked.map_err(|error| match error {
            PythonError::Late { .. } => EnvError::late(error),
            _ => EnvError::new(error),
        })?;
        let name = workers.name();
        Reply::read(page).map_err(|why| EnvError::new(format!("{name} answered with {why}")))
    }

    fn abandon(&mut self, question: Value) {
        if let Some(session) = self.session.take() {
            self.workers.spawn(async move {
                let closed = async {
                    let _room = session.room().await?;
                    session.ask(question, CLOSE_TIMEOUT).await
                };
                match timeout(CLOSE_TIMEOUT, closed).await {
                    Ok(Ok(_)) => {}
                    Ok(Err(error)) => tracing::debug!("{error}"),
                    Err(_) => tracing::debug!("an episode had no room to be closed within {CLOSE_TIMEOUT:?}"),
                }
            });
        }
    }
}
