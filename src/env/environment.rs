//! What a rollout of several turns acts on.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{ToolCall, ToolResult, ToolSpec};
use crate::data::{ChatMessage, Metadata, Prompt, PromptText};

/// A task that a model works on in turns: it reads an observation, answers, calls tools, and reads what came of it, until it is done.
///
/// There is a fresh one for every rollout. Its methods may block: they run on a bounded pool ([`Pool`](super::Pool)), where nothing but the
/// rollout itself waits for them. What takes longer than its deadline is given up, and the rollout with it; who starts processes or
/// requests ends them by then.
///
/// A rollout that was interrupted goes on with an environment whose state is restored, where [`Environment::save`] gives one, and is
/// otherwise played again from the beginning with the same turns: then it must answer them in the same way.
pub trait Environment: Send {
    /// Begins the episode. Gives the conversation that the model reads before its first turn: the prompt's own, or one made of it.
    fn reset(&mut self, episode: &Episode, deadline: Deadline) -> Result<Vec<ChatMessage>, EnvError>;

    /// The tools that the model may call, after the reset. They stand in the chat template, and arguments are checked against them.
    fn tools(&self) -> Vec<ToolSpec> {
        Vec::new()
    }

    /// Answers one turn of the model.
    fn step(&mut self, action: &Action, deadline: Deadline) -> Result<Step, EnvError>;

    /// Hears of a turn that was cut off by its length. Nobody answers it: the rollout is over, and is graded next.
    fn cut_off(&mut self, _action: &Action) {}

    /// Whether it wants to hear turns while they are sampled.
    fn listens(&self) -> bool {
        false
    }

    /// Hears what the model has said so far of its present turn, after every token, if it [listens](Environment::listens). It is called on the
    /// generator's own thread, and must not block.
    fn hear(&mut self, _so_far: &str) {}

    /// What there is to see of its state now, for logs and hooks.
    fn observe(&self) -> Value {
        Value::Null
    }

    /// What the whole rollout was worth, once its last turn was answered or a limit ended it.
    fn grade(&mut self, deadline: Deadline) -> Result<Grade, EnvError>;

    /// All that [`Environment::restore`] needs to go on from here; none where playing the turns again is as good.
    fn save(&self) -> Option<Value> {
        None
    }

    /// Goes on from a saved state, as of its newest step, after a [`reset`](Environment::reset) with the same episode.
    fn restore(&mut self, _state: &Value) -> Result<(), EnvError> {
        Err(EnvError::new("its state can't be restored"))
    }
}

/// The role of a message that is a text by itself, to go on from without a chat template. It is a conversation's only message.
pub const TEXT: &str = "text";

/// Makes a fresh environment for every rollout.
pub type MakeEnvironment = Arc<dyn Fn() -> Box<dyn Environment> + Send + Sync>;

/// Which task, for which rollout.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Episode {
    /// The prompt with its metadata.
    pub prompt: Prompt,
    /// Keys whatever the environment draws. It is the same for all rollouts of a prompt, so that they are comparable.
    pub seed: u64,
    /// The rollout's place in its group.
    pub index: u32,
}

impl Episode {
    /// The prompt as a conversation: a text is what the user says.
    pub fn conversation(&self) -> Vec<ChatMessage> {
        match &self.prompt.text {
            PromptText::Text(text) => vec![ChatMessage::new("user", text.clone())],
            PromptText::Chat(turns) => turns.clone(),
        }
    }
}

/// One turn of the model, as its environment gets it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Action {
    /// All that was said, calls included, without end-of-turn marks.
    pub text: String,
    /// The calls in it that are well formed, name a known tool and fit its schema. Malformed ones are answered by the agent loop itself.
    pub calls: Vec<ToolCall>,
    /// How many were not.
    pub malformed: usize,
    /// Tokens that the model had read before it.
    pub read: usize,
    /// Tokens that were sampled for it.
    pub sampled: usize,
}

/// What came of a turn.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Step {
    /// What the calls gave, in their order; each becomes a message of the role `tool`.
    pub results: Vec<ToolResult>,
    /// What else the model reads next, of the role `user` as a rule.
    pub messages: Vec<ChatMessage>,
    /// What this turn earned.
    pub reward: f64,
    /// Whether the episode is over: the model gets no further turn.
    pub done: bool,
    /// Whether `messages` are all that the model reads next, in the place of the conversation so far: what was said begins no sample's middle
    /// then, and another sample begins. The tools may have changed, too.
    pub anew: bool,
}

impl Step {
    /// The user says this next.
    pub fn says(text: impl Into<String>) -> Self {
        Step { messages: vec![ChatMessage::new("user", text)], ..Step::default() }
    }

    /// The calls gave this.
    pub fn results(results: Vec<ToolResult>) -> Self {
        Step { results, ..Step::default() }
    }

    /// The episode is over.
    pub fn over() -> Self {
        Step { done: true, ..Step::default() }
    }

    /// With this reward for the turn.
    pub fn reward(self, reward: f64) -> Self {
        Step { reward, ..self }
    }

    /// Over, if so.
    pub fn done(self, done: bool) -> Self {
        Step { done, ..self }
    }
}

/// What a whole rollout was worth.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Grade {
    /// Its reward, beside what its turns earned.
    pub reward: f64,
    /// Whether the task was solved, where that can be told.
    pub correct: Option<bool>,
    /// What else the sample's metadata should hold.
    pub metadata: Metadata,
}

impl Grade {
    /// 1 if the task was solved, otherwise 0.
    pub fn correct(correct: bool) -> Self {
        Grade { reward: f64::from(u8::from(correct)), correct: Some(correct), ..Grade::default() }
    }
}

/// By when an environment must have answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deadline(Instant);

impl Deadline {
    /// So long from now.
    pub fn within(time: Duration) -> Self {
        // A time beyond what the clock can say is as good as a year.
        let now = Instant::now();
        Deadline(now.checked_add(time).unwrap_or(now + Duration::from_secs(365 * 24 * 3600)))
    }

    /// The instant itself.
    pub fn at(self) -> Instant {
        self.0
    }

    /// What is left.
    pub fn left(self) -> Duration {
        self.0.saturating_duration_since(Instant::now())
    }

    /// Whether nothing is.
    pub fn is_over(self) -> bool {
        self.left().is_zero()
    }
}

/// Why an environment can't go on: its process, machine or connection failed. The rollout is played
/// again in a fresh one, and lost when that fails too. A mistake of the model is an observation and
/// never one of these.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{problem}")]
pub struct EnvError {
    problem: String,
    late: bool,
}

impl EnvError {
    /// With what is wrong, and what to do.
    pub fn new(problem: impl std::fmt::Display) -> Self {
        EnvError { problem: problem.to_string(), late: false }
    }

    /// The environment did not answer in time. After a reset that is a verdict on the rollout, which
    /// ends there, and not a failure: how long a step or the grading takes depends on what the model
    /// said.
    pub fn late(problem: impl std::fmt::Display) -> Self {
        EnvError { problem: problem.to_string(), late: true }
    }

    /// Returns true if it was made with [`EnvError::late`].
    pub fn is_late(&self) -> bool {
        self.late
    }
}
