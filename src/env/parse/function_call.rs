//! `function_call` objects anywhere in a text.

use serde_json::{Deserializer, Map, Value, json};

use super::json::call;
use super::{Called, Malformed};
use crate::env::ToolCall;

const KEY: &str = "\"function_call\"";

pub fn parse(text: &str) -> Vec<Called> {
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
                calls.push(inner.map_or_else(|| Err(Malformed::new("\"function_call\" must be a JSON object")), call));
                rest = &rest[brace + objects.byte_offset()..];
            }
            Some(Err(error)) => {
                calls.push(Err(Malformed::new(format!("a function_call must be a JSON object: {error}"))));
                rest = &rest[at + KEY.len()..];
            }
            None => break,
        }
    }
    calls
}

pub fn write(call: &ToolCall) -> String {
    let arguments = Value::Object(call.arguments.clone()).to_string();
    json!({ "function_call": { "name": call.name, "arguments": arguments } }).to_string()
}
