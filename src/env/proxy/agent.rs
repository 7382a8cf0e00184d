//! Agent of one rollout, as an environment, and its conversation.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::launch::{Launch, Launched};
use super::protocol::{ModelRequest, ModelTurn};
use super::{Event, Running, Waiting};
use crate::data::{ChatMessage, is_reward};
use crate::env::{Action, EnvError, Environment, Episode, Grade, Step, TEXT, ToolSpec, extract_tool_calls};

/// Longest wait for an agent to end after its rollout.
const END_TIMEOUT: Duration = Duration::from_secs(10);

pub(super) struct ProxiedAgent {
    proxy: Arc<Running>,
    id: String,
    /// Events of the agent, which ends when it is dropped.
    agent: Option<(Receiver<Event>, Launched)>,
    conversation: Conversation,
    /// Request that the next turn of the model answers.
    waits: Option<Waiting>,
    /// Length of the turn's text that was streamed.
    heard: usize,
    /// Final report, or failure.
    ended: Option<Result<Value, String>>,
    requests: u64,
    forks: u64,
}

impl ProxiedAgent {
    pub fn new(proxy: Arc<Running>) -> Self {
        let (id, conversation) = (String::new(), Conversation::default());
        ProxiedAgent { proxy, id, agent: None, conversation, waits: None, heard: 0, ended: None, requests: 0, forks: 0 }
    }

    /// Waits for the next event of the agent.
    fn next(&mut self, deadline: Instant) -> Result<Event, EnvError> {
        let (events, _) = self.agent.as_ref().ok_or_else(|| EnvError::new("the agent was not started"))?;
        events.recv_timeout(deadline.saturating_duration_since(Instant::now())).map_err(|error| match error {
            RecvTimeoutError::Timeout => EnvError::late(
                "the agent neither asked the model nor ended in time; look what it waits for, or raise step_timeout",
            ),
            RecvTimeoutError::Disconnected => EnvError::new("the agent is gone"),
        })
    }

    /// Waits for the next request that has no response yet; none if the agent ended.
    fn ask(&mut self, deadline: Instant) -> Result<Option<Waiting>, EnvError> {
        loop {
            match self.next(deadline)? {
                Event::Ended(how) => {
                    self.ended = Some(how);
                    return Ok(None);
                }
                // The agent repeats a request whose response was lost.
                Event::Asks(ask) => match self.conversation.lost(&ask.request) {
                    Some(turn) => self.respond(ask, turn),
                    None => {
                        self.requests += 1;
                        return Ok(Some(ask));
                    }
                },
            }
        }
    }

    fn respond(&mut self, ask: Waiting, turn: ModelTurn) {
        self.conversation.arrived = ask.reply.send(Ok(turn.clone())).is_ok();
        self.conversation.response = Some(turn);
    }
}

impl Environment for ProxiedAgent {
    fn reset(&mut self, episode: &Episode, deadline: Instant) -> Result<Vec<ChatMessage>, EnvError> {
        let (sender, events) = channel();
        // A retried rollout has another agent, which must not receive the first one's requests.
        let nonce = RandomState::new().hash_one(episode.index);
        self.id = format!("p{:012}-s{:04}-{nonce:016x}", episode.prompt.ordinal, episode.index);
        let Running { config, rollouts, server } = &*self.proxy;
        rollouts.lock().insert(self.id.clone(), sender.clone());
        let base = format!("http://{}/r/{}/v1", server.address(), self.id);
        self.agent = Some((events, config.launch.begin(episode, &base, &config.model, server.tasks(), sender)?));
        match self.ask(deadline)? {
            Some(ask) => {
                let messages = self.conversation.begin(&ask.request);
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
        self.conversation.last.tools.clone()
    }

    fn listens(&self) -> bool {
        self.waits.as_ref().is_some_and(|ask| ask.pieces.is_some())
    }

    fn hear(&mut self, so_far: &str) {
        if let (Some(Waiting { pieces: Some(pieces), .. }), Some(new)) = (&self.waits, so_far.get(self.heard..)) {
            // The agent may have given the stream up.
            drop(pieces.send(new.to_owned()));
            self.heard = so_far.len();
        }
    }

    fn cut_off(&mut self, action: &Action) {
        if let Some(ask) = self.waits.take() {
            self.respond(ask, ModelTurn { truncated: true, ..ModelTurn::of(action, Vec::new()) });
        }
    }

    fn step(&mut self, action: &Action, deadline: Instant) -> Result<Step, EnvError> {
        let (parser, tools) = (&*self.proxy.config.parser, &self.conversation.last.tools);
        // An agent that names no tools reads the text itself.
        let calls = if tools.is_empty() { Vec::new() } else { extract_tool_calls(&action.text, parser, tools) };
        let mut turn = ModelTurn::of(action, calls);
        if !turn.calls.is_empty() {
            turn.content = parser.text_before(&action.text, tools).to_owned();
        }
        if let Some(ask) = self.waits.take() {
            self.respond(ask, turn);
        }
        let Some(ask) = self.ask(deadline)? else { return Ok(Step::over()) };
        let step = self.conversation.follow(&ask.request);
        self.forks += u64::from(step.restarts);
        (self.waits, self.heard) = (Some(ask), 0);
        Ok(step)
    }

    fn observe(&self) -> Value {
        json!({ "rollout": self.id, "requests": self.requests, "forks": self.forks })
    }

    /// Reads the final report: an object with `reward`, and optionally `correct` and `metadata`.
    /// Without a report the reward is 0.
    fn grade(&mut self, deadline: Instant) -> Result<Grade, EnvError> {
        let leaving = deadline.min(Instant::now() + END_TIMEOUT);
        let over = |ask: Waiting| drop(ask.reply.send(Err("the rollout is over: it reached a limit".to_owned())));
        if let Some(ask) = self.waits.take() {
            over(ask);
        }
        while self.ended.is_none() {
            match self.next(leaving) {
                Ok(Event::Asks(ask)) => over(ask),
                Ok(Event::Ended(how)) => self.ended = Some(how),
                Err(_) => break,
            }
        }
        if let (Some(Err(why)), Launch::Python(_)) = (&self.ended, &self.proxy.config.launch) {
            return Err(EnvError::new(format!("the agent failed: {why}")));
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

impl Drop for ProxiedAgent {
    fn drop(&mut self) {
        self.proxy.rollouts.lock().remove(&self.id);
    }
}

/// Last request of an agent, and the response of the model.
#[derive(Default)]
struct Conversation {
    last: ModelRequest,
    response: Option<ModelTurn>,
    /// If true, the agent received it.
    arrived: bool,
}

impl Conversation {
    /// Starts a conversation with this request.
    fn begin(&mut self, request: &ModelRequest) -> Vec<ChatMessage> {
        (self.last, self.response) = (request.clone(), None);
        let mut messages = request.messages.clone();
        if request.text {
            messages.iter_mut().for_each(|message| message.role = TEXT.to_owned());
        }
        messages
    }

    /// Returns the response to the same request, if it did not reach the agent.
    fn lost(&self, request: &ModelRequest) -> Option<ModelTurn> {
        let same = request.messages == self.last.messages && self.is_like(request);
        self.response.clone().filter(|_| same && !self.arrived)
    }

    /// Compares the next request with the conversation, and records it. The step holds the messages
    /// that extend the conversation, or all of one that restarts.
    fn follow(&mut self, request: &ModelRequest) -> Step {
        let known = self.last.messages.len();
        let extension = request.messages.strip_prefix(&self.last.messages[..]).and_then(<[_]>::split_first);
        match (extension, &self.response) {
            (Some((turn, new)), Some(response))
                if !new.is_empty() && !request.text && self.is_like(request) && response.is_repeated_by(turn) =>
            {
                let messages = new.to_vec();
                self.last.messages.extend_from_slice(&request.messages[known..]);
                Step { messages, ..Step::default() }
            }
            _ => Step { messages: self.begin(request), restarts: true, ..Step::default() },
        }
    }

    fn is_like(&self, request: &ModelRequest) -> bool {
        request.tools == self.last.tools && request.text == self.last.text
    }
}
