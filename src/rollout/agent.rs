//! Settings of multi-turn rollouts: the environment, the format of its calls, and the limits.

use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;

use crate::data::ChatMessage;
use crate::env::{Environment, MakeEnvironment, ToolCall, ToolFormat, ToolParser, ToolResult, ToolSpec};

/// Environment of multi-turn rollouts, with the format of its calls and the limits of a rollout.
#[derive(Clone)]
pub struct Agent {
    pub(super) make: MakeEnvironment,
    pub(super) parser: Arc<dyn ToolParser>,
    pub(super) max_turns: usize,
    pub(super) max_tokens: Option<usize>,
    pub(super) max_tool_calls: Option<u64>,
    pub(super) max_time: Option<Duration>,
    pub(super) step_timeout: Duration,
    pub(super) retries: u32,
    pub(super) workers: usize,
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
    /// Agent with a fresh environment for each rollout. Defaults: calls in the Hermes format, at most 8
    /// turns, 30 seconds for each step of the environment.
    pub fn new<V: Environment + 'static>(make: impl Fn() -> V + Send + Sync + 'static) -> Self {
        Agent::by(Arc::new(move || Box::new(make())))
    }

    /// Agent with boxed environments.
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

    /// Agent with environments that parse calls themselves, such as those of an
    /// [`AgentProxy`](crate::env::AgentProxy).
    pub fn remote(make: MakeEnvironment) -> Self {
        Agent::by(make).parser(|_: &str, _: &[ToolSpec]| Vec::new())
    }

    /// Format of calls: a [`ToolFormat`], or a closure.
    pub fn parser(self, parser: impl ToolParser + 'static) -> Self {
        Agent { parser: Arc::new(parser), ..self }
    }

    /// Most turns of the model, at least 1; 8 by default.
    pub fn max_turns(self, turns: usize) -> Self {
        Agent { max_turns: turns.max(1), ..self }
    }

    /// Longest rollout in tokens, prompt and responses included. A turn begins only if the longest
    /// completion fits. Default: the model's number of positions.
    pub fn max_tokens(self, tokens: usize) -> Self {
        Agent { max_tokens: Some(tokens), ..self }
    }

    /// Most calls, malformed ones included, after which no further turn begins. Default: no limit.
    pub fn max_tool_calls(self, calls: u64) -> Self {
        Agent { max_tool_calls: Some(calls), ..self }
    }

    /// Longest time from the rollout's start to the start of its last turn. Default: no limit.
    pub fn max_time(self, time: Duration) -> Self {
        Agent { max_time: Some(time), ..self }
    }

    /// Timeout of a reset, a step or the grading; 30 seconds by default. A late step or grading ends
    /// its rollout as truncated with a grade of 0, because its duration depends on the completion. A
    /// late reset is a failure of the environment.
    pub fn step_timeout(self, time: Duration) -> Self {
        Agent { step_timeout: time, ..self }
    }

    /// Retries of a rollout whose environment failed (error, panic or lost connection); 2 by default.
    /// Each retry replays the completions in a fresh environment, after a pause that doubles from 0.25
    /// to 10 seconds. After the last one, the rollout is lost.
    pub fn retries(self, retries: u32) -> Self {
        Agent { retries, ..self }
    }

    /// Number of environments that work at the same time, at least 1; 32 by default.
    pub fn workers(self, workers: usize) -> Self {
        Agent { workers: workers.max(1), ..self }
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
