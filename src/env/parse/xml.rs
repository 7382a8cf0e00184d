//! An element per tool; a tool with one argument is called by `<name>value</name>`.

use serde_json::{Map, Value};

use super::{Called, Malformed, between};
use crate::env::{ToolCall, ToolSpec};

pub fn parse(text: &str, tools: &[ToolSpec]) -> Vec<Called> {
    let mut found: Vec<(usize, Called)> = Vec::new();
    for tool in tools {
        let (open, close) = (format!("<{}>", tool.name), format!("</{}>", tool.name));
        let mut from = 0;
        for inner in between(text, &open, &close) {
            // `between` goes from one opening to the next in the same way.
            let at = text[from..].find(&open).map_or(text.len(), |at| from + at);
            from = (at + open.len() + inner.as_ref().map_or(0, |inner| inner.len())).min(text.len());
            let called = inner.map_err(|malformed| Malformed::of(&tool.name, malformed));
            found.push((at, called.and_then(|inner| arguments(inner, tool)).map(|given| ToolCall::new(&*tool.name, given))));
        }
    }
    found.sort_by_key(|(at, _)| *at);
    found.into_iter().map(|(_, called)| called).collect()
}

fn arguments(inner: &str, tool: &ToolSpec) -> Result<Map<String, Value>, Malformed> {
    let properties: Vec<&String> =
        tool.parameters.get("properties").and_then(Value::as_object).map(|all| all.keys().collect()).unwrap_or_default();
    let trimmed = inner.trim();
    if trimmed.starts_with('{')
        && let Ok(object) = serde_json::from_str(trimmed)
    {
        return Ok(object);
    }
    let mut given = Map::new();
    for key in &properties {
        let (open, close) = (format!("<{key}>"), format!("</{key}>"));
        if let Some(value) = between(inner, &open, &close).into_iter().next() {
            let value = value.map_err(|malformed| Malformed::of(&tool.name, malformed))?;
            given.insert((*key).clone(), value.trim().into());
        }
    }
    match &properties[..] {
        [only] if given.is_empty() => Ok(Map::from_iter([((*only).clone(), trimmed.into())])),
        [] if !trimmed.is_empty() => Err(Malformed::of(&tool.name, "it takes no arguments")),
        _ => Ok(given),
    }
}

pub fn write(call: &ToolCall) -> String {
    let value = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let inner: String = match call.arguments.iter().collect::<Vec<_>>()[..] {
        [(_, only)] => value(only),
        _ => call.arguments.iter().map(|(key, of)| format!("<{key}>{}</{key}>", value(of))).collect(),
    };
    format!("<{0}>{inner}</{0}>", call.name)
}
