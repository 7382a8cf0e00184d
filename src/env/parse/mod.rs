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
    use proptest::prelude::*;
    use serde_json::{Map, Value, json};

    use super::*;

    fn tools() -> Vec<ToolSpec> {
        let parameters =
            json!({"type": "object", "properties": {"a": {"type": "string"}, "n": {"type": "integer"}}, "required": ["a"]});
        let one = json!({"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]});
        vec![ToolSpec::new("look", "", parameters), ToolSpec::new("sum", "", one)]
    }

    fn read(format: ToolFormat, text: &str) -> Vec<Called> {
        extract_tool_calls(text, &format, &tools())
    }

    #[test]
    fn every_format_is_read_as_models_write_it() {
        let look = ToolCall { id: "call_0".into(), name: "look".into(), arguments: object(json!({"a": "b c", "n": 3})) };
        let said = [
            (
                ToolFormat::Hermes,
                "I look.\n<tool_call>\n{\"name\": \"look\", \"arguments\": {\"a\": \"b c\", \"n\": 3}}\n</tool_call>",
            ),
            (ToolFormat::Xml, "<look><a>b c</a><n>3</n></look> so"),
            (ToolFormat::Xml, "<look>{\"a\": \"b c\", \"n\": 3}</look>"),
            (ToolFormat::Llama, "<|python_tag|>{\"name\": \"look\", \"parameters\": {\"a\": \"b c\", \"n\": \"3\"}}"),
            (
                ToolFormat::Qwen,
                "<tool_call>\n<function=look>\n<parameter=a>\nb c\n</parameter>\n<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>",
            ),
            (
                ToolFormat::FunctionCall,
                "{\"function_call\": {\"name\": \"look\", \"arguments\": \"{\\\"a\\\": \\\"b c\\\", \\\"n\\\": 3}\"}}",
            ),
        ];
        for (format, text) in said {
            assert_eq!(read(format, text), [Ok(look.clone())], "{format:?}");
        }
        assert_eq!(read(ToolFormat::Xml, "<sum>1+2</sum>")[0].as_ref().unwrap().text("x"), Some("1+2"));
        let two = read(
            ToolFormat::Llama,
            "{\"name\": \"sum\", \"parameters\": {\"x\": \"1;2\"}}; {\"name\": \"look\", \"parameters\": {\"a\": \"\"}}",
        );
        assert_eq!(two.iter().flatten().count(), 2, "{two:?}");
        assert!(ToolFormat::ALL.iter().all(|format| read(*format, "No call < at all, {nothing}.").is_empty()));
    }

    #[test]
    fn the_model_reads_what_is_wrong_with_a_call() {
        use ToolFormat::*;
        for (format, text, problem) in [
            (Hermes, "<tool_call>{\"name\": \"look\"", "</tool_call>"),
            (Hermes, "<tool_call>look</tool_call>", "JSON"),
            (Hermes, "<tool_call>{\"name\": \"fly\", \"arguments\": {}}</tool_call>", "look, sum"),
            (Hermes, "<tool_call>{\"name\": \"look\", \"arguments\": {\"n\": 1}}</tool_call>", "`a`"),
            (Hermes, "<tool_call>{\"name\": \"look\", \"arguments\": {\"a\": 1}}</tool_call>", "string"),
            (Llama, "{\"name\": \"look\", \"parameters\"", "JSON"),
            (Qwen, "<tool_call><function=look><parameter=a>x</function></tool_call>", "</parameter>"),
            (FunctionCall, "{\"function_call\": {\"arguments\": {}}}", "name"),
            (Xml, "<look><a>x</a>", "</look>"),
        ] {
            let failed = read(format, text)[0].clone().unwrap_err();
            assert!(failed.content.starts_with("error: ") && failed.content.contains(problem), "{failed:?}");
        }
    }

    fn object(value: Value) -> Map<String, Value> {
        serde_json::from_value(value).unwrap()
    }

    proptest! {
        #[test]
        fn no_text_makes_a_parser_panic(
            pieces in prop::collection::vec(prop_oneof![
                Just("<tool_call>"), Just("</tool_call>"), Just("<function="), Just(">"), Just("<parameter=a>"), Just("</parameter>"),
                Just("</function>"), Just("<look>"), Just("</look>"), Just("<a>"), Just("</a>"), Just("{\"name\": \"look\", "),
                Just("\"arguments\": {"), Just("\"parameters\": {}"), Just("}"), Just("{\"function_call\": "), Just("é"), Just("\\\""),
                Just("<|python_tag|>"), Just(";"), Just("[[[["), Just("{{{{")], 0..24),
            noise in any::<String>(),
        ) {
            let text = pieces.concat();
            for format in ToolFormat::ALL.iter().copied() {
                read(format, &text);
                read(format, &(text.clone() + &noise));
                read(format, &(noise.clone() + &text));
            }
        }

        #[test]
        fn what_a_format_writes_it_reads(a in "[a-z0-9+*() .,éß\"\\\\;{}]{0,20}", n in any::<i32>()) {
            // Formats without quotes can't tell blanks around a value from its own.
            let a = a.trim().to_owned();
            let call = ToolCall { id: "call_0".into(), name: "look".into(), arguments: object(json!({"a": a, "n": n})) };
            for format in ToolFormat::ALL.iter().copied() {
                prop_assert_eq!(read(format, &format.write(&call)), [Ok(call.clone())], "{:?}", format);
            }
        }
    }
}
