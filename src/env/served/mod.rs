//! Environments in another process: over HTTP, or in Python processes of this run.
//! docs/reference/protocols.md specifies the protocol.

mod http;
mod python;

use std::hash::{BuildHasher, RandomState};
use std::time::Instant;

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{Action, EnvError, Environment, Episode, Grade, Room, Step, ToolResult, ToolSpec};
use crate::data::{ChatMessage, REWARD_LIMIT, is_reward};
pub use http::served_environment;
pub use python::python_environment;

/// One rollout's connection to the process that its environment is in.
trait Connection: Send {
    /// Name of the process, for errors.
    fn name(&self) -> &str;

    /// Waits until a question may be asked.
    fn room(&mut self) -> Result<Room, EnvError>;

    /// Asks one question by a deadline, with room for it.
    fn ask(&mut self, question: &Value, deadline: Instant) -> Result<Reply, EnvError>;

    /// Tells the process that the rollout was abandoned, without waiting.
    fn abandon(&mut self, question: Value);
}

/// An environment in another process.
///
/// Requests carry the rollout's id and the state that the process last returned, so that a stateless
/// one can continue an interrupted rollout.
struct ServedEnvironment {
    connection: Box<dyn Connection>,
    episode: String,
    tools: Vec<ToolSpec>,
    turn: u64,
    state: Value,
    open: bool,
}

/// Response to any request.
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

impl Reply {
    /// Reads a response; the error says what is wrong with it.
    fn read(page: Value) -> Result<Self, String> {
        if !page.is_object() {
            return Err("something else than an object".to_owned());
        }
        let reply: Reply = serde_json::from_value(page).map_err(|error| error.to_string())?;
        if !is_reward(reply.reward) {
            return Err(format!("a reward that is no finite number of at most {REWARD_LIMIT:e} either way"));
        }
        Ok(reply)
    }
}

impl ServedEnvironment {
    fn new(connection: Box<dyn Connection>) -> Self {
        let episode = [0, 1].map(|half| format!("{:016x}", RandomState::new().hash_one(half))).concat();
        ServedEnvironment { connection, episode, tools: Vec::new(), turn: 0, state: Value::Null, open: false }
    }

    fn ask(&mut self, what: &str, more: Value, deadline: Instant) -> Result<Reply, EnvError> {
        let mut question = json!({ "do": what, "episode": self.episode, "turn": self.turn, "state": self.state });
        if let (Value::Object(question), Value::Object(more)) = (&mut question, more) {
            question.extend(more);
        }
        let reply = self.connection.ask(&question, deadline)?;
        if let Some(why) = reply.error {
            return Err(EnvError::new(format!("{} said to {what}: {why}", self.connection.name())));
        }
        if let Some(state) = &reply.state {
            self.state = state.clone();
        }
        Ok(reply)
    }
}

impl Environment for ServedEnvironment {
    fn room(&mut self) -> Result<Room, EnvError> {
        self.connection.room()
    }

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
            let (given, made, name) = (reply.results.len(), action.calls.len(), self.connection.name());
            return Err(EnvError::new(format!(
                "{name} answered step with {given} results of {made} calls; it must be one a call"
            )));
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
    fn drop(&mut self) {
        if self.open {
            self.connection.abandon(json!({ "do": "close", "episode": self.episode }));
        }
    }
}
