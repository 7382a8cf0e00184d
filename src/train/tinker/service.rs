//! A server of the Tinker API, as a run sees it.

use std::sync::Arc;

use rollflow_tinker::message::LoraConfig;
use rollflow_tinker::{Connection, Patience, TinkerError};
use serde_json::Value;

use super::dialect::{Dialect, probe};
use super::model::{Numbers, RemoteModel};
use crate::net::{Endpoint, Fault, RemoteError, Tasks};

/// A session with a server whose operations were tried.
pub struct TinkerService {
    connection: Arc<Connection>,
    numbers: Arc<Numbers>,
    base_model: String,
    context: Option<usize>,
    dialect: Dialect,
    tasks: Tasks,
}

impl TinkerService {
    /// Opens a session, and tries the server's operations on a scratch model with the adapters
    /// `lora`, which takes seconds, or a minute on a server that compiles. `base_model` is the
    /// server's name of the model, by default the first that it lists. `key` is an API key. Blocks.
    ///
    /// # Errors
    /// The server cannot be reached, does not have the model, or lacks an operation, which is named.
    pub fn open(
        endpoint: Endpoint,
        key: Option<&str>,
        base_model: Option<&str>,
        lora: LoraConfig,
        patience: Patience,
    ) -> Result<Self, TinkerError> {
        let server = endpoint.url.clone();
        let threads = |error: std::io::Error| RemoteError::new(server, Fault::Threads(error.to_string()));
        let tasks = Tasks::new().map_err(threads)?;
        let (connection, base_model, context) = tasks.block_on(async {
            let connection = Arc::new(Connection::open(endpoint, key, patience).await?);
            let (base_model, context) = offered(&connection, base_model).await?;
            Ok::<_, TinkerError>((connection, base_model, context))
        })?;
        let numbers = Arc::<Numbers>::default();
        let dialect = tasks.block_on(probe(&connection, &numbers, &base_model, lora))?;
        Ok(TinkerService { connection, numbers, base_model, context, dialect, tasks })
    }

    /// Properties of the server.
    pub fn dialect(&self) -> &Dialect {
        &self.dialect
    }

    /// The server's name of the model.
    pub fn base_model(&self) -> &str {
        &self.base_model
    }

    /// Longest prompt and completion together, if reported.
    pub fn context(&self) -> Option<usize> {
        self.context
    }

    /// Name in errors: kind and address.
    pub fn name(&self) -> &str {
        self.connection.name()
    }

    pub(super) fn connection(&self) -> &Arc<Connection> {
        &self.connection
    }

    pub(super) fn tasks(&self) -> &Tasks {
        &self.tasks
    }

    pub(super) async fn create_model(&self, lora: LoraConfig) -> Result<RemoteModel, TinkerError> {
        RemoteModel::create(&self.connection, &self.numbers, &self.base_model, lora).await
    }
}

/// The model to train, and its context.
pub(super) async fn offered(connection: &Connection, asked: Option<&str>) -> Result<(String, Option<usize>), TinkerError> {
    let capabilities = connection.get("get_server_capabilities").await?;
    let models = capabilities.get("supported_models").and_then(Value::as_array).cloned().unwrap_or_default();
    let name = |model: &Value| model.get("model_name").and_then(Value::as_str).map(str::to_owned);
    let names: Vec<String> = models.iter().filter_map(name).collect();
    let chosen = match asked {
        Some(asked) => models.iter().find(|model| name(model).as_deref() == Some(asked)),
        None => models.first(),
    };
    let context = |model: &Value| model.get("max_context_length").and_then(Value::as_u64).map(|context| context as usize);
    match chosen.and_then(|model| Some((name(model)?, context(model)))) {
        Some(found) => Ok(found),
        None => {
            let asked = asked.map_or_else(|| "a model".to_owned(), |asked| format!("the model {asked:?}"));
            let lacks = format!("does not offer {asked}; it offers {}", names.join(", "));
            Err(TinkerError::Lacks { server: connection.name().to_owned(), lacks })
        }
    }
}
