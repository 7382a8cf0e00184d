//! Tools, calls of them, and what they give.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::data::ChatMessage;

/// A tool as a model is told of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ToolSpec {
    /// What calls name it.
    pub name: String,
    /// What it does, for the model.
    #[serde(default)]
    pub description: String,
    /// A JSON schema of its arguments, which are an object.
    #[serde(default = "anything")]
    pub parameters: Value,
}

fn anything() -> Value {
    json!({ "type": "object" })
}

impl ToolSpec {
    /// A tool with a JSON schema of its arguments.
    pub fn new(name: impl Into<String>, description: impl Into<String>, parameters: Value) -> Self {
        ToolSpec { name: name.into(), description: description.into(), parameters }
    }

    /// As chat templates and model servers take it.
    pub fn to_json(&self) -> Value {
        json!({ "type": "function", "function": { "name": self.name, "description": self.description, "parameters": self.parameters } })
    }
}

/// A call of a tool.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ToolCall {
    /// What its result refers to; unique within a turn.
    #[serde(default)]
    pub id: String,
    /// The tool.
    pub name: String,
    /// What it is called with.
    #[serde(default)]
    pub arguments: Map<String, Value>,
}

impl ToolCall {
    /// A call without an id.
    pub fn new(name: impl Into<String>, arguments: Map<String, Value>) -> Self {
        ToolCall { id: String::new(), name: name.into(), arguments }
    }

    /// An argument that is text.
    pub fn text(&self, argument: &str) -> Option<&str> {
        self.arguments.get(argument).and_then(Value::as_str)
    }
}

/// What a call gave.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ToolResult {
    /// The call's id.
    pub id: String,
    /// The tool.
    pub name: String,
    /// What the model reads.
    pub content: String,
    /// Whether the call did what it should.
    pub success: bool,
}

impl ToolResult {
    /// The call gave this.
    pub fn of(call: &ToolCall, content: impl Into<String>) -> Self {
        ToolResult { id: call.id.clone(), name: call.name.clone(), content: content.into(), success: true }
    }

    /// The call failed; the model reads why.
    pub fn failed(call: &ToolCall, why: impl std::fmt::Display) -> Self {
        ToolResult { content: format!("error: {why}"), success: false, ..ToolResult::of(call, "") }
    }

    /// As a message of the role `tool`.
    pub fn message(&self) -> ChatMessage {
        let message = ChatMessage::new("tool", self.content.clone()).with("name", self.name.clone());
        if self.id.is_empty() { message } else { message.with("tool_call_id", self.id.clone()) }
    }
}
