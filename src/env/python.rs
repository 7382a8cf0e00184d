//! Python to try things out with, and code with tests as the task.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};

use super::{Action, Deadline, EnvError, Environment, Episode, Grade, MakeEnvironment, Step, ToolCall, ToolResult, ToolSpec};
use crate::data::ChatMessage;
use crate::sandbox::{CodeTests, Job, Limits, TestRunner, extract_code};

/// Letters of output that a model gets to read; the middle of more is left out.
const READ: usize = 4000;

/// The model may run code with the tool `python` as often as it likes, each time from the beginning, and reads what the code prints. The turn
/// in which it calls nothing holds its answer: the last block of Python, which must pass the tests in the prompt's metadata.
///
/// Everything runs in the judge's sandbox. A program ends by itself within the sandbox's limits, and by the deadline that comes first.
#[derive(Debug)]
pub struct PythonEnvironment {
    runner: Arc<TestRunner>,
    key: String,
    tests: Option<CodeTests>,
    answer: Option<String>,
}

impl PythonEnvironment {
    /// With tests in `metadata[key]`.
    pub fn new(runner: Arc<TestRunner>, key: impl Into<String>) -> Self {
        PythonEnvironment { runner, key: key.into(), tests: None, answer: None }
    }

    /// A fresh one for every rollout; they share the judge.
    pub fn maker(runner: Arc<TestRunner>, key: impl Into<String>) -> MakeEnvironment {
        let key = key.into();
        Arc::new(move || Box::new(PythonEnvironment::new(runner.clone(), key.clone())))
    }

    /// What a call gives: a mistake of its code is read by the model, and only a broken sandbox is an error.
    fn call(&self, call: &ToolCall, deadline: Deadline) -> Result<ToolResult, EnvError> {
        let Some(code) = call.text("code") else {
            return Ok(ToolResult::failed(call, "the argument `code` is missing; it is text, the program to run"));
        };
        let sandbox = self.runner.sandbox();
        let limits = sandbox.config().limits;
        // What is left for the warden to end it in.
        let left = deadline.left().saturating_sub(Duration::from_millis(100));
        let job = Job::python(code).limits(Limits { wall: limits.wall.min(left), ..limits });
        let ran = sandbox.run(&job).map_err(EnvError::new)?;
        let output = format!("{}{}", ran.text(), ran.complaint());
        if ran.succeeded() {
            return Ok(ToolResult::of(call, shortened(&output)));
        }
        Ok(ToolResult {
            success: false,
            ..ToolResult::of(call, format!("{}\nthe program {}", shortened(&output), ran.ended).trim())
        })
    }
}

impl Environment for PythonEnvironment {
    fn reset(&mut self, episode: &Episode, _: Deadline) -> Result<Vec<ChatMessage>, EnvError> {
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

    fn step(&mut self, action: &Action, deadline: Deadline) -> Result<Step, EnvError> {
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

    fn grade(&mut self, _: Deadline) -> Result<Grade, EnvError> {
        let (Some(answer), Some(tests)) = (&self.answer, &self.tests) else { return Ok(Grade::correct(false)) };
        let results = self.runner.run(answer, tests).map_err(EnvError::new)?;
        let mut grade = Grade { reward: results.share(), ..Grade::correct(results.all()) };
        grade.metadata.insert("tests_passed".to_owned(), json!(results.passed));
        if let Some(complaint) = results.complaint {
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
    if letters.len() <= READ {
        return text.to_owned();
    }
    let (first, last) = (&letters[..READ / 2], &letters[letters.len() - READ / 2..]);
    let left_out = letters.len() - READ;
    format!("{}\n… {left_out} letters left out …\n{}", first.iter().collect::<String>(), last.iter().collect::<String>())
}
