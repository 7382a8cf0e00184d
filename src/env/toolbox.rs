//! An environment that consists of tools alone.

use super::{Action, Deadline, EnvError, Environment, Episode, Functions, Grade, Step, ToolExecutor, ToolSpec, execute_tools};
use crate::data::ChatMessage;

/// The prompt's conversation with tools that an executor runs. A turn without a call ends the
/// episode. Its grade is 0; a reward scores the rollout.
pub struct Toolbox<X> {
    tools: Vec<ToolSpec>,
    executor: X,
}

impl<X: ToolExecutor> Toolbox<X> {
    /// Creates an environment with these tools.
    pub fn new(tools: Vec<ToolSpec>, executor: X) -> Self {
        Toolbox { tools, executor }
    }
}

impl From<Functions> for Toolbox<Functions> {
    fn from(functions: Functions) -> Self {
        Toolbox { tools: functions.tools().to_vec(), executor: functions }
    }
}

impl<X: ToolExecutor> Environment for Toolbox<X> {
    fn reset(&mut self, episode: &Episode, _: Deadline) -> Result<Vec<ChatMessage>, EnvError> {
        Ok(episode.conversation())
    }

    fn tools(&self) -> Vec<ToolSpec> {
        self.tools.clone()
    }

    fn step(&mut self, action: &Action, deadline: Deadline) -> Result<Step, EnvError> {
        Ok(Step::results(execute_tools(&action.calls, &self.executor, deadline)))
    }

    fn grade(&mut self, _: Deadline) -> Result<Grade, EnvError> {
        Ok(Grade::default())
    }
}
