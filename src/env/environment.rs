//! The environment of a multi-turn rollout.

use std::sync::Arc;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{ToolCall, ToolResult, ToolSpec};
use crate::data::{ChatMessage, Metadata, Prompt, PromptText};

/// A task that a model works on in turns: it reads messages, answers, calls tools and reads results.
///
/// Each rollout has its own environment. Methods may block: they run on a bounded pool of
/// threads. A call that lasts beyond its `deadline` is abandoned, and the rollout ends; processes
/// and requests that the call started must end by then.
///
/// An interrupted rollout continues from the state that [`Environment::save`] returned. Without a
/// state its turns are replayed from the start, and the environment must answer them in the same
/// way.
pub trait Environment: Send {
    /// Waits until the next call may begin, for an environment that shares something with others. The
    /// wait doesn't count for the call's deadline, and what is returned is held until the call ends.
    fn room(&mut self) -> Result<Room, EnvError> {
        Ok(Box::new(()))
    }

    /// Starts the episode. Returns the conversation that the model reads before its first turn.
    fn reset(&mut self, episode: &Episode, deadline: Instant) -> Result<Vec<ChatMessage>, EnvError>;

    /// Returns the tools that the model may call, after the reset. The chat template lists them, and
    /// arguments are checked against their schemas.
    fn tools(&self) -> Vec<ToolSpec> {
        Vec::new()
    }

    /// Answers one turn of the model.
    fn step(&mut self, action: &Action, deadline: Instant) -> Result<Step, EnvError>;

    /// Called with a truncated turn. The rollout is over and is graded next.
    fn cut_off(&mut self, _action: &Action) {}

    /// Returns true if [`Environment::hear`] is to be called while a turn is sampled.
    fn listens(&self) -> bool {
        false
    }

    /// Called with the text of the turn so far whenever it has grown, if the environment
    /// [listens](Environment::listens). The text has whole characters only. Runs on the generator's
    /// thread and must not block.
    fn hear(&mut self, _so_far: &str) {}

    /// Returns a view of its state, for logs and hooks.
    fn observe(&self) -> Value {
        Value::Null
    }

    /// Grades the whole rollout, after its last turn or after a limit ended it.
    fn grade(&mut self, deadline: Instant) -> Result<Grade, EnvError>;

    /// Returns the state for [`Environment::restore`], or none if the turns should be replayed.
    fn save(&self) -> Option<Value> {
        None
    }

    /// Continues from a saved state, after a [`reset`](Environment::reset) with the same episode.
    fn restore(&mut self, _state: &Value) -> Result<(), EnvError> {
        Err(EnvError::new("its state can't be restored"))
    }
}

/// Role of a message that is a plain text to continue, without a chat template. It is the only
/// message of its conversation.
pub const TEXT: &str = "text";

/// What an environment holds during a call, such as a permit. See [`Environment::room`].
pub type Room = Box<dyn Send>;

/// Creates an environment for each rollout.
pub type MakeEnvironment = Arc<dyn Fn() -> Box<dyn Environment> + Send + Sync>;

/// Task of one rollout.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Episode {
    /// The prompt with its metadata.
    pub prompt: Prompt,
    /// Seed of everything that the environment draws; the same for all rollouts of a prompt.
    pub seed: u64,
    /// Index of the rollout in its group.
    pub index: u32,
}

impl Episode {
    /// Returns the prompt as a conversation; a text is a user message.
    pub fn conversation(&self) -> Vec<ChatMessage> {
        match &self.prompt.text {
            PromptText::Text(text) => vec![ChatMessage::new("user", text.clone())],
            PromptText::Chat(turns) => turns.clone(),
        }
    }
}

/// One turn of the model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Action {
    /// Text of the turn, calls included, without end-of-turn marks.
    pub text: String,
    /// Valid calls: well formed, of a known tool, with arguments that fit its schema. The rollout
    /// loop answers malformed ones.
    pub calls: Vec<ToolCall>,
    /// Number of malformed calls.
    pub malformed: usize,
    /// Tokens of the context before the turn.
    pub read: usize,
    /// Tokens sampled for the turn.
    pub sampled: usize,
}

/// Response of the environment to a turn.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Step {
    /// Results of the calls, in their order; each becomes a message of the role `tool`.
    pub results: Vec<ToolResult>,
    /// Further messages for the model, usually of the role `user`.
    pub messages: Vec<ChatMessage>,
    /// Reward of this turn.
    pub reward: f64,
    /// If true, the episode is over.
    pub done: bool,
    /// If true, `messages` replace the conversation so far, and a new sample begins. The tools may
    /// change too.
    pub restarts: bool,
}

impl Step {
    /// Responds with a user message.
    pub fn says(text: impl Into<String>) -> Self {
        Step { messages: vec![ChatMessage::new("user", text)], ..Step::default() }
    }

    /// Responds with the results of the calls.
    pub fn results(results: Vec<ToolResult>) -> Self {
        Step { results, ..Step::default() }
    }

    /// Ends the episode.
    pub fn over() -> Self {
        Step { done: true, ..Step::default() }
    }

    /// Sets the reward of the turn.
    pub fn reward(self, reward: f64) -> Self {
        Step { reward, ..self }
    }

    /// Sets whether the episode is over.
    pub fn done(self, done: bool) -> Self {
        Step { done, ..self }
    }
}

/// Grade of a whole rollout.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Grade {
    /// Reward, in addition to those of the turns.
    pub reward: f64,
    /// True if the task was solved; none if unknown.
    pub correct: Option<bool>,
    /// Further fields for the sample's metadata.
    pub metadata: Metadata,
}

impl Grade {
    /// Grade with a reward of 1 if the task was solved, else 0.
    pub fn correct(correct: bool) -> Self {
        Grade { reward: f64::from(u8::from(correct)), correct: Some(correct), ..Grade::default() }
    }
}

/// Failure of an environment: its process, machine or connection. The rollout is retried in a new
/// environment, and lost if that fails too. A mistake of the model is an observation, not an error.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{problem}")]
pub struct EnvError {
    problem: String,
    late: bool,
}

impl EnvError {
    /// Creates an error with its cause and remedy.
    pub fn new(problem: impl std::fmt::Display) -> Self {
        EnvError { problem: problem.to_string(), late: false }
    }

    /// Creates a timeout. During a step or the grading it ends the rollout and is no failure, since
    /// their time depends on the model's turn.
    pub fn late(problem: impl std::fmt::Display) -> Self {
        EnvError { problem: problem.to_string(), late: true }
    }

    /// Returns true if it was made with [`EnvError::late`].
    pub fn is_late(&self) -> bool {
        self.late
    }
}
