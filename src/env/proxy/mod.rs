//! Agents in other processes: a program that uses an OpenAI-compatible server becomes an environment
//! by a change of its base URL.
//!
//! For every rollout the proxy starts the agent's command, or posts the prompt to its address, with a
//! base URL of that rollout. The agent's requests are what the model reads, and the model's turns are
//! the responses. So an agent is an [`Environment`]: tokens are kept as they were sampled (law D1),
//! limits end it, and an interrupted run replays it. A request that extends the conversation extends
//! the sample; any other starts a new one (R248). docs/reference/protocols.md has the details.

mod conversation;
mod launch;
mod protocol;
mod server;

use std::collections::HashMap;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use serde_json::{Value, json};

use super::{
    Action, Called, Deadline, EnvError, Environment, Episode, Grade, MakeEnvironment, Step, ToolFormat, ToolParser, ToolSpec,
    extract_tool_calls,
};
use crate::data::{ChatMessage, is_reward};
use crate::net::{Server, guard};
use conversation::{Conversation, Follows};
pub use launch::Launch;
use launch::Launched;
use protocol::{ModelRequest, ModelTurn};

/// Longest wait for an agent to end after its rollout.
const END_TIMEOUT: Duration = Duration::from_secs(10);

/// Settings of the proxy.
#[derive(Clone)]
pub struct ProxyConfig {
    /// Address of the server; port 0 takes a free one. Every client can use the model, so keep it on
    /// the loopback.
    pub address: SocketAddr,
    /// Start of an agent.
    pub launch: Launch,
    /// Name of the model in `/v1/models` and in responses.
    pub model: String,
    /// Parser of the model's tool calls; the agent receives them in OpenAI's form.
    pub parser: Arc<dyn ToolParser>,
    /// Accepted host names, in addition to `localhost` and numeric addresses.
    pub allowed_hosts: Vec<String>,
}

impl ProxyConfig {
    /// Listens on a free port of the loopback, for a model `policy` with calls in the form of Hermes.
    pub fn new(launch: Launch) -> Self {
        let address = SocketAddr::from(([127, 0, 0, 1], 0));
        ProxyConfig {
            address,
            launch,
            model: "policy".to_owned(),
            parser: Arc::new(ToolFormat::Hermes),
            allowed_hosts: Vec::new(),
        }
    }
}

/// Failure to start the proxy.
#[derive(Debug, thiserror::Error)]
#[error("agents can't be served at {address}: {source}; choose another address, whose port 0 takes a free one")]
pub struct ProxyError {
    /// Address.
    pub address: SocketAddr,
    /// Cause.
    pub source: std::io::Error,
}

/// OpenAI-compatible server in front of a generator. It stops when it and its environments are
/// dropped.
#[derive(Clone)]
pub struct AgentProxy(Arc<Proxy>);

struct Proxy {
    config: ProxyConfig,
    rollouts: Arc<Rollouts>,
    server: Server,
}

/// Channels of running rollouts, by id.
#[derive(Default)]
struct Rollouts(Mutex<HashMap<String, Sender<Event>>>);

/// Event of an agent.
enum Event {
    /// Request to the model.
    Asks(ModelRequest),
    /// End of the agent, with its final report or its failure.
    Ended(Result<Value, String>),
}

impl AgentProxy {
    /// Starts to listen. No agent starts before the first rollout.
    pub fn start(config: ProxyConfig) -> Result<Self, ProxyError> {
        let at = |source| ProxyError { address: config.address, source };
        let listener = TcpListener::bind(config.address).map_err(at)?;
        let rollouts = Arc::new(Rollouts::default());
        let routes = guard(server::routes(rollouts.clone(), config.model.clone()), &config.allowed_hosts);
        let server = Server::start(listener, routes).map_err(at)?;
        Ok(AgentProxy(Arc::new(Proxy { config, rollouts, server })))
    }

    /// Returns the address.
    pub fn address(&self) -> SocketAddr {
        self.0.server.address()
    }

    /// Creates an environment with an agent per rollout.
    pub fn maker(&self) -> MakeEnvironment {
        let proxy = self.clone();
        Arc::new(move || Box::new(Elsewhere::new(proxy.clone())))
    }
}

/// Parser that finds no calls, since the agent handles them.
pub fn no_calls(_: &str, _: &[ToolSpec]) -> Vec<Called> {
    Vec::new()
}

impl Rollouts {
    fn all(&self) -> MutexGuard<'_, HashMap<String, Sender<Event>>> {
        self.0.lock()
    }
}

/// Agent of one rollout.
struct Elsewhere {
    proxy: AgentProxy,
    id: String,
    events: Option<Receiver<Event>>,
    agent: Option<Launched>,
    conversation: Conversation,
    /// Request that the next turn of the model answers.
    waits: Option<ModelRequest>,
    /// Final report, or failure.
    ended: Option<Result<Value, String>>,
    requests: u64,
    forks: u64,
}

impl Elsewhere {
    fn new(proxy: AgentProxy) -> Self {
        let (id, conversation) = (String::new(), Conversation::default());
        Elsewhere { proxy, id, events: None, agent: None, conversation, waits: None, ended: None, requests: 0, forks: 0 }
    }

    /// Waits for the next event of the agent.
    fn next(&mut self, deadline: Deadline) -> Result<Event, EnvError> {
        let events = self.events.as_ref().ok_or_else(|| EnvError::new("the agent was not started"))?;
        events.recv_timeout(deadline.left()).map_err(|error| match error {
            RecvTimeoutError::Timeout => EnvError::late(
                "the agent neither asked the model nor ended in time; look what it waits for, or raise step_timeout",
            ),
            RecvTimeoutError::Disconnected => EnvError::new("the agent is gone"),
        })
    }

    /// Waits for the next request that has no response yet; none if the agent ended.
    fn ask(&mut self, deadline: Deadline) -> Result<Option<ModelRequest>, EnvError> {
        loop {
            match self.next(deadline)? {
                Event::Ended(how) => {
                    self.ended = Some(how);
                    return Ok(None);
                }
                // The agent repeats a request whose response was lost.
                Event::Asks(ask) => match self.conversation.lost(&ask) {
                    Some(turn) => self.respond(ask, turn),
                    None => {
                        self.requests += 1;
                        return Ok(Some(ask));
                    }
                },
            }
        }
    }

    fn respond(&mut self, ask: ModelRequest, turn: ModelTurn) {
        let arrived = ask.reply.send(Ok(turn.clone())).is_ok();
        self.conversation.respond(turn, arrived);
    }
}

impl Environment for Elsewhere {
    fn reset(&mut self, episode: &Episode, deadline: Deadline) -> Result<Vec<ChatMessage>, EnvError> {
        let (sender, events) = channel();
        // A retried rollout has another agent, which must not receive the first one's requests.
        let nonce = std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), episode.index);
        self.id = format!("p{:012}-s{:04}-{nonce:016x}", episode.prompt.ordinal, episode.index);
        self.events = Some(events);
        self.proxy.0.rollouts.all().insert(self.id.clone(), sender.clone());
        let base = format!("http://{}/r/{}/v1", self.proxy.address(), self.id);
        let Proxy { config, server, .. } = &*self.proxy.0;
        self.agent = Some(config.launch.begin(episode, &base, server.tasks(), sender)?);
        match self.ask(deadline)? {
            Some(ask) => {
                let messages = self.conversation.begin(&ask);
                self.waits = Some(ask);
                Ok(messages)
            }
            None => Err(EnvError::new(match self.ended.take() {
                Some(Err(why)) => format!("the agent failed before it asked the model: {why}"),
                _ => "the agent ended without asking the model; check that it uses the base URL that it was given".to_owned(),
            })),
        }
    }

    fn tools(&self) -> Vec<ToolSpec> {
        self.conversation.tools().to_vec()
    }

    fn listens(&self) -> bool {
        self.waits.as_ref().is_some_and(|ask| ask.so_far.is_some())
    }

    fn hear(&mut self, so_far: &str) {
        if let Some(ModelRequest { so_far: Some(told), .. }) = &self.waits {
            // The last bytes may be an incomplete character.
            told.send_replace(so_far.trim_end_matches(char::REPLACEMENT_CHARACTER).to_owned());
        }
    }

    fn cut_off(&mut self, action: &Action) {
        if let Some(ask) = self.waits.take() {
            self.respond(ask, ModelTurn::truncated(action));
        }
    }

    fn step(&mut self, action: &Action, deadline: Deadline) -> Result<Step, EnvError> {
        let config = &self.proxy.0.config;
        let calls = extract_tool_calls(&action.text, &*config.parser, self.conversation.tools());
        let turn = ModelTurn::of(action, calls);
        if let Some(ask) = self.waits.take() {
            self.respond(ask, turn);
        }
        let Some(ask) = self.ask(deadline)? else { return Ok(Step::over()) };
        let step = match self.conversation.follow(&ask) {
            Follows::Extends(messages) => Step { messages, ..Step::default() },
            Follows::Restarts(messages) => {
                self.forks += 1;
                Step { messages, restarts: true, ..Step::default() }
            }
        };
        self.waits = Some(ask);
        Ok(step)
    }

    fn observe(&self) -> Value {
        json!({ "rollout": self.id, "requests": self.requests, "forks": self.forks })
    }

    /// Reads the final report: an object with `reward`, and optionally `correct` and `metadata`.
    /// Without a report the reward is 0.
    fn grade(&mut self, deadline: Deadline) -> Result<Grade, EnvError> {
        let leaving = Deadline::within(deadline.left().min(END_TIMEOUT));
        let over = || Err("the rollout is over: it reached a limit".to_owned());
        if let Some(ask) = self.waits.take() {
            drop(ask.reply.send(over()));
        }
        while self.ended.is_none() {
            match self.next(leaving) {
                Ok(Event::Asks(ask)) => drop(ask.reply.send(over())),
                Ok(Event::Ended(how)) => self.ended = Some(how),
                Err(_) => break,
            }
        }
        let mut grade = match &self.ended {
            Some(Ok(Value::Object(said))) => Grade {
                reward: said.get("reward").and_then(Value::as_f64).filter(|reward| is_reward(*reward)).unwrap_or(0.0),
                correct: said.get("correct").and_then(Value::as_bool),
                metadata: said.get("metadata").and_then(Value::as_object).cloned().unwrap_or_default(),
            },
            _ => Grade::default(),
        };
        let mut agent = self.observe();
        agent["ended"] = match &self.ended {
            None => "it was ended".into(),
            Some(Ok(_)) => "by itself".into(),
            Some(Err(why)) => why.as_str().into(),
        };
        grade.metadata.insert("agent".to_owned(), agent);
        Ok(grade)
    }
}

impl Drop for Elsewhere {
    fn drop(&mut self) {
        self.proxy.0.rollouts.all().remove(&self.id);
    }
}
