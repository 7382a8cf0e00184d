//! Format of Qwen3-Coder: `<function=name>` and `<parameter=key>` elements. Values are text, which
//! the schema converts.

use serde_json::{Map, Value};

use super::{Called, Malformed, between};
use crate::env::ToolCall;

pub fn parse(text: &str) -> Vec<Called> {
    between(text, "<tool_call>", "</tool_call>").into_iter().map(|inner| function(inner?)).collect()
}

fn function(text: &str) -> Called {
    let body = between(text, "<function=", "</function>").into_iter().next();
    let Some((name, body)) = body.transpose()?.and_then(|body| body.split_once('>')) else {
        return Err(Malformed::new("a call needs <function=name>…</function>"));
    };
    let mut arguments = Map::new();
    for parameter in between(body, "<parameter=", "</parameter>") {
        let parameter = parameter.map_err(|malformed| Malformed::of(name, malformed))?;
        let Some((key, value)) = parameter.split_once('>') else {
            return Err(Malformed::of(name, "a parameter needs <parameter=name>value</parameter>"));
        };
        arguments.insert(key.trim().to_owned(), value.trim_matches('\n').into());
    }
    Ok(ToolCall::new(name.trim(), arguments))
}

pub fn write(call: &ToolCall) -> String {
    let value = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let parameter = |(key, of): (&String, &Value)| format!("<parameter={key}>\n{}\n</parameter>\n", value(of));
    let parameters: String = call.arguments.iter().map(parameter).collect();
    format!("<tool_call>\n<function={}>\n{parameters}</function>\n</tool_call>", call.name)
}
