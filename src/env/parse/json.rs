//! Reading of calls that are JSON objects.

use serde_json::{Map, Value};

use super::{Called, Malformed};
use crate::env::ToolCall;

/// Reads a call from an object with a `name`, and `arguments` or `parameters`.
pub fn call(object: &Map<String, Value>) -> Called {
    let Some(name) = object.get("name").and_then(Value::as_str) else {
        return Err(Malformed::new("a call needs a \"name\", which is text"));
    };
    let given = object.get("arguments").or_else(|| object.get("parameters"));
    let arguments = match given {
        None | Some(Value::Null) => Map::new(),
        Some(Value::Object(arguments)) => arguments.clone(),
        Some(Value::String(text)) => match serde_json::from_str(text) {
            Ok(arguments) => arguments,
            Err(error) => return Err(Malformed::of(name, format!("its arguments are no JSON object: {error}"))),
        },
        Some(_) => return Err(Malformed::of(name, "its arguments must be a JSON object")),
    };
    let id = object.get("id").and_then(Value::as_str).unwrap_or_default();
    Ok(ToolCall { id: id.to_owned(), ..ToolCall::new(name, arguments) })
}

/// Reads a call from a text that is such an object.
pub fn call_in(text: &str) -> Called {
    match serde_json::from_str::<Map<String, Value>>(text.trim()) {
        Ok(object) => call(&object),
        Err(error) => Err(Malformed::new(format!("a call must be a JSON object: {error}"))),
    }
}
