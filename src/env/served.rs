//! Environments in another process, over HTTP: docs/reference/protocols.md specifies the protocol.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Deserialize;
use serde_json::{Map, Value, json};
use tokio::sync::Semaphore;
use tokio::time::timeout_at;

use super::{Action, EnvError, Environment, Episode, Grade, MakeEnvironment, Step, ToolResult, ToolSpec};
use crate::data::{ChatMessage, REWARD_LIMIT, is_reward};
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
    let server = Arc::new(Server { client, room: Semaphore::new(concurrency.max(1)), retry, tasks });
    Ok(Arc::new(move || {
        let episode = [0, 1].map(|half| format!("{:016x}", RandomState::new().hash_one(half))).concat();
        let server = server.clone();
        Box::new(ServedEnvironment { server, episode, tools: Vec::new(), turn: 0, state: Value::Null, open: false })
    }))
}

/// An environment in another process.
///
/// Requests carry the rollout's id and the state that the server last returned, so that a stateless
/// server can continue an interrupted rollout.
struct ServedEnvironment {
    server: Arc<Server>,
    episode: String,
    tools: Vec<ToolSpec>,
    turn: u64,
    state: Value,
    open: bool,
}

struct Server {
    client: Client,
    retry: RetryPolicy,
    room: Semaphore,
    tasks: Tasks,
}

/// Response of a server to any request.
#[derive(Deserialize, Default)]
#[serde(default)]
struct Reply {
    messages: Option<Vec<ChatMessage>>,
    tools: Vec<ToolSpec>,
    results: Vec<CallResult>,
    reward: f64,
    done: bool,
    correct: Option<bool>,
    metadata: Map<String, Value>,
    state: Option<Value>,
    error: Option<String>,
}

#[derive(Deserialize)]
struct CallResult {
    content: String,
    success: Option<bool>,
}

impl ServedEnvironment {
    fn ask(&mut self, what: &str, more: Value, deadline: Instant) -> Result<Reply, EnvError> {
        let mut question = json!({ "do": what, "episode": self.episode, "turn": self.turn, "state": self.state });
        if let (Value::Object(question), Value::Object(more)) = (&mut question, more) {
            question.extend(more);
        }
        let reply = self.server.tasks.block_on(self.server.ask(what, &self.episode, &question, deadline))?;
        if let Some(why) = reply.error {
            return Err(EnvError::new(format!("{} said to {what}: {why}", self.server.client.name())));
        }
        if let Some(state) = &reply.state {
            self.state = state.clone();
        }
        Ok(reply)
    }
}

impl Server {
    async fn ask(&self, what: &str, episode: &str, question: &Value, deadline: Instant) -> Result<Reply, EnvError> {
        // Other rollouts hold all permits, so this is no timeout of this rollout.
        let full = || EnvError::new(format!("{} had no room for {what} by the deadline", self.client.name()));
        let _room = timeout_at(deadline.into(), self.room.acquire()).await.map_err(|_| full())?.map_err(EnvError::new)?;
        let key = u64::from_str_radix(episode.get(..16).unwrap_or_default(), 16).unwrap_or_default();
        let asked = self.retry.run(key, deadline, || async {
            let page = self.client.post("", question, deadline.saturating_duration_since(Instant::now())).await?;
            let nonsense = |why: &str| self.client.nonsense(what, why.to_owned(), &page.to_string());
            if !page.is_object() {
                return Err(nonsense("something else than an object"));
            }
            let reply: Reply = serde_json::from_value(page.clone()).map_err(|error| nonsense(&error.to_string()))?;
            let bound = || format!("a reward that is no finite number of at most {REWARD_LIMIT:e} either way");
            if is_reward(reply.reward) { Ok(reply) } else { Err(nonsense(&bound())) }
        });
        asked.await.map_err(|error: RemoteError| match error.fault {
            Fault::Late { .. } => EnvError::late(error),
            _ => EnvError::new(error),
        })
    }
}

impl Environment for ServedEnvironment {
    fn reset(&mut self, episode: &Episode, deadline: Instant) -> Result<Vec<ChatMessage>, EnvError> {
        let conversation = episode.conversation();
        let about = json!({
            "prompt": episode.prompt.ordinal, "index": episode.index, "seed": episode.seed,
            "messages": conversation, "metadata": episode.prompt.metadata,
        });
        self.open = true;
        let reply = self.ask("reset", about, deadline)?;
        self.tools = reply.tools;
        Ok(reply.messages.unwrap_or(conversation))
    }

    fn tools(&self) -> Vec<ToolSpec> {
        self.tools.clone()
    }

    fn step(&mut self, action: &Action, deadline: Instant) -> Result<Step, EnvError> {
        self.turn += 1;
        let said = json!({ "text": action.text, "calls": action.calls, "malformed": action.malformed });
        let reply = self.ask("step", said, deadline)?;
        if reply.results.len() != action.calls.len() && !reply.done {
            let (given, made) = (reply.results.len(), action.calls.len());
            let page = format!("{given} results");
            let error: RemoteError = self.server.client.nonsense("step", format!("{given} results of {made} calls"), &page);
            return Err(EnvError::new(error));
        }
        let result = |(call, CallResult { content, success })| ToolResult {
            success: success.unwrap_or(true),
            ..ToolResult::of(call, content)
        };
        let results = action.calls.iter().zip(reply.results).map(result).collect();
        let (messages, reward, done) = (reply.messages.unwrap_or_default(), reply.reward, reply.done);
        Ok(Step { results, messages, reward, done, restarts: false })
    }

    fn observe(&self) -> Value {
        self.state.clone()
    }

    fn grade(&mut self, deadline: Instant) -> Result<Grade, EnvError> {
        let Reply { reward, correct, metadata, .. } = self.ask("grade", Value::Null, deadline)?;
        self.open = false;
        Ok(Grade { reward, correct, metadata })
    }

    fn save(&self) -> Option<Value> {
        (!self.state.is_null()).then(|| json!({ "turn": self.turn, "state": self.state }))
    }

    fn restore(&mut self, saved: &Value) -> Result<(), EnvError> {
        self.turn = saved["turn"].as_u64().unwrap_or_default();
        self.state = saved["state"].clone();
        Ok(())
    }
}

impl Drop for ServedEnvironment {
    /// Notifies the server of a rollout that ends without a grade, without waiting.
    fn drop(&mut self) {
        if self.open {
            let (server, episode) = (self.server.client.clone(), self.episode.clone());
            let farewell = async move {
                let farewell = json!({ "do": "close", "episode": episode });
                if let Err(error) = server.post("", &farewell, CLOSE_TIMEOUT).await {
                    tracing::debug!("{error}");
                }
            };
            self.server.tasks.spawn(farewell);
        }
    }
}
