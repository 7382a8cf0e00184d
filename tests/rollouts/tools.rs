//! Tool calls in every format, and the functions that run them.

use std::time::Instant;

use proptest::prelude::*;
use rollflow::env::{ToolCall, ToolFormat, ToolResult, ToolSpec, Toolbox, execute_tools, extract_tool_calls};
use serde_json::{Map, Value, json};

fn tools() -> Vec<ToolSpec> {
    let parameters =
        json!({"type": "object", "properties": {"a": {"type": "string"}, "n": {"type": "integer"}}, "required": ["a"]});
    let one = json!({"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]});
    vec![ToolSpec::new("look", "", parameters), ToolSpec::new("sum", "", one)]
}

fn read(format: ToolFormat, text: &str) -> Vec<Result<ToolCall, ToolResult>> {
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
    fn what_a_format_writes_it_reads(a in "\n{0,2}[a-z0-9+*() .,éß\"\\\\;{}\n]{0,20}\n{0,2}", n in any::<i32>()) {
        for format in ToolFormat::ALL.iter().copied() {
            // XML drops blanks around a value.
            let a = if format == ToolFormat::Xml { a.trim() } else { a.as_str() };
            let call = ToolCall { id: "call_0".into(), name: "look".into(), arguments: object(json!({"a": a, "n": n})) };
            prop_assert_eq!(read(format, &format.write(&call)), [Ok(call.clone())], "{:?}", format);
        }
    }
}

#[test]
fn results_keep_the_order_of_calls_and_failures_are_results() {
    let executor = |call: &ToolCall, _: Instant| match call.name.as_str() {
        "panic" => panic!("boom"),
        "fail" => Err("no".to_owned()),
        name => Ok(name.to_uppercase()),
    };
    let calls = ["a", "fail", "panic", "b"].map(|name| ToolCall::new(name, Map::new()));
    let results = execute_tools(&calls, &executor, Instant::now());
    let told: Vec<(&str, bool)> = results.iter().map(|result| (result.content.as_str(), result.success)).collect();
    assert_eq!(told, [("A", true), ("error: no", false), ("error: the tool broke", false), ("B", true)]);
}

#[test]
fn an_executor_without_listed_tools_runs_calls_of_any_name() {
    let (call, now) = (ToolCall::new("look", Map::new()), Instant::now());
    let tools = Toolbox::new(Vec::new(), |call: &ToolCall, _: Instant| Ok(call.name.to_uppercase()));
    assert_eq!(tools.execute(&call, now), Ok("LOOK".to_owned()));
    assert_eq!(Toolbox::default().execute(&call, now), Err("there is no tool \"look\"".to_owned()));
}
