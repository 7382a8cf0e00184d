//! Agents that live elsewhere: a program that talks to an OpenAI-compatible server becomes an environment by changing its base URL.
//!
//! For every rollout the proxy starts the agent's command, or posts the prompt to the agent's address, and tells it a base URL of that rollout's own.
//! What the agent asks there is what the model reads; what the model says is what the agent gets. So an agent is an [`Environment`] like any
//! other, turned inside out, and all that holds for those holds for it: tokens are kept as they were sampled (law D1), limits end it, an interrupted
//! run plays it again. A request that goes on from what was read and said extends the sample; any other begins a new one (R248).
//! docs/reference/protocols.md has the details.

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
use protocol::{Ask, Said};

/// How long an agent may take to end, once its rollout has.
const LEAVING: Duration = Duration::from_secs(10);

/// How agents are reached, and what they see.
#[derive(Clone)]
pub struct ProxyConfig {
    /// Where the server listens; port 0 takes a free one. Whoever reaches it can talk to the model: keep it on the loopback.
    pub address: SocketAddr,
    /// How an agent begins with a prompt.
    pub launch: Launch,
    /// The model's name in `/v1/models` and in answers.
    pub model: String,
    /// How the model writes calls of tools; the agent gets them as OpenAI has them.
    pub parser: Arc<dyn ToolParser>,
    /// Host names that it answers to, besides `localhost` and addresses in numbers.
    pub allowed_hosts: Vec<String>,
}

impl ProxyConfig {
    /// On a free port of the loopback, for a model `policy` that writes calls as Hermes does.
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

/// Why agents can't be served.
#[derive(Debug, thiserror::Error)]
#[error("agents can't be served at {address}: {source}; choose another address, whose port 0 takes a free one")]
pub struct ProxyError {
    /// Where.
    pub address: SocketAddr,
    /// What the machine said.
    pub source: std::io::Error,
}

/// An OpenAI-compatible server in front of a generator. It lives as long as it or an environment of it does.
#[derive(Clone)]
pub struct AgentProxy(Arc<Proxy>);

struct Proxy {
    config: ProxyConfig,
    rollouts: Arc<Rollouts>,
    server: Server,
}

/// Who waits for which rollout's agent.
#[derive(Default)]
struct Rollouts(Mutex<HashMap<String, Sender<Event>>>);

/// What an agent does.
enum Event {
    /// It asks the model.
    Asks(Ask),
    /// It is through, with what it had to say about that, or failed.
    Ended(Result<Value, String>),
}

impl AgentProxy {
    /// Begins to listen. Nothing is started before the first rollout.
    pub fn start(config: ProxyConfig) -> Result<Self, ProxyError> {
        let at = |source| ProxyError { address: config.address, source };
        let listener = TcpListener::bind(config.address).map_err(at)?;
        let rollouts = Arc::new(Rollouts::default());
        let routes = guard(server::routes(rollouts.clone(), config.model.clone()), &config.allowed_hosts);
        let server = Server::start(listener, routes).map_err(at)?;
        Ok(AgentProxy(Arc::new(Proxy { config, rollouts, server })))
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.0.server.address()
    }

    /// A fresh agent for every rollout.
    pub fn maker(&self) -> MakeEnvironment {
        let proxy = self.clone();
        Arc::new(move || Box::new(Elsewhere::new(proxy.clone())))
    }
}

/// Calls are the agent's to make: the loop that drives environments must not look for any.
pub fn no_calls(_: &str, _: &[ToolSpec]) -> Vec<Called> {
    Vec::new()
}

impl Rollouts {
    fn all(&self) -> MutexGuard<'_, HashMap<String, Sender<Event>>> {
        self.0.lock()
    }
}

/// One rollout's agent.
struct Elsewhere {
    proxy: AgentProxy,
    id: String,
    events: Option<Receiver<Event>>,
    agent: Option<Launched>,
    conversation: Conversation,
    /// Who waits for what the model says next.
    waits: Option<Ask>,
    /// What it said at its end.
    ended: Option<Result<Value, String>>,
    requests: u64,
    forks: u64,
}

impl Elsewhere {
    fn new(proxy: AgentProxy) -> Self {
        let (id, conversation) = (String::new(), Conversation::default());
        Elsewhere { proxy, id, events: None, agent: None, conversation, waits: None, ended: None, requests: 0, forks: 0 }
    }

    /// What the agent does next.
    fn next(&mut self, deadline: Deadline) -> Result<Event, EnvError> {
        let events = self.events.as_ref().ok_or_else(|| EnvError::new("the agent was not started"))?;
        events.recv_timeout(deadline.left()).map_err(|error| match error {
            RecvTimeoutError::Timeout => EnvError::late(
                "the agent neither asked the model nor ended in time; look what it waits for, or raise step_timeout",
            ),
            RecvTimeoutError::Disconnected => EnvError::new("the agent is gone"),
        })
    }

    /// Its next request that the model has not answered yet.
    fn ask(&mut self, deadline: Deadline) -> Result<Option<Ask>, EnvError> {
        loop {
            match self.next(deadline)? {
                Event::Ended(how) => {
                    self.ended = Some(how);
                    return Ok(None);
                }
                // An answer that never arrived is asked for again.
                Event::Asks(ask) => match self.conversation.lost(&ask) {
                    Some(said) => self.tell(ask, said),
                    None => {
                        self.requests += 1;
                        return Ok(Some(ask));
                    }
                },
            }
        }
    }

    fn tell(&mut self, ask: Ask, said: Said) {
        let arrived = ask.reply.send(Ok(said.clone())).is_ok();
        self.conversation.told(said, arrived);
    }
}

impl Environment for Elsewhere {
    fn reset(&mut self, episode: &Episode, deadline: Deadline) -> Result<Vec<ChatMessage>, EnvError> {
        let (sender, events) = channel();
        // One that begins anew is another agent, and must not meet the requests of the first.
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
        if let Some(Ask { so_far: Some(told), .. }) = &self.waits {
            // Bytes that make no letter yet.
            told.send_replace(so_far.trim_end_matches(char::REPLACEMENT_CHARACTER).to_owned());
        }
    }

    fn cut_off(&mut self, action: &Action) {
        if let Some(ask) = self.waits.take() {
            self.tell(ask, Said::cut(action));
        }
    }

    fn step(&mut self, action: &Action, deadline: Deadline) -> Result<Step, EnvError> {
        let config = &self.proxy.0.config;
        let calls = extract_tool_calls(&action.text, &*config.parser, self.conversation.tools());
        let said = Said::of(action, calls);
        if let Some(ask) = self.waits.take() {
            self.tell(ask, said);
        }
        let Some(ask) = self.ask(deadline)? else { return Ok(Step::over()) };
        let step = match self.conversation.follow(&ask) {
            Follows::Extends(messages) => Step { messages, ..Step::default() },
            Follows::Anew(messages) => {
                self.forks += 1;
                Step { messages, anew: true, ..Step::default() }
            }
        };
        self.waits = Some(ask);
        Ok(step)
    }

    fn observe(&self) -> Value {
        json!({ "rollout": self.id, "requests": self.requests, "forks": self.forks })
    }

    /// What the agent says at its end: a table with `reward`, and perhaps `correct` and `metadata`. One that says nothing earns 0 here.
    fn grade(&mut self, deadline: Deadline) -> Result<Grade, EnvError> {
        let leaving = Deadline::within(deadline.left().min(LEAVING));
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
