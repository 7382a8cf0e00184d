//! Format of Hermes: `<tool_call>` around a JSON object.

use serde_json::json;

use super::json::call_in;
use super::{Called, between};
use crate::env::ToolCall;

pub fn parse(text: &str) -> Vec<Called> {
    between(text, "<tool_call>", "</tool_call>").into_iter().map(|inner| call_in(inner?)).collect()
}

pub fn write(call: &ToolCall) -> String {
    format!("<tool_call>\n{}\n</tool_call>", json!({ "name": call.name, "arguments": call.arguments }))
}
