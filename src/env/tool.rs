//! Tools, calls and results.

use std::collections::BTreeMap;
use std::fmt::Display;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::data::ChatMessage;

/// Description of a tool for a model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ToolSpec {
    /// Name.
    pub name: String,
    /// Purpose, for the model.
    #[serde(default)]
    pub description: String,
    /// JSON schema of the arguments, which are an object.
    #[serde(default = "anything")]
    pub parameters: Value,
}

fn anything() -> Value {
    json!({ "type": "object" })
}

impl ToolSpec {
    /// Describes a tool with a JSON schema of its arguments.
    pub fn new(name: impl Into<String>, description: impl Into<String>, parameters: Value) -> Self {
        ToolSpec { name: name.into(), description: description.into(), parameters }
    }

    /// Returns the description in the form of chat templates and model servers.
    pub fn to_json(&self) -> Value {
        json!({ "type": "function", "function": { "name": self.name, "description": self.description, "parameters": self.parameters } })
    }
}

/// Call of a tool.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ToolCall {
    /// Id that its result refers to; unique within a turn.
    #[serde(default)]
    pub id: String,
    /// Name of the tool.
    pub name: String,
    /// Arguments.
    #[serde(default)]
    pub arguments: Map<String, Value>,
}

impl ToolCall {
    /// Creates a call without an id.
    pub fn new(name: impl Into<String>, arguments: Map<String, Value>) -> Self {
        ToolCall { id: String::new(), name: name.into(), arguments }
    }

    /// Returns an argument that is text.
    pub fn text(&self, argument: &str) -> Option<&str> {
        self.arguments.get(argument).and_then(Value::as_str)
    }
}

/// Result of a call.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ToolResult {
    /// Id of the call.
    pub id: String,
    /// Name of the tool.
    pub name: String,
    /// Text for the model.
    pub content: String,
    /// If true, the call succeeded.
    pub success: bool,
}

impl ToolResult {
    /// Result of a successful call.
    pub fn of(call: &ToolCall, content: impl Into<String>) -> Self {
        ToolResult { id: call.id.clone(), name: call.name.clone(), content: content.into(), success: true }
    }

    /// Result of a failed call, with the cause for the model.
    pub fn failed(call: &ToolCall, why: impl Display) -> Self {
        ToolResult { id: call.id.clone(), ..ToolResult::malformed(&call.name, why) }
    }

    /// Result of a malformed call of this tool, with the defect for the model. The name is empty if
    /// unknown.
    pub fn malformed(name: &str, why: impl Display) -> Self {
        ToolResult { name: name.to_owned(), content: format!("error: {why}"), ..ToolResult::default() }
    }

    /// Returns the result as a message of the role `tool`.
    pub fn message(&self) -> ChatMessage {
        let message = ChatMessage::new("tool", self.content.clone()).with("name", self.name.clone());
        if self.id.is_empty() { message } else { message.with("tool_call_id", self.id.clone()) }
    }
}

/// Counts of tool calls in a rollout.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ToolUse {
    /// Valid calls by tool.
    calls: BTreeMap<String, u64>,
    /// Results.
    pub(crate) succeeded: u64,
    pub(crate) failed: u64,
    pub(crate) malformed: u64,
}

impl ToolUse {
    /// Counts the calls of a turn.
    pub(crate) fn called(&mut self, calls: &[Result<ToolCall, ToolResult>]) {
        for called in calls {
            match called {
                Ok(call) => *self.calls.entry(call.name.clone()).or_default() += 1,
                Err(_) => self.malformed += 1,
            }
        }
    }

    /// Counts results.
    pub(crate) fn came(&mut self, results: &[ToolResult]) {
        let succeeded = results.iter().filter(|result| result.success).count() as u64;
        self.succeeded += succeeded;
        self.failed += results.len() as u64 - succeeded;
    }

    /// Returns the number of calls, malformed ones included.
    pub(crate) fn count(&self) -> u64 {
        self.calls.values().sum::<u64>() + self.malformed
    }

    /// Returns the counts for `tool_calls` in a sample's metadata. `success_rate` is the share of
    /// successful results among all calls that were tried.
    pub(crate) fn to_json(&self) -> Value {
        let tried = self.succeeded + self.failed + self.malformed;
        let rate = if tried == 0 { Value::Null } else { (self.succeeded as f64 / tried as f64).into() };
        json!({ "count": self.count(), "types": self.calls, "malformed": self.malformed, "success_rate": rate })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn malformed_calls_and_failed_results_count_as_tried() {
        let mut used = ToolUse::default();
        let call = |name| ToolCall::new(name, Map::new());
        used.called(&[Ok(call("a")), Ok(call("b")), Err(ToolResult::malformed("", "what?"))]);
        used.came(&[ToolResult::of(&call("a"), ""), ToolResult::failed(&call("b"), "no")]);
        let counts = json!({ "count": 3, "types": { "a": 1, "b": 1 }, "malformed": 1, "success_rate": 1.0 / 3.0 });
        assert_eq!(used.to_json(), counts);
    }
}
