//! Tools, calls and results.

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
    pub fn failed(call: &ToolCall, why: impl std::fmt::Display) -> Self {
        ToolResult { content: format!("error: {why}"), success: false, ..ToolResult::of(call, "") }
    }

    /// Returns the result as a message of the role `tool`.
    pub fn message(&self) -> ChatMessage {
        let message = ChatMessage::new("tool", self.content.clone()).with("name", self.name.clone());
        if self.id.is_empty() { message } else { message.with("tool_call_id", self.id.clone()) }
    }
}
