//! Execution of tool calls, and counts of their use.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::{Called, Deadline, Malformed, ToolCall, ToolResult, ToolSpec};

/// Runs tools. Closures from a call to a text or an error are executors; [`Functions`] holds one per
/// name.
pub trait ToolExecutor: Send + Sync {
    /// Runs a call. Returns the text of its result, or the cause of its failure, for the model.
    fn execute(&self, call: &ToolCall, deadline: Deadline) -> Result<String, String>;
}

impl<F: Fn(&ToolCall) -> Result<String, String> + Send + Sync> ToolExecutor for F {
    fn execute(&self, call: &ToolCall, _: Deadline) -> Result<String, String> {
        self(call)
    }
}

type Function = Arc<dyn Fn(&Map<String, Value>) -> Result<String, String> + Send + Sync>;

/// Tools that are functions, by name.
///
/// ```
/// use rollflow::env::{Deadline, Functions, ToolCall, ToolSpec, execute_tools};
/// use serde_json::json;
///
/// let schema = json!({"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]});
/// let tools = Functions::default().function(ToolSpec::new("weather", "Tomorrow's.", schema), |arguments| {
///     Ok(format!("sun over {}", arguments["city"].as_str().unwrap_or("nowhere")))
/// });
/// let call = ToolCall::new("weather", serde_json::from_value(json!({"city": "Bern"}))?);
/// let results = execute_tools(&[call], &tools, Deadline::within(std::time::Duration::from_secs(1)));
/// assert_eq!(results[0].content, "sun over Bern");
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Clone, Default)]
pub struct Functions {
    tools: Vec<ToolSpec>,
    functions: BTreeMap<String, Function>,
}

impl Functions {
    /// Adds a tool.
    pub fn function(
        mut self,
        tool: ToolSpec,
        function: impl Fn(&Map<String, Value>) -> Result<String, String> + Send + Sync + 'static,
    ) -> Self {
        self.functions.insert(tool.name.clone(), Arc::new(function));
        self.tools.push(tool);
        self
    }

    /// Returns the descriptions of the tools.
    pub fn tools(&self) -> &[ToolSpec] {
        &self.tools
    }
}

impl ToolExecutor for Functions {
    fn execute(&self, call: &ToolCall, _: Deadline) -> Result<String, String> {
        let function = self.functions.get(&call.name).ok_or_else(|| format!("there is no tool {:?}", call.name))?;
        function(&call.arguments)
    }
}

/// Runs calls one after the other and returns their results in order. An error or a panic of the
/// executor is a failed result.
pub fn execute_tools(calls: &[ToolCall], executor: &dyn ToolExecutor, deadline: Deadline) -> Vec<ToolResult> {
    let execute = |call: &ToolCall| match catch_unwind(AssertUnwindSafe(|| executor.execute(call, deadline))) {
        Ok(Ok(content)) => ToolResult::of(call, content),
        Ok(Err(why)) => ToolResult::failed(call, why),
        Err(_) => ToolResult::failed(call, "the tool broke"),
    };
    calls.iter().map(execute).collect()
}

/// Counts of tool calls in a rollout.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToolUse {
    /// Valid calls by tool.
    pub calls: BTreeMap<String, u64>,
    /// Successful results.
    pub succeeded: u64,
    /// Failed results.
    pub failed: u64,
    /// Malformed calls.
    pub malformed: u64,
}

impl ToolUse {
    /// Counts the calls of a turn.
    pub fn called(&mut self, calls: &[Called]) {
        for called in calls {
            match called {
                Ok(call) => *self.calls.entry(call.name.clone()).or_default() += 1,
                Err(Malformed { .. }) => self.malformed += 1,
            }
        }
    }

    /// Counts results.
    pub fn came(&mut self, results: &[ToolResult]) {
        let succeeded = results.iter().filter(|result| result.success).count() as u64;
        self.succeeded += succeeded;
        self.failed += results.len() as u64 - succeeded;
    }

    /// Returns the number of calls, malformed ones included.
    pub fn count(&self) -> u64 {
        self.calls.values().sum::<u64>() + self.malformed
    }

    /// Returns the counts for `tool_calls` in a sample's metadata. `success_rate` is the share of
    /// successful results among all calls that were tried.
    pub fn to_json(&self) -> Value {
        let tried = self.succeeded + self.failed + self.malformed;
        let rate = if tried == 0 { Value::Null } else { (self.succeeded as f64 / tried as f64).into() };
        json!({ "count": self.count(), "types": self.calls, "malformed": self.malformed, "success_rate": rate })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn results_keep_the_order_of_calls_and_failures_are_results() {
        let executor = |call: &ToolCall| match call.name.as_str() {
            "panic" => panic!("boom"),
            "fail" => Err("no".to_owned()),
            name => Ok(name.to_uppercase()),
        };
        let calls = ["a", "fail", "panic", "b"].map(|name| ToolCall::new(name, Map::new()));
        let called: Vec<Called> = calls.iter().cloned().map(Ok).chain([Err(Malformed::new("what?"))]).collect();
        let results = execute_tools(&calls, &executor, Deadline::within(Duration::from_secs(1)));
        let told: Vec<(&str, bool)> = results.iter().map(|result| (result.content.as_str(), result.success)).collect();
        assert_eq!(told, [("A", true), ("error: no", false), ("error: the tool broke", false), ("B", true)]);
        let mut used = ToolUse::default();
        used.called(&called);
        used.came(&results);
        let tracked = used.to_json();
        assert_eq!((&tracked["count"], &tracked["types"]["a"], &tracked["success_rate"]), (&json!(5), &json!(1), &json!(0.4)));
    }
}
