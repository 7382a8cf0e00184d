//! Format of Llama 3: bare JSON objects that are the whole turn.

use serde_json::{Deserializer, Value, json};

use super::json::call;
use super::{Called, Malformed};
use crate::env::ToolCall;

const TAG: &str = "<|python_tag|>";

pub fn parse(text: &str) -> Vec<Called> {
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
            Some(Ok(_)) => calls.push(Err(Malformed::new("a call must be a JSON object"))),
            Some(Err(error)) => {
                calls.push(Err(Malformed::new(format!("a call must be a JSON object: {error}"))));
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

pub fn write(call: &ToolCall) -> String {
    json!({ "name": call.name, "parameters": call.arguments }).to_string()
}
