//! Servers with OpenAI's `/v1/completions` that return token ids and log-probabilities.
//!
//! They report nothing about weights. Verify their log-probabilities before training with them.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::OnceCell;

use super::server::{ServerConfig, follow};
use super::{Attempt, Capabilities, Ending, InferenceEngine, Pending, RemoteError, Tokens, completions};
use crate::net::Client;

/// Server with OpenAI's API.
#[derive(Clone)]
pub struct OpenAiEngine {
    client: Client,
    config: ServerConfig,
    model: Arc<OnceCell<String>>,
}

impl OpenAiEngine {
    /// Connects to the server at `http://host:port`, with the first request.
    pub fn new(url: &str) -> Result<Self, RemoteError> {
        OpenAiEngine::with(ServerConfig::new(url))
    }

    /// Connects with this configuration.
    pub fn with(config: ServerConfig) -> Result<Self, RemoteError> {
        Ok(OpenAiEngine { client: config.client("OpenAI-like server")?, config, model: Arc::default() })
    }

    async fn model(&self) -> Result<&String, RemoteError> {
        self.model
            .get_or_try_init(|| async {
                if let Some(model) = &self.config.model {
                    return Ok(model.clone());
                }
                let models = self.client.get("/v1/models", self.config.call).await?;
                let first = models.pointer("/data/0/id").and_then(Value::as_str).map(str::to_owned);
                first.ok_or_else(|| self.client.nonsense("GET /v1/models", "no model".into(), &models.to_string()))
            })
            .await
    }
}

impl InferenceEngine for OpenAiEngine {
    fn name(&self) -> String {
        self.client.name().to_owned()
    }

    fn generate<'a>(&'a self, attempt: &'a Attempt, tokens: &'a Tokens) -> Pending<'a, Ending> {
        Box::pin(async move {
            let question = completions::question(attempt, self.model().await?);
            let request = self.config.stream(completions::PATH, &question);
            follow(&self.client, request, tokens, completions::Event::delta).await
        })
    }

    fn probe(&self) -> Pending<'_, Capabilities> {
        Box::pin(async {
            let (server, model) = ("OpenAI-like server".to_owned(), self.model().await?.clone());
            Ok(Capabilities { server, model, streams: true, ..Capabilities::default() })
        })
    }

    fn healthy(&self, limit: Duration) -> Pending<'_, ()> {
        Box::pin(async move { self.client.get("/v1/models", limit).await.map(drop) })
    }

    fn score<'a>(&'a self, tokens: &'a [u32], adapter: Option<&'a str>) -> Pending<'a, Vec<f32>> {
        Box::pin(async move {
            let model = self.model().await?;
            let question = json!({
                "model": adapter.unwrap_or(model), "prompt": tokens, "max_tokens": 1, "temperature": 0.0, "echo": true, "logprobs": 1,
            });
            let reply = self.client.post(completions::PATH, &question, self.config.stall_timeout).await?;
            let listed = reply.pointer("/choices/0/logprobs/token_logprobs").and_then(Value::as_array);
            let listed =
                listed.map(|listed| listed.iter().take(tokens.len()).skip(1).map(|entry| entry.as_f64().map(|p| p as f32)));
            match listed.and_then(Iterator::collect::<Option<Vec<f32>>>) {
                Some(log_probs) if log_probs.len() + 1 == tokens.len() => Ok(log_probs),
                _ => {
                    let what = format!("POST {}", completions::PATH);
                    Err(self.client.nonsense(&what, "no log-probability for each token (echo)".into(), &reply.to_string()))
                }
            }
        })
    }
}
