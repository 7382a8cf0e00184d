//! Who runs tools, and what is written down of their use.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::{Called, Deadline, Malformed, ToolCall, ToolResult, ToolSpec};
use crate::data::{Metadata, Sample};

/// Runs tools. Closures from a call to a text, or to what is wrong, are executors; [`Functions`] has one for every name.
pub trait ToolExecutor: Send + Sync {
    /// What the call gives, or why it failed, for the model to read.
    fn execute(&self, call: &ToolCall, deadline: Deadline) -> Result<String, String>;
}

impl<F: Fn(&ToolCall) -> Result<String, String> + Send + Sync> ToolExecutor for F {
    fn execute(&self, call: &ToolCall, _: Deadline) -> Result<String, String> {
        self(call)
    }
}

type Function = Arc<dyn Fn(&Map<String, Value>) -> Result<String, String> + Send + Sync>;

/// Functions by name.
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
    /// One more.
    pub fn function(
        mut self,
        tool: ToolSpec,
        function: impl Fn(&Map<String, Value>) -> Result<String, String> + Send + Sync + 'static,
    ) -> Self {
        self.functions.insert(tool.name.clone(), Arc::new(function));
        self.tools.push(tool);
        self
    }

    /// What they are called and take.
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

/// Runs calls one after the other. Each has a result, in their order: an error of the executor, a panic included, is a failed one.
pub fn execute_tools(calls: &[ToolCall], executor: &dyn ToolExecutor, deadline: Deadline) -> Vec<ToolResult> {
    let execute = |call: &ToolCall| match catch_unwind(AssertUnwindSafe(|| executor.execute(call, deadline))) {
        Ok(Ok(content)) => ToolResult::of(call, content),
        Ok(Err(why)) => ToolResult::failed(call, why),
        Err(_) => ToolResult::failed(call, "the tool broke"),
    };
    calls.iter().map(execute).collect()
}

/// How tools were used.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToolUse {
    /// Calls of each tool that were made.
    pub calls: BTreeMap<String, u64>,
    /// Results that were a success, and those that were not.
    pub succeeded: u64,
    /// Results that were none.
    pub failed: u64,
    /// Calls that could not be made.
    pub malformed: u64,
}

impl ToolUse {
    /// One more turn's calls.
    pub fn called(&mut self, calls: &[Called]) {
        for called in calls {
            match called {
                Ok(call) => *self.calls.entry(call.name.clone()).or_default() += 1,
                Err(Malformed { .. }) => self.malformed += 1,
            }
        }
    }

    /// What came of some.
    pub fn came(&mut self, results: &[ToolResult]) {
        let succeeded = results.iter().filter(|result| result.success).count() as u64;
        self.succeeded += succeeded;
        self.failed += results.len() as u64 - succeeded;
    }

    /// Calls, those that could not be made included.
    pub fn count(&self) -> u64 {
        self.calls.values().sum::<u64>() + self.malformed
    }

    /// As a sample's metadata has it under `tool_calls`: the number, that of each tool, how many were malformed, and which share of all
    /// that were tried succeeded.
    pub fn to_json(&self) -> Value {
        let tried = self.succeeded + self.failed + self.malformed;
        let rate = if tried == 0 { Value::Null } else { (self.succeeded as f64 / tried as f64).into() };
        json!({ "count": self.count(), "types": self.calls, "malformed": self.malformed, "success_rate": rate })
    }
}

/// What is made of a turn's calls for a sample's metadata. Closures are trackers.
pub trait ToolTracker {
    /// Fields to be written, over those of the same name.
    fn track(&self, calls: &[Called], results: &[ToolResult]) -> Metadata;
}

impl<F: Fn(&[Called], &[ToolResult]) -> Metadata> ToolTracker for F {
    fn track(&self, calls: &[Called], results: &[ToolResult]) -> Metadata {
        self(calls, results)
    }
}

/// The usual tracker: `tool_calls`, as [`ToolUse::to_json`] has it.
pub fn count_tools(calls: &[Called], results: &[ToolResult]) -> Metadata {
    let mut used = ToolUse::default();
    used.called(calls);
    used.came(results);
    Metadata::from_iter([("tool_calls".to_owned(), used.to_json())])
}

/// Writes into a sample's metadata what a tracker makes of its calls.
///
/// ```
/// use rollflow::data::{Metadata, Sample};
/// use rollflow::env::{Called, ToolFormat, ToolResult, count_tools, extract_tool_calls, track_tool_calls};
///
/// let said = "<tool_call>{\"name\": \"look\"}</tool_call><tool_call>{look}</tool_call>";
/// let calls = extract_tool_calls(said, &ToolFormat::Hermes, &[]);
/// let mut sample = Sample::default();
/// track_tool_calls(&mut sample, &calls, &count_tools);
/// assert_eq!(sample.metadata["tool_calls"]["malformed"], 1);
///
/// let names = |calls: &[Called], _: &[ToolResult]| Metadata::from_iter([("first".into(), calls[0].as_ref().unwrap().name.clone().into())]);
/// track_tool_calls(&mut sample, &calls, &names);
/// assert_eq!(sample.metadata["first"], "look");
/// ```
pub fn track_tool_calls(sample: &mut Sample, calls: &[Called], tracker: &dyn ToolTracker) {
    sample.metadata.extend(tracker.track(calls, &[]));
}

/// Runs the calls that can be made, writes their results into the sample's metadata (`tool_results`) together with what a tracker makes of
/// them, and gives them.
pub fn execute_and_track_tools(
    sample: &mut Sample,
    calls: &[Called],
    executor: &dyn ToolExecutor,
    tracker: &dyn ToolTracker,
    deadline: Deadline,
) -> Vec<ToolResult> {
    let valid: Vec<ToolCall> = calls.iter().flatten().cloned().collect();
    let results = execute_tools(&valid, executor, deadline);
    sample.metadata.extend(tracker.track(calls, &results));
    sample.metadata.insert("tool_results".to_owned(), json!(results));
    results
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
        let mut sample = Sample::default();
        let called: Vec<Called> = calls.into_iter().map(Ok).chain([Err(Malformed::new("what?"))]).collect();
        let deadline = Deadline::within(Duration::from_secs(1));
        let results = execute_and_track_tools(&mut sample, &called, &executor, &count_tools, deadline);
        let told: Vec<(&str, bool)> = results.iter().map(|result| (result.content.as_str(), result.success)).collect();
        assert_eq!(told, [("A", true), ("error: no", false), ("error: the tool broke", false), ("B", true)]);
        let tracked = &sample.metadata["tool_calls"];
        assert_eq!((&tracked["count"], &tracked["types"]["a"], &tracked["success_rate"]), (&json!(5), &json!(1), &json!(0.4)));
    }
}
