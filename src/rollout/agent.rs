//! Settings of multi-turn rollouts: the environment, the format of its calls, and the limits.

use std::sync::Arc;

use serde_json::Value;

use crate::data::ChatMessage;
use crate::env::{Environment, MakeEnvironment, ToolCall, ToolFormat, ToolParser, ToolResult, ToolSpec};
use crate::settings::declare::section;
use crate::settings::setting::{POSITIVE, POSITIVE_IF_GIVEN, SOME, SOME_IF_GIVEN};

section! {
    /// Limits of multi-turn rollouts and of their environments.
    pub struct AgentLimits {
        /// Most turns of the model.
        max_turns: usize = 8, SOME;
        /// Longest rollout in tokens, prompt and observations included. Left out: what the model
        /// and its server read.
        max_tokens: Option<usize> = None, SOME_IF_GIVEN;
        /// Number of tool calls after which no further turn begins.
        max_tool_calls: Option<usize> = None, SOME_IF_GIVEN;
        /// Seconds after which no further turn begins.
        max_time: Option<f64> = None, POSITIVE_IF_GIVEN;
        /// Timeout of a reset, a step or the grading, in seconds. A step or a grading that exceeds
        /// it ends the rollout with a grade of 0.
        step_timeout: f64 = 30.0, POSITIVE;
        /// Retries of a rollout whose environment failed, each in a fresh environment, before
        /// `flow.on_lost_sample` decides.
        replays: u32 = 2;
        /// Environments that work in parallel.
        workers: usize = 32, SOME;
    }
}

/// Environment of multi-turn rollouts, with the format of its calls and the limits of a rollout.
#[derive(Clone)]
pub struct Agent {
    pub(super) make: MakeEnvironment,
    pub(super) parser: Arc<dyn ToolParser>,
    pub(super) limits: AgentLimits,
    pub(super) seed: u64,
    pub(super) stop: Option<StopCondition>,
    pub(super) each_turn: Option<Hook>,
}

type StopCondition = Arc<dyn Fn(&[ChatMessage]) -> bool + Send + Sync>;
type Hook = Arc<dyn Fn(&Turn) + Send + Sync>;

/// One turn with its calls and reward, for hooks.
#[derive(Debug)]
pub struct Turn<'a> {
    /// Ordinal of the prompt.
    pub ordinal: u64,
    /// Index of the rollout in its group, from 0.
    pub index: u32,
    /// Number of the turn, from 1.
    pub turn: usize,
    /// Conversation up to the model's next turn.
    pub messages: &'a [ChatMessage],
    /// Calls in the turn, and results of malformed ones.
    pub calls: &'a [Result<ToolCall, ToolResult>],
    /// Reward of the turn.
    pub reward: f64,
    /// Observable state of the environment.
    pub observed: &'a Value,
}

impl Agent {
    /// Agent with a fresh environment for each rollout, calls in the Hermes format and the default
    /// [`AgentLimits`].
    pub fn new<V: Environment + 'static>(make: impl Fn() -> V + Send + Sync + 'static) -> Self {
        Agent::by(Arc::new(move || Box::new(make())))
    }

    /// Agent with boxed environments.
    pub fn by(make: MakeEnvironment) -> Self {
        let (parser, limits) = (Arc::new(ToolFormat::Hermes), AgentLimits::default());
        Agent { make, parser, limits, seed: 0, stop: None, each_turn: None }
    }

    /// Agent with environments that parse calls themselves, such as those of an
    /// [`AgentProxy`](crate::env::AgentProxy).
    pub fn remote(make: MakeEnvironment) -> Self {
        Agent::by(make).parser(|_: &str, _: &[ToolSpec]| Vec::new())
    }

    /// Format of calls: a [`ToolFormat`], or a closure.
    pub fn parser(self, parser: impl ToolParser + 'static) -> Self {
        Agent { parser: Arc::new(parser), ..self }
    }

    /// Changes the limits. A turn begins only if the longest completion fits into `max_tokens`. A late
    /// reset is a failure of the environment. Each replay follows a pause that doubles from 0.25 to 10
    /// seconds; after the last one, the rollout is lost.
    pub fn limits(mut self, change: impl FnOnce(&mut AgentLimits)) -> Self {
        change(&mut self.limits);
        self
    }

    /// Seed of the environments' random numbers; 0 by default.
    pub fn seed(self, seed: u64) -> Self {
        Agent { seed, ..self }
    }

    /// Ends a rollout before a turn if the closure returns true for the conversation so far.
    pub fn stop_condition(self, stop: impl Fn(&[ChatMessage]) -> bool + Send + Sync + 'static) -> Self {
        Agent { stop: Some(Arc::new(stop)), ..self }
    }

    /// Calls this closure after every turn, on the generator's thread.
    pub fn each_turn(self, hook: impl Fn(&Turn) + Send + Sync + 'static) -> Self {
        Agent { each_turn: Some(Arc::new(hook)), ..self }
    }
}

/// Reason why a rollout ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StopReason {
    /// The environment ended it.
    EnvironmentDone,
    /// The environment had no response to a turn: the final answer.
    Answered,
    StopCondition,
    MaxTurns,
    /// A turn was cut off by its length, or the next one would not have fit.
    MaxTokens,
    MaxToolCalls,
    MaxTime,
    /// A step or the grading exceeded its timeout: the grade is 0.
    StepTimeout,
    /// The environment failed after all retries: there is no grade.
    EnvironmentFailed,
    /// The engine refused a turn: there is no grade.
    EngineFailed,
}

impl StopReason {
    /// Label in metrics and metadata.
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

    /// Returns true if no limit and no failure ended the rollout.
    pub fn is_complete(self) -> bool {
        matches!(self, StopReason::EnvironmentDone | StopReason::Answered | StopReason::StopCondition)
    }
}
