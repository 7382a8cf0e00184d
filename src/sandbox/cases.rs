//! Tests of a programming task.

use serde_json::Value;

use super::SandboxError;

/// Tests of one task, in the usual forms of data sets.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum CodeTests {
    /// Python programs that fail if the code is wrong, such as an `assert`.
    Asserts(Vec<String>),
    /// Calls of a function, or of that method of a class `Solution`, with the expected results. Tuples
    /// equal lists.
    Calls {
        /// The function's name.
        function: String,
        /// Arguments and results.
        calls: Vec<(Vec<Value>, Value)>,
    },
    /// Standard input of the program, and the expected output.
    Pairs(Vec<(String, String)>),
}

impl CodeTests {
    /// Reads the value of a data set, or a text with such a value as JSON.
    pub fn from_json(value: &Value) -> Result<Self, SandboxError> {
        let refuse = || SandboxError::NoTests(value.to_string().chars().take(200).collect());
        let tests = match value {
            Value::String(text) => match serde_json::from_str(text) {
                Ok(inner @ (Value::Array(_) | Value::Object(_))) => return CodeTests::from_json(&inner),
                _ => CodeTests::Asserts(vec![text.clone()]),
            },
            Value::Array(items) if items.iter().all(Value::is_string) => {
                CodeTests::Asserts(items.iter().filter_map(Value::as_str).map(str::to_owned).collect())
            }
            Value::Array(items) => {
                let pair = |item: &Value| Some((text(item.get("input")?), text(item.get("output")?)));
                CodeTests::Pairs(items.iter().map(pair).collect::<Option<_>>().ok_or_else(refuse)?)
            }
            Value::Object(fields) => match (fields.get("inputs"), fields.get("outputs")) {
                (Some(Value::Array(inputs)), Some(Value::Array(outputs))) if inputs.len() == outputs.len() => {
                    if let Some(function) = fields.get("fn_name").filter(|name| !name.is_null()) {
                        let call = |(input, output): (&Value, &Value)| Some((input.as_array()?.clone(), output.clone()));
                        let calls = inputs.iter().zip(outputs).map(call).collect::<Option<Vec<_>>>();
                        let function = function.as_str().ok_or_else(refuse)?.to_owned();
                        let calls = calls.filter(|calls| !calls.is_empty()).ok_or_else(refuse)?;
                        return Ok(CodeTests::Calls { function, calls });
                    }
                    CodeTests::Pairs(inputs.iter().map(text).zip(outputs.iter().map(text)).collect())
                }
                _ => return Err(refuse()),
            },
            _ => return Err(refuse()),
        };
        if tests.len() == 0 { Err(refuse()) } else { Ok(tests) }
    }

    /// Returns the number of tests.
    pub fn len(&self) -> usize {
        match self {
            CodeTests::Asserts(tests) => tests.len(),
            CodeTests::Calls { calls, .. } => calls.len(),
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
    use serde_json::json;

    use super::*;

    #[test]
    fn tests_are_read_in_every_usual_spelling_and_nothing_else() {
        let asserts = |tests: &[&str]| CodeTests::Asserts(tests.iter().map(|&test| test.to_owned()).collect());
        let pairs = |tests: &[(&str, &str)]| CodeTests::Pairs(tests.iter().map(|&(a, b)| (a.to_owned(), b.to_owned())).collect());
        for (value, tests) in [
            (json!("assert f(1) == 2\nassert f(2) == 3"), asserts(&["assert f(1) == 2\nassert f(2) == 3"])),
            (json!(["assert f(1) == 2", "assert True"]), asserts(&["assert f(1) == 2", "assert True"])),
            (json!("[\"assert f(1) == 2\"]"), asserts(&["assert f(1) == 2"])),
            (json!([{ "input": "1 2\n", "output": "3" }]), pairs(&[("1 2\n", "3")])),
            (
                json!({ "fn_name": "f", "inputs": [[1, [2]], [3]], "outputs": [4, [5]] }),
                CodeTests::Calls {
                    function: "f".to_owned(),
                    calls: vec![(vec![json!(1), json!([2])], json!(4)), (vec![json!(3)], json!([5]))],
                },
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
