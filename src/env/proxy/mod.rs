//! Agents in other processes: a program that uses an OpenAI-compatible server becomes an environment
//! by a change of its base URL.
//!
//! For every rollout the proxy starts the agent's command, posts the prompt to its address, or asks a
//! Python process, with a base URL of that rollout. The agent's requests are what the model reads,
//! and the model's turns are the responses. So an agent is an [`Environment`](super::Environment):
//! tokens are kept as they were sampled (law D1), limits end it, and an interrupted run replays it. A
//! request that extends the conversation extends the sample; any other starts a new one (R248).
//! docs/reference/protocols.md has the details.

mod agent;
mod launch;
pub(crate) mod protocol;
mod server;

use std::collections::HashMap;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::mpsc::Sender;

use parking_lot::Mutex;
use serde_json::Value;
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::oneshot;

use super::{EnvError, MakeEnvironment, ToolFormat, ToolParser};
use crate::net::{Client, Endpoint, Server, guard};
use crate::python::Workers;
use agent::ProxiedAgent;
use launch::Launch;
use protocol::{ModelRequest, ModelTurn};

/// OpenAI-compatible server in front of a generator, for agents in other processes.
#[derive(Clone)]
pub struct AgentProxy {
    /// Address of the server. Default: a free port of the loopback. Every client can use the model,
    /// so keep it on the loopback.
    pub address: SocketAddr,
    /// Name of the model in `/v1/models` and in responses. Default: `policy`.
    pub model: String,
    /// Parser of the model's tool calls; the agent receives them in OpenAI's form. Default: Hermes.
    pub parser: Arc<dyn ToolParser>,
    /// Accepted host names, in addition to `localhost` and numeric addresses.
    pub allowed_hosts: Vec<String>,
    launch: Launch,
}

/// Running proxy.
struct Running {
    config: AgentProxy,
    rollouts: Arc<Rollouts>,
    server: Server,
}

/// Channels of running rollouts, by id.
type Rollouts = Mutex<HashMap<String, Sender<Event>>>;

/// Event of an agent.
enum Event {
    /// Request to the model.
    Asks(Waiting),
    /// End of the agent, with its final report or its failure.
    Ended(Result<Value, String>),
}

/// Request of an agent that waits for the model's turn.
struct Waiting {
    request: ModelRequest,
    /// Receives new text of the turn, if the agent streams.
    pieces: Option<UnboundedSender<String>>,
    reply: oneshot::Sender<Result<ModelTurn, String>>,
}

impl AgentProxy {
    /// Serves a program, given with its arguments. It is started for every rollout in its own process
    /// group, which ends with it or with the rollout. `OPENAI_BASE_URL` holds the base URL,
    /// `OPENAI_API_KEY` a dummy key, and standard input the prompt with its metadata as JSON. A last
    /// line of output that is a JSON object is its final report.
    pub fn command(command: Vec<String>) -> Self {
        AgentProxy::new(Launch::Command(command))
    }

    /// Serves an agent with an address, `http://host:port/path` or `https://…`: the same JSON, with
    /// `base_url`, is posted there, and the response is its final report.
    pub fn post(endpoint: impl Into<Endpoint>) -> Result<Self, EnvError> {
        Ok(AgentProxy::new(Launch::Post(Client::new("agent", endpoint).map_err(EnvError::new)?)))
    }

    /// Serves agents in Python processes, such as environments of verifiers. They answer
    /// `{"do": "run"}` with the final report. An agent that fails is a failure of its rollout, which is
    /// retried.
    pub fn python(workers: Workers) -> Self {
        AgentProxy::new(Launch::Python(workers))
    }

    fn new(launch: Launch) -> Self {
        let (address, model) = (SocketAddr::from(([127, 0, 0, 1], 0)), "policy".to_owned());
        AgentProxy { address, model, parser: Arc::new(ToolFormat::Hermes), allowed_hosts: Vec::new(), launch }
    }

    /// Starts to listen. Returns the address, and creates an environment with an agent per rollout. The
    /// server stops when this and all environments are dropped.
    pub fn start(self) -> Result<(SocketAddr, MakeEnvironment), EnvError> {
        let at = |source| {
            let text = "choose another address, whose port 0 takes a free one";
            EnvError::new(format!("agents can't be served at {}: {source}; {text}", self.address))
        };
        let listener = TcpListener::bind(self.address).map_err(at)?;
        let rollouts = Arc::new(Rollouts::default());
        let routes = guard(server::routes(rollouts.clone(), self.model.as_str().into()), &self.allowed_hosts);
        let server = Server::start(listener, routes).map_err(at)?;
        let address = server.address();
        let running = Arc::new(Running { config: self, rollouts, server });
        Ok((address, Arc::new(move || Box::new(ProxiedAgent::new(running.clone())))))
    }
}
