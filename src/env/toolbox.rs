//! Tools that functions run: each call by itself, or as an environment.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use serde_json::{Map, Value};

use super::{Action, EnvError, Environment, Episode, Grade, Step, ToolCall, ToolResult, ToolSpec};
use crate::data::ChatMessage;

type Executor = dyn Fn(&ToolCall, Instant) -> Result<String, String> + Send + Sync;

/// Tools that functions run. As an environment it is the prompt's conversation with these tools. A
/// turn without a call ends the episode. Its grade is 0; a reward scores the rollout.
///
/// ```
/// use rollflow::env::{ToolCall, ToolSpec, Toolbox, execute_tools};
/// use serde_json::json;
///
/// let schema = json!({"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]});
/// let tools = Toolbox::default().function(ToolSpec::new("weather", "Tomorrow's.", schema), |arguments| {
///     Ok(format!("sun over {}", arguments["city"].as_str().unwrap_or("nowhere")))
/// });
/// let call = ToolCall::new("weather", serde_json::from_value(json!({"city": "Bern"}))?);
/// let soon = std::time::Instant::now() + std::time::Duration::from_secs(1);
/// let results = execute_tools(&[call], &|call, deadline| tools.execute(call, deadline), soon);
/// assert_eq!(results[0].content, "sun over Bern");
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Clone, Default)]
pub struct Toolbox {
    tools: Vec<ToolSpec>,
    executors: BTreeMap<String, Arc<Executor>>,
    /// Executor of calls without their own.
    default_executor: Option<Arc<Executor>>,
}

impl Toolbox {
    /// Tools that one executor runs. It takes a call and the instant by which it must return the
    /// text of the result, or the cause of its failure, for the model. Without `tools` it takes
    /// calls of any name.
    pub fn new(
        tools: Vec<ToolSpec>,
        executor: impl Fn(&ToolCall, Instant) -> Result<String, String> + Send + Sync + 'static,
    ) -> Self {
        Toolbox { tools, executors: BTreeMap::new(), default_executor: Some(Arc::new(executor)) }
    }

    /// Adds a tool that is a function of its arguments.
    pub fn function(
        mut self,
        tool: ToolSpec,
        function: impl Fn(&Map<String, Value>) -> Result<String, String> + Send + Sync + 'static,
    ) -> Self {
        let executor = move |call: &ToolCall, _: Instant| function(&call.arguments);
        self.executors.insert(tool.name.clone(), Arc::new(executor));
        self.tools.push(tool);
        self
    }

    /// Runs a call.
    pub fn execute(&self, call: &ToolCall, deadline: Instant) -> Result<String, String> {
        let executor = self.executors.get(&call.name).or(self.default_executor.as_ref());
        let executor = executor.ok_or_else(|| format!("there is no tool {:?}", call.name))?;
        executor(call, deadline)
    }
}

impl Environment for Toolbox {
    fn reset(&mut self, episode: &Episode, _: Instant) -> Result<Vec<ChatMessage>, EnvError> {
        Ok(episode.conversation())
    }

    fn tools(&self) -> Vec<ToolSpec> {
        self.tools.clone()
    }

    fn step(&mut self, action: &Action, deadline: Instant) -> Result<Step, EnvError> {
        Ok(Step::results(execute_tools(&action.calls, &|call, deadline| self.execute(call, deadline), deadline)))
    }

    fn grade(&mut self, _: Instant) -> Result<Grade, EnvError> {
        Ok(Grade::default())
    }
}

/// Runs calls one after the other and returns their results in order. An error or a panic of the
/// executor is a failed result.
pub fn execute_tools(
    calls: &[ToolCall],
    executor: &dyn Fn(&ToolCall, Instant) -> Result<String, String>,
    deadline: Instant,
) -> Vec<ToolResult> {
    let execute = |call: &ToolCall| match catch_unwind(AssertUnwindSafe(|| executor(call, deadline))) {
        Ok(Ok(content)) => ToolResult::of(call, content),
        Ok(Err(why)) => ToolResult::failed(call, why),
        Err(_) => ToolResult::failed(call, "the tool broke"),
    };
    calls.iter().map(execute).collect()
}
