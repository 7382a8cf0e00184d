//! Programming tasks: a tool that runs Python, and tests as the grade.

use std::sync::Arc;
use std::time::Instant;

use serde_json::{Value, json};

use super::{Action, EnvError, Environment, Episode, Grade, MakeEnvironment, Step, ToolCall, ToolResult, ToolSpec};
use crate::data::ChatMessage;
use crate::sandbox::{CodeTests, Job, Sandbox, extract_code};

/// Longest output that a model reads, in characters; the middle of a longer one is omitted.
const MAX_OUTPUT: usize = 4000;

/// Task with the tool `python`, which runs a program and returns its output.
///
/// A turn without a call is the answer: its last block of Python must pass the tests in
/// `metadata[key]` of the prompt. All code runs in the sandbox, within its limits and the deadline.
pub fn programming_environment(sandbox: Sandbox, key: impl Into<String>) -> MakeEnvironment {
    let key = key.into();
    Arc::new(move || Box::new(PythonTask { sandbox: sandbox.clone(), key: key.clone(), tests: None, answer: None }))
}

struct PythonTask {
    sandbox: Sandbox,
    key: String,
    tests: Option<CodeTests>,
    answer: Option<String>,
}

impl PythonTask {
    /// Runs a call. The model reads errors of its code; only a failed sandbox is an error.
    fn call(&self, call: &ToolCall, deadline: Instant) -> Result<ToolResult, EnvError> {
        let Some(code) = call.text("code") else {
            return Ok(ToolResult::failed(call, "the argument `code` is missing; it is text, the program to run"));
        };
        let ran = self.sandbox.run_by(&Job::python(code), deadline).map_err(EnvError::new)?;
        let output = shortened(&format!("{}{}", ran.text(), ran.complaint()));
        if ran.succeeded() {
            return Ok(ToolResult::of(call, output));
        }
        let content = format!("{output}\nthe program {}", ran.ended).trim().to_owned();
        Ok(ToolResult { success: false, ..ToolResult::of(call, content) })
    }
}

impl Environment for PythonTask {
    fn reset(&mut self, episode: &Episode, _: Instant) -> Result<Vec<ChatMessage>, EnvError> {
        let tests = episode.prompt.metadata.get(&self.key);
        let tests = tests.ok_or_else(|| EnvError::new(format!("the prompt has no tests, metadata[{:?}]", self.key)))?;
        self.tests = Some(CodeTests::from_json(tests).map_err(EnvError::new)?);
        self.answer = None;
        Ok(episode.conversation())
    }

    fn tools(&self) -> Vec<ToolSpec> {
        let parameters = json!({
            "type": "object",
            "properties": { "code": { "type": "string", "description": "A Python program; only what it prints is seen." } },
            "required": ["code"],
        });
        vec![ToolSpec::new("python", "Runs a Python program from its beginning and gives what it prints.", parameters)]
    }

    fn step(&mut self, action: &Action, deadline: Instant) -> Result<Step, EnvError> {
        if action.calls.is_empty() && action.malformed == 0 {
            self.answer = Some(extract_code(&action.text).to_owned());
            return Ok(Step::over());
        }
        let results = action.calls.iter().map(|call| match call.name.as_str() {
            "python" => self.call(call, deadline),
            _ => Ok(ToolResult::failed(call, "the only tool is python")),
        });
        Ok(Step::results(results.collect::<Result<_, _>>()?))
    }

    fn observe(&self) -> Value {
        json!({ "answer": self.answer, "tests": self.tests.as_ref().map(CodeTests::len) })
    }

    fn grade(&mut self, deadline: Instant) -> Result<Grade, EnvError> {
        let (Some(answer), Some(tests)) = (&self.answer, &self.tests) else { return Ok(Grade::correct(false)) };
        let results = self.sandbox.run_tests(answer, tests, deadline).map_err(EnvError::new)?;
        let passed = results.iter().filter(|result| result.is_ok()).count();
        let mut grade = Grade { reward: passed as f64 / results.len() as f64, ..Grade::correct(passed == results.len()) };
        grade.metadata.insert("tests_passed".to_owned(), json!(passed));
        if let Some(complaint) = results.into_iter().find_map(Result::err) {
            grade.metadata.insert("complaint".to_owned(), complaint.into());
        }
        Ok(grade)
    }

    fn save(&self) -> Option<Value> {
        Some(json!({ "answer": self.answer }))
    }

    fn restore(&mut self, state: &Value) -> Result<(), EnvError> {
        self.answer = state["answer"].as_str().map(str::to_owned);
        Ok(())
    }
}

fn shortened(text: &str) -> String {
    let letters: Vec<char> = text.chars().collect();
    if letters.len() <= MAX_OUTPUT {
        return text.to_owned();
    }
    let (first, last) = (&letters[..MAX_OUTPUT / 2], &letters[letters.len() - MAX_OUTPUT / 2..]);
    let left_out = letters.len() - MAX_OUTPUT;
    format!("{}\n… {left_out} letters left out …\n{}", first.iter().collect::<String>(), last.iter().collect::<String>())
}
