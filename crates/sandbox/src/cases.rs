//! Tests of a programming task.

use serde_json::{Value, json};

use super::SandboxError;

/// Tests of one task.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum CodeTests {
    /// Python programs that fail if the code is wrong, such as an `assert`, each as text. Or calls of a
    /// function, or of that method of a class `Solution`, each as a list of its name, the arguments and
    /// the expected result; tuples equal lists.
    Judged(Vec<Value>),
    /// Standard input of the program, and the expected output.
    Pairs(Vec<(String, String)>),
}

impl CodeTests {
    /// Reads the value of a data set, or a text with such a value as JSON.
    pub fn from_json(value: &Value) -> Result<Self, SandboxError> {
        let tests = CodeTests::read(value).filter(|tests| tests.len() > 0);
        tests.ok_or_else(|| SandboxError::NoTests(value.to_string().chars().take(200).collect()))
    }

    fn read(value: &Value) -> Option<Self> {
        Some(match value {
            Value::String(text) => match serde_json::from_str(text) {
                Ok(inner @ (Value::Array(_) | Value::Object(_))) => return CodeTests::read(&inner),
                _ => CodeTests::Judged(vec![value.clone()]),
            },
            Value::Array(items) if items.iter().all(Value::is_string) => CodeTests::Judged(items.clone()),
            Value::Array(items) => {
                let pair = |item: &Value| Some((text(item.get("input")?), text(item.get("output")?)));
                CodeTests::Pairs(items.iter().map(pair).collect::<Option<_>>()?)
            }
            Value::Object(fields) => {
                let (inputs, outputs) = (fields.get("inputs")?.as_array()?, fields.get("outputs")?.as_array()?);
                if inputs.len() != outputs.len() {
                    return None;
                }
                let tests = inputs.iter().zip(outputs);
                match fields.get("fn_name").filter(|name| !name.is_null()) {
                    Some(function) => {
                        let function = function.as_str()?;
                        let call = |(input, output): (&Value, &Value)| Some(json!([function, input.as_array()?, output]));
                        CodeTests::Judged(tests.map(call).collect::<Option<_>>()?)
                    }
                    None => CodeTests::Pairs(tests.map(|(input, output)| (text(input), text(output))).collect()),
                }
            }
            _ => return None,
        })
    }

    /// Returns the number of tests.
    #[expect(clippy::len_without_is_empty, reason = "no reader returns an empty one")]
    pub fn len(&self) -> usize {
        match self {
            CodeTests::Judged(tests) => tests.len(),
            CodeTests::Pairs(tests) => tests.len(),
        }
    }
}

/// Returns a text unchanged, a list as lines, and any other value as JSON.
fn text(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Array(lines) => lines.iter().map(text).collect::<Vec<_>>().join("\n"),
        other => other.to_string(),
    }
}

/// Extracts the code of a completion: its last fenced block that is marked as Python or not marked,
/// or else the whole text.
pub fn extract_code(answer: &str) -> &str {
    let mut found = None;
    let mut open: Option<(usize, bool)> = None;
    let mut at = 0;
    for line in answer.split_inclusive('\n') {
        let fence = line.trim().strip_prefix("```");
        match (fence, open) {
            (Some(mark), None) => {
                let python = ["", "py", "python", "python3"].contains(&mark.trim().to_ascii_lowercase().as_str());
                open = Some((at + line.len(), python));
            }
            (Some(""), Some((from, python))) => {
                found = if python { Some(&answer[from..at]) } else { found };
                open = None;
            }
            _ => {}
        }
        at += line.len();
    }
    // A truncated block ends with the text.
    match open {
        Some((from, true)) if from <= answer.len() => &answer[from..],
        _ => found.unwrap_or(answer),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_are_read_in_every_usual_spelling_and_nothing_else() {
        let asserts = |tests: &[&str]| CodeTests::Judged(tests.iter().map(|&test| test.into()).collect());
        let pairs = |tests: &[(&str, &str)]| CodeTests::Pairs(tests.iter().map(|&(a, b)| (a.to_owned(), b.to_owned())).collect());
        for (value, tests) in [
            (json!("assert f(1) == 2\nassert f(2) == 3"), asserts(&["assert f(1) == 2\nassert f(2) == 3"])),
            (json!(["assert f(1) == 2", "assert True"]), asserts(&["assert f(1) == 2", "assert True"])),
            (json!("[\"assert f(1) == 2\"]"), asserts(&["assert f(1) == 2"])),
            (json!([{ "input": "1 2\n", "output": "3" }]), pairs(&[("1 2\n", "3")])),
            (
                json!({ "fn_name": "f", "inputs": [[1, [2]], [3]], "outputs": [4, [5]] }),
                CodeTests::Judged(vec![json!(["f", [1, [2]], 4]), json!(["f", [3], [5]])]),
            ),
            (json!({ "inputs": ["1", ["2", "3"]], "outputs": [4, "5"] }), pairs(&[("1", "4"), ("2\n3", "5")])),
        ] {
            assert_eq!(CodeTests::from_json(&value).unwrap(), tests);
        }
        for value in [
            json!(null),
            json!([]),
            json!(3),
            json!([1]),
            json!({ "fn_name": "f", "inputs": ["1"], "outputs": [1] }),
            json!({ "inputs": ["1"], "outputs": [] }),
            json!([{ "input": "1" }]),
        ] {
            assert!(CodeTests::from_json(&value).is_err(), "{value}");
        }
    }

    #[test]
    fn code_is_the_last_block_of_python_or_all_there_is() {
        for (answer, code) in [
            ("x + 1", "x + 1"),
            ("First:\n```python\na = 1\n```\nbetter:\n```py\na = 2\n```\nrun it:\n```sh\npython a.py\n```\n", "a = 2\n"),
            ("```\nplain\n```", "plain\n"),
            ("```python\ncut = 1\noff", "cut = 1\noff"),
            ("```python", ""),
            ("", ""),
        ] {
            assert_eq!(extract_code(answer), code, "{answer:?}");
        }
    }
}
