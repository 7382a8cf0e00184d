//! Formats whose calls are JSON objects: Hermes, Llama 3, `function_call`.

use serde_json::{Deserializer, Map, Value, json};

use super::{Called, between, malformed};
use crate::env::{ToolCall, ToolResult};

const TAG: &str = "<|python_tag|>";
const KEY: &str = "\"function_call\"";

/// Reads `<tool_call>` around each object.
pub fn hermes(text: &str) -> Vec<Called> {
    let read = |text: &str| match serde_json::from_str::<Map<String, Value>>(text.trim()) {
        Ok(object) => call(&object),
        Err(error) => Err(malformed(format!("a call must be a JSON object: {error}"))),
    };
    between(text, "<tool_call>", "</tool_call>").into_iter().map(|inner| read(inner?)).collect()
}

/// Reads objects that are the whole turn.
pub fn llama(text: &str) -> Vec<Called> {
    let text = text.trim();
    let (tagged, mut rest) = text.strip_prefix(TAG).map_or((false, text), |rest| (true, rest.trim_start()));
    // Any other turn is text without calls.
    if !(tagged || rest.starts_with("{\"")) {
        return Vec::new();
    }
    let mut calls = Vec::new();
    while !rest.is_empty() {
        let mut values = Deserializer::from_str(rest).into_iter::<Value>();
        match values.next() {
            Some(Ok(Value::Object(object))) => calls.push(call(&object)),
            Some(Ok(_)) => calls.push(Err(malformed("a call must be a JSON object"))),
            Some(Err(error)) => {
                calls.push(Err(malformed(format!("a call must be a JSON object: {error}"))));
                break;
            }
            None => break,
        }
        rest = rest[values.byte_offset()..].trim_start_matches(|c: char| c == ';' || c.is_whitespace());
        if !rest.starts_with('{') {
            break;
        }
    }
    calls
}

/// Reads `function_call` objects anywhere in a text.
pub fn function_call(text: &str) -> Vec<Called> {
    let (mut calls, mut rest) = (Vec::new(), text);
    while let Some(at) = rest.find(KEY) {
        // The object that the key belongs to begins with the brace before it.
        let Some(brace) = rest[..at].rfind('{') else {
            rest = &rest[at + KEY.len()..];
            continue;
        };
        let mut objects = Deserializer::from_str(&rest[brace..]).into_iter::<Map<String, Value>>();
        match objects.next() {
            Some(Ok(object)) => {
                let inner = object.get("function_call").and_then(Value::as_object);
                calls.push(inner.map_or_else(|| Err(malformed("\"function_call\" must be a JSON object")), call));
                rest = &rest[brace + objects.byte_offset()..];
            }
            Some(Err(error)) => {
                calls.push(Err(malformed(format!("a function_call must be a JSON object: {error}"))));
                rest = &rest[at + KEY.len()..];
            }
            None => break,
        }
    }
    calls
}

/// Returns the start of the first `function_call` object.
pub fn function_call_start(text: &str) -> Option<usize> {
    text.match_indices(KEY).find_map(|(at, _)| text[..at].rfind('{'))
}

/// Reads a call from an object with a `name`, and `arguments` or `parameters`.
fn call(object: &Map<String, Value>) -> Called {
    let Some(name) = object.get("name").and_then(Value::as_str) else {
        return Err(malformed("a call needs a \"name\", which is text"));
    };
    let given = object.get("arguments").or_else(|| object.get("parameters"));
    let arguments = match given {
        None | Some(Value::Null) => Map::new(),
        Some(Value::Object(arguments)) => arguments.clone(),
        Some(Value::String(text)) => serde_json::from_str(text)
            .map_err(|error| ToolResult::malformed(name, format!("its arguments are no JSON object: {error}")))?,
        Some(_) => return Err(ToolResult::malformed(name, "its arguments must be a JSON object")),
    };
    let id = object.get("id").and_then(Value::as_str).unwrap_or_default();
    Ok(ToolCall { id: id.to_owned(), ..ToolCall::new(name, arguments) })
}

/// Writes a call as text with its arguments as text.
pub fn write_function_call(call: &ToolCall) -> String {
    let arguments = Value::Object(call.arguments.clone()).to_string();
    json!({ "function_call": { "name": call.name, "arguments": arguments } }).to_string()
}
