//! Formats whose calls are elements with text values, which the schema converts: Qwen3-Coder, XML.

use serde_json::{Map, Value};

use super::{Called, between, malformed};
use crate::env::{ToolCall, ToolResult, ToolSpec};

/// Reads `<function=name>` with `<parameter=key>` elements.
pub fn qwen(text: &str) -> Vec<Called> {
    between(text, "<tool_call>", "</tool_call>").into_iter().map(|inner| function(inner?)).collect()
}

fn function(text: &str) -> Called {
    let body = between(text, "<function=", "</function>").into_iter().next();
    let Some((name, body)) = body.transpose()?.and_then(|body| body.split_once('>')) else {
        return Err(malformed("a call needs <function=name>…</function>"));
    };
    let of_tool = |failed: ToolResult| ToolResult { name: name.to_owned(), ..failed };
    let mut arguments = Map::new();
    for parameter in between(body, "<parameter=", "</parameter>") {
        let (key, value) = parameter
            .and_then(|text| text.split_once('>').ok_or_else(|| malformed("a parameter needs <parameter=name>value</parameter>")))
            .map_err(of_tool)?;
        // One newline at each end belongs to the format.
        let value = value.strip_prefix('\n').unwrap_or(value);
        let value = value.strip_suffix('\n').unwrap_or(value);
        arguments.insert(key.trim().to_owned(), value.into());
    }
    Ok(ToolCall::new(name.trim(), arguments))
}

pub fn write_qwen(call: &ToolCall) -> String {
    let parameter = |(key, of): (&String, &Value)| format!("<parameter={key}>\n{}\n</parameter>\n", plain(of));
    let parameters: String = call.arguments.iter().map(parameter).collect();
    format!("<tool_call>\n<function={}>\n{parameters}</function>\n</tool_call>", call.name)
}

/// Reads an element per tool; a tool with one argument is called by `<name>value</name>`.
pub fn xml(text: &str, tools: &[ToolSpec]) -> Vec<Called> {
    let mut found: Vec<(usize, Called)> = Vec::new();
    for tool in tools {
        let (open, close) = (format!("<{}>", tool.name), format!("</{}>", tool.name));
        let mut from = 0;
        for inner in between(text, &open, &close) {
            // `between` goes from one opening to the next in the same way.
            let at = text[from..].find(&open).map_or(text.len(), |at| from + at);
            from = (at + open.len() + inner.as_ref().map_or(0, |inner| inner.len())).min(text.len());
            let called = inner.and_then(|inner| arguments(inner, tool)).map(|given| ToolCall::new(&*tool.name, given));
            found.push((at, called.map_err(|failed| ToolResult { name: tool.name.clone(), ..failed })));
        }
    }
    found.sort_by_key(|(at, _)| *at);
    found.into_iter().map(|(_, called)| called).collect()
}

fn arguments(inner: &str, tool: &ToolSpec) -> Result<Map<String, Value>, ToolResult> {
    let properties = tool.parameters.get("properties").and_then(Value::as_object);
    let properties: Vec<&String> = properties.map(|all| all.keys().collect()).unwrap_or_default();
    let trimmed = inner.trim();
    if trimmed.starts_with('{')
        && let Ok(object) = serde_json::from_str(trimmed)
    {
        return Ok(object);
    }
    let mut given = Map::new();
    for key in &properties {
        if let Some(value) = between(inner, &format!("<{key}>"), &format!("</{key}>")).into_iter().next() {
            given.insert((*key).clone(), value?.trim().into());
        }
    }
    match &properties[..] {
        [only] if given.is_empty() => Ok(Map::from_iter([((*only).clone(), trimmed.into())])),
        [] if !trimmed.is_empty() => Err(malformed("it takes no arguments")),
        _ => Ok(given),
    }
}

pub fn write_xml(call: &ToolCall) -> String {
    let inner: String = match call.arguments.iter().collect::<Vec<_>>()[..] {
        [(_, only)] => plain(only),
        _ => call.arguments.iter().map(|(key, of)| format!("<{key}>{}</{key}>", plain(of))).collect(),
    };
    format!("<{0}>{inner}</{0}>", call.name)
}

/// Returns text without quotes.
fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}
