//! Parsers of the tool calls in a model's text. A malformed call becomes an error in the list of
//! calls, which the model reads; no text stops the rollout.

mod function_call;
mod json;
mod llama;
mod qwen;
mod tagged;
mod xml;

use crate::settings::declare::choices;
use serde::{Deserialize, Serialize};

use super::{ToolCall, ToolSpec, check_arguments};

/// A call, or the defect of a malformed one.
pub type Called = Result<ToolCall, Malformed>;

/// A malformed call. The model reads the problem as the result of the call.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{problem}")]
pub struct Malformed {
    /// Name of the tool; empty if unknown.
    pub name: String,
    /// Defect, for the model.
    pub problem: String,
}

impl Malformed {
    /// Malformed call of an unknown tool.
    pub fn new(problem: impl std::fmt::Display) -> Self {
        Malformed { name: String::new(), problem: problem.to_string() }
    }

    /// Malformed call of this tool.
    pub fn of(name: &str, problem: impl std::fmt::Display) -> Self {
        Malformed { name: name.to_owned(), problem: problem.to_string() }
    }
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
    /// Returns the calls in order. The caller checks names and arguments.
    fn parse(&self, text: &str, tools: &[ToolSpec]) -> Vec<Called>;
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
            ToolFormat::Hermes => tagged::write(call),
            ToolFormat::Xml => xml::write(call),
            ToolFormat::Llama => llama::write(call),
            ToolFormat::Qwen => qwen::write(call),
            ToolFormat::FunctionCall => function_call::write(call),
        }
    }
}

impl ToolParser for ToolFormat {
    fn parse(&self, text: &str, tools: &[ToolSpec]) -> Vec<Called> {
        match self {
            ToolFormat::Hermes => tagged::parse(text),
            ToolFormat::Xml => xml::parse(text, tools),
            ToolFormat::Llama => llama::parse(text),
            ToolFormat::Qwen => qwen::parse(text),
            ToolFormat::FunctionCall => function_call::parse(text),
        }
    }
}

/// Returns the calls in a model's text: each with an id, of a known tool and with arguments that fit
/// its schema, or its defect. Arguments that a format writes as text are converted by the schema.
pub fn extract_tool_calls(text: &str, parser: &dyn ToolParser, tools: &[ToolSpec]) -> Vec<Called> {
    let check = |(at, called): (usize, Called)| {
        let mut call = called?;
        if call.id.is_empty() {
            call.id = format!("call_{at}");
        }
        if tools.is_empty() {
            return Ok(call);
        }
        let Some(tool) = tools.iter().find(|tool| tool.name == call.name) else {
            let known: Vec<&str> = tools.iter().map(|tool| tool.name.as_str()).collect();
            return Err(Malformed::of(&call.name, format!("there is no tool {:?}; there are: {}", call.name, known.join(", "))));
        };
        match check_arguments(&mut call.arguments, &tool.parameters) {
            Ok(()) => Ok(call),
            Err(problem) => Err(Malformed::of(&call.name, format!("the arguments of {} don't fit: {problem}", call.name))),
        }
    };
    parser.parse(text, tools).into_iter().enumerate().map(check).collect()
}

/// Returns the texts between each `open` and the next `close`, or an error if `close` is missing.
fn between<'a>(text: &'a str, open: &str, close: &str) -> Vec<Result<&'a str, Malformed>> {
    let (mut found, mut rest) = (Vec::new(), text);
    while let Some(at) = rest.find(open) {
        let inner = &rest[at + open.len()..];
        match inner.find(close) {
            Some(end) => {
                found.push(Ok(&inner[..end]));
                rest = &inner[end + close.len()..];
            }
            None => {
                found.push(Err(Malformed::new(format!("a call begins with {open} but does not end with {close}"))));
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
    fn what_is_wrong_with_a_call_is_said_to_the_model() {
        let problem = |format, text| read(format, text)[0].clone().unwrap_err().problem;
        assert!(problem(ToolFormat::Hermes, "<tool_call>{\"name\": \"look\"").contains("</tool_call>"));
        assert!(problem(ToolFormat::Hermes, "<tool_call>look</tool_call>").contains("JSON"));
        assert!(
            problem(ToolFormat::Hermes, "<tool_call>{\"name\": \"fly\", \"arguments\": {}}</tool_call>").contains("look, sum")
        );
        assert!(
            problem(ToolFormat::Hermes, "<tool_call>{\"name\": \"look\", \"arguments\": {\"n\": 1}}</tool_call>").contains("`a`")
        );
        assert!(
            problem(ToolFormat::Hermes, "<tool_call>{\"name\": \"look\", \"arguments\": {\"a\": 1}}</tool_call>")
                .contains("string")
        );
        assert!(problem(ToolFormat::Llama, "{\"name\": \"look\", \"parameters\"").contains("JSON"));
        assert!(
            problem(ToolFormat::Qwen, "<tool_call><function=look><parameter=a>x</function></tool_call>").contains("</parameter>")
        );
        assert!(problem(ToolFormat::FunctionCall, "{\"function_call\": {\"arguments\": {}}}").contains("name"));
        assert!(problem(ToolFormat::Xml, "<look><a>x</a>").contains("</look>"));
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
