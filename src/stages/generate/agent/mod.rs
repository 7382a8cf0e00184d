//! Rollouts of several turns: a model and an [`Environment`] answer each other until the task is done or a limit ends it.
//!
//! [`Generator::environment`](super::Generator::environment) makes a generator work so; [`roll_out`] does it by hand. Laws held here: D1 and D3
//! (what was sampled is never tokenised again, and only it is trained), D4 (tokens are written down as they are sampled and given, so that an
//! interrupted conversation goes on in the middle), N2 (no two turns of a rollout meet the same random numbers), V3 (in rounds, what is computed
//! together depends on no timing).

mod by_hand;
mod conversations;
mod dialogue;
mod rollout;
mod run;

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use by_hand::{AgentRollouts, agent_rollout_to_sample, create_multiturn_rollout, generate_conversation_turn, roll_out};

pub(in crate::stages) use conversations::{Conversations, Setup};

use crate::data::ChatMessage;
#[cfg(unix)]
use crate::env::proxy::{AgentProxy, no_calls};
use crate::env::{Called, Environment, MakeEnvironment, ToolFormat, ToolParser};

/// An environment, how calls in it are written, and what ends a rollout.
#[derive(Clone)]
pub struct Agent {
    make: MakeEnvironment,
    parser: Arc<dyn ToolParser>,
    max_turns: usize,
    max_tokens: Option<usize>,
    max_tool_calls: Option<u64>,
    max_time: Option<Duration>,
    step_timeout: Duration,
    retries: u32,
    workers: usize,
    seed: u64,
    stop: Option<StopCondition>,
    each_turn: Option<Hook>,
}

type StopCondition = Arc<dyn Fn(&[ChatMessage]) -> bool + Send + Sync>;
type Hook = Arc<dyn Fn(&Turn) + Send + Sync>;

/// One turn and what came of it, as hooks see it.
#[derive(Debug)]
pub struct Turn<'a> {
    /// The prompt.
    pub ordinal: u64,
    /// The rollout's place in its group.
    pub index: u32,
    /// The turn, from 1.
    pub turn: usize,
    /// The conversation up to what the model reads next.
    pub messages: &'a [ChatMessage],
    /// The calls in what it said.
    pub calls: &'a [Called],
    /// What the turn earned.
    pub reward: f64,
    /// What there is to see of the environment.
    pub observed: &'a Value,
}

impl Agent {
    /// With a fresh environment for every rollout. Calls are read as Hermes writes them, there are up to 8 turns, and a step of the environment may
    /// take 30 seconds, unless told otherwise.
    pub fn new<V: Environment + 'static>(make: impl Fn() -> V + Send + Sync + 'static) -> Self {
        Agent::by(Arc::new(move || Box::new(make())))
    }

    /// The same, of environments whose type is not known.
    pub fn by(make: MakeEnvironment) -> Self {
        Agent {
            make,
            parser: Arc::new(ToolFormat::Hermes),
            max_turns: 8,
            max_tokens: None,
            max_tool_calls: None,
            max_time: None,
            step_timeout: Duration::from_secs(30),
            retries: 2,
            workers: 32,
            seed: 0,
            stop: None,
            each_turn: None,
        }
    }

    /// An agent that lives elsewhere and asks this generator through a proxy, which reads the calls itself.
    #[cfg(unix)]
    pub fn elsewhere(proxy: &AgentProxy) -> Self {
        Agent::by(proxy.maker()).parser(no_calls)
    }

    /// How calls are written: a [`ToolFormat`], or a closure.
    pub fn parser(self, parser: impl ToolParser + 'static) -> Self {
        Agent { parser: Arc::new(parser), ..self }
    }

    /// Most turns of the model.
    pub fn max_turns(self, turns: usize) -> Self {
        Agent { max_turns: turns.max(1), ..self }
    }

    /// Longest conversation in tokens, prompt and observations included: a turn begins only where its longest answer has room. At most what the
    /// model has positions for.
    pub fn max_tokens(self, tokens: usize) -> Self {
        Agent { max_tokens: Some(tokens), ..self }
    }

    /// Most calls, malformed ones included, after which no further turn begins.
    pub fn max_tool_calls(self, calls: u64) -> Self {
        Agent { max_tool_calls: Some(calls), ..self }
    }

    /// No turn begins later than this after the rollout did.
    pub fn max_time(self, time: Duration) -> Self {
        Agent { max_time: Some(time), ..self }
    }

    /// How long a reset, a step or the grading may take; 30 seconds by default. A step or a grading that takes longer ends its rollout as
    /// truncated, with a grade of 0: how long it takes depends on what the model said. A reset that takes longer is a failure of the
    /// environment.
    pub fn step_timeout(self, time: Duration) -> Self {
        Agent { step_timeout: time, ..self }
    }

    /// How often a rollout whose environment failed (it erred, panicked or lost its connection) is played again in a fresh one, after a pause
    /// that doubles from a quarter of a second up to ten; 2 by default. Its completions are not sampled again. Then the rollout is lost.
    pub fn retries(self, retries: u32) -> Self {
        Agent { retries, ..self }
    }

    /// Environments that may work at the same time.
    pub fn workers(self, workers: usize) -> Self {
        Agent { workers: workers.max(1), ..self }
    }

    /// Keys what environments draw.
    pub fn seed(self, seed: u64) -> Self {
        Agent { seed, ..self }
    }

    /// Ends a rollout before a turn if the conversation so far is enough.
    pub fn stop_condition(self, stop: impl Fn(&[ChatMessage]) -> bool + Send + Sync + 'static) -> Self {
        Agent { stop: Some(Arc::new(stop)), ..self }
    }

    /// Shows this closure every turn, on the generator's thread.
    pub fn each_turn(self, look: impl Fn(&Turn) + Send + Sync + 'static) -> Self {
        Agent { each_turn: Some(Arc::new(look)), ..self }
    }
}

/// Why a rollout ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StopReason {
    /// The environment said so.
    EnvironmentDone,
    /// The model said something that the environment has no answer to: its final answer.
    Answered,
    /// The stop condition held.
    StopCondition,
    /// There were as many turns as are allowed.
    MaxTurns,
    /// A turn was cut off by its length, or the next one would not have had room.
    MaxTokens,
    /// There were as many calls as are allowed.
    MaxToolCalls,
    /// It took too long.
    MaxTime,
    /// The environment did not answer a turn, or grade the rollout, in time: its grade is 0.
    StepTimeout,
    /// The environment failed, again and again: its rollout has no grade.
    EnvironmentFailed,
    /// The engine did not make a turn: its rollout has no grade.
    EngineFailed,
}

impl StopReason {
    /// Its label in metrics and metadata.
    pub fn label(self) -> &'static str {
        match self {
            StopReason::EnvironmentDone => "environment_done",
            StopReason::Answered => "answered",
            StopReason::StopCondition => "stop_condition",
            StopReason::MaxTurns => "max_turns",
            StopReason::MaxTokens => "max_tokens",
            StopReason::MaxToolCalls => "max_tool_calls",
            StopReason::MaxTime => "max_time",
            StopReason::StepTimeout => "step_timeout",
            StopReason::EnvironmentFailed => "environment_failed",
            StopReason::EngineFailed => "engine_failed",
        }
    }

    /// Whether the rollout came to its own end, rather than to a limit.
    pub fn is_complete(self) -> bool {
        matches!(self, StopReason::EnvironmentDone | StopReason::Answered | StopReason::StopCondition)
    }
}
