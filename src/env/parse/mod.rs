//! Parsers of the tool calls in a model's text. A malformed call becomes an error in the list of
//! calls, which the model reads; no text stops the rollout.

mod elements;
mod json;

use serde_json::json;

use super::schema::check_arguments;
use super::{ToolCall, ToolResult, ToolSpec};
use crate::settings::declare::choices;

type Called = Result<ToolCall, ToolResult>;

/// Malformed call of an unknown tool.
fn malformed(why: impl std::fmt::Display) -> ToolResult {
    ToolResult::malformed("", why)
}

/// Finds calls in a model's text. Closures are parsers, and so is every [`ToolFormat`].
///
/// ```
/// use rollflow::env::{ToolCall, ToolSpec, extract_tool_calls};
///
/// let shouted = |text: &str, _: &[ToolSpec]| {
///     let names = text.split_whitespace().filter_map(|word| word.strip_suffix('!'));
///     names.map(|name| Ok(ToolCall::new(name, Default::default()))).collect()
/// };
/// let calls = extract_tool_calls("now run! and stop!", &shouted, &[]);
/// assert_eq!(calls[1].as_ref().unwrap().name, "stop");
/// ```
pub trait ToolParser: Send + Sync {
    /// Returns the calls in order, or the failed result that the model reads for a malformed call. The
    /// caller checks names and arguments.
    fn parse(&self, text: &str, tools: &[ToolSpec]) -> Vec<Result<ToolCall, ToolResult>>;

    /// Returns the text before the first call of a text with calls. Default: none.
    fn text_before<'a>(&self, _text: &'a str, _tools: &[ToolSpec]) -> &'a str {
        ""
    }
}

impl<F: Fn(&str, &[ToolSpec]) -> Vec<Called> + Send + Sync> ToolParser for F {
    fn parse(&self, text: &str, tools: &[ToolSpec]) -> Vec<Called> {
        self(text, tools)
    }
}

choices! {
    /// Format of tool calls in a completion.
    pub enum ToolFormat {
        /// `<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes, Qwen2.5, Qwen3.
        "hermes" => Hermes,
        /// `<name>…</name>` for every tool, around a JSON object, an element for each argument, or the only argument.
        "xml" => Xml,
        /// `{"name": …, "parameters": {…}}` as the whole turn, several separated by `;`: Llama 3.
        "llama" => Llama,
        /// `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`: Qwen3-Coder.
        "qwen" => Qwen,
        /// `{"function_call": {"name": …, "arguments": …}}`, arguments as JSON or as JSON in a text.
        "function_call" => FunctionCall,
    }
}

impl ToolFormat {
    /// Writes the call in this format.
    pub fn write(self, call: &ToolCall) -> String {
        match self {
            ToolFormat::Hermes => {
                format!("<tool_call>\n{}\n</tool_call>", json!({ "name": call.name, "arguments": call.arguments }))
            }
            ToolFormat::Xml => elements::write_xml(call),
            ToolFormat::Llama => json!({ "name": call.name, "parameters": call.arguments }).to_string(),
            ToolFormat::Qwen => elements::write_qwen(call),
            ToolFormat::FunctionCall => json::write_function_call(call),
        }
    }
}

impl ToolParser for ToolFormat {
    fn parse(&self, text: &str, tools: &[ToolSpec]) -> Vec<Called> {
        match self {
            ToolFormat::Hermes => json::hermes(text),
            ToolFormat::Xml => elements::xml(text, tools),
            ToolFormat::Llama => json::llama(text),
            ToolFormat::Qwen => elements::qwen(text),
            ToolFormat::FunctionCall => json::function_call(text),
        }
    }

    fn text_before<'a>(&self, text: &'a str, tools: &[ToolSpec]) -> &'a str {
        let at = match self {
            ToolFormat::Hermes | ToolFormat::Qwen => text.find("<tool_call>"),
            ToolFormat::Xml => tools.iter().filter_map(|tool| text.find(&format!("<{}>", tool.name))).min(),
            // Calls are the whole turn.
            ToolFormat::Llama => None,
            ToolFormat::FunctionCall => json::function_call_start(text),
        };
        text[..at.unwrap_or(0)].trim_end()
    }
}

/// Returns the calls in a model's text: each with an id, of a known tool and with arguments that fit
/// its schema, or else its failed result. Arguments that a format writes as text are converted by
/// the schema.
pub fn extract_tool_calls(text: &str, parser: &dyn ToolParser, tools: &[ToolSpec]) -> Vec<Result<ToolCall, ToolResult>> {
    let check = |(at, called): (usize, Called)| {
        let mut call = called?;
        if call.id.is_empty() {
            call.id = format!("call_{at}");
        }
        if tools.is_empty() {
            return Ok(call);
        }
        let name = &call.name;
        let Some(tool) = tools.iter().find(|tool| tool.name == *name) else {
            let known: Vec<&str> = tools.iter().map(|tool| tool.name.as_str()).collect();
            return Err(ToolResult::malformed(name, format!("there is no tool {name:?}; there are: {}", known.join(", "))));
        };
        match check_arguments(&mut call.arguments, &tool.parameters) {
            Ok(()) => Ok(call),
            Err(problem) => Err(ToolResult::malformed(name, format!("the arguments of {name} don't fit: {problem}"))),
        }
    };
    parser.parse(text, tools).into_iter().enumerate().map(check).collect()
}

/// Returns the texts between each `open` and the next `close`, or an error if `close` is missing.
fn between<'a>(text: &'a str, open: &str, close: &str) -> Vec<Result<&'a str, ToolResult>> {
    let (mut found, mut rest) = (Vec::new(), text);
    while let Some(at) = rest.find(open) {
        let inner = &rest[at + open.len()..];
        match inner.find(close) {
            Some(end) => {
                found.push(Ok(&inner[..end]));
                rest = &inner[end + close.len()..];
            }
            None => {
                found.push(Err(malformed(format!("a call begins with {open} but does not end with {close}"))));
                break;
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_before_a_call_is_found_in_every_format() {
        let schema = json!({ "type": "object", "properties": { "of": { "type": "string" } } });
        let tools = [ToolSpec::new("look", "", schema)];
        let object = json!({ "of": "x" }).as_object().cloned().unwrap_or_default();
        let call = ToolCall::new("look", object);
        for format in ToolFormat::ALL.iter().copied() {
            let text = format!("I {{look}}.\n{0} {0}", format.write(&call));
            let before = if format == ToolFormat::Llama { "" } else { "I {look}." };
            assert_eq!(format.text_before(&text, &tools), before, "{format:?}");
        }
    }
}
