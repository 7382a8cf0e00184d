//! Environments and tools in a Python file (law F6): TRL's and gymnasium's shapes, and what happens to a rollout whose process ends.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use rollflow::data::{ChatMessage, Prompt};
use rollflow::env::{Action, Environment, Episode, ToolCall, python_environment, served_environment};
use rollflow::net::RetryPolicy;
use rollflow::python::PythonEnvironment;
use serde_json::{Value, json};

use crate::python_rewards::File;

const SOURCE: &str = r#"
import os, random, time


class Hidden:
    def reset(self, seed, **columns):
        assert columns["answer"] == "7" and columns["prompt"][0]["content"] == "Play."
        self.number, self.found = random.Random(seed).randint(1, 9), False
        return " Find the number."

    def compare(self, guess: int) -> str:
        """Compares a guess with the hidden number.

        Args:
            guess: The guess.
        """
        self.found = self.found or guess == self.number
        return "found" if self.found else "no"

    def get_reward(self):
        return 1.0 if self.found else 0.25


class Counter:
    """Gymnasium's shape, with a state that is saved."""

    def reset(self):
        self.turns = 0
        return [{"role": "system", "content": "Count."}, {"content": "Begin."}]

    def step(self, text):
        self.turns += 1
        if text == "fail":
            raise OSError("the machine is gone")
        if text == "hang":
            time.sleep(1000)
        if text == "die":
            os._exit(4)
        if text == "gym":
            return ("seen", 0.5, False, False, {})
        return ("on", 0.5, self.turns >= 3)

    def grade(self):
        return {"reward": self.turns, "correct": self.turns == 3, "metadata": {"turns_seen": self.turns}}

    def save(self):
        return {"turns": self.turns}

    def restore(self, state):
        self.turns = state["turns"]


def add(a: int, b: int = 1) -> int:
    """Adds two numbers."""
    return a + b


async def later(text: str) -> str:
    """Says it again."""
    return text


def by_environment(prompts, completions, environments, answer, **kwargs):
    assert prompts[0][0]["content"].endswith("Find the number."), prompts
    assert [turn["role"] for turn in completions[0]] == ["assistant", "tool", "assistant"], completions
    return [2.0 * environment.found for environment in environments]


def untyped(text):
    return text
"#;

fn environment(file: &File, change: impl FnOnce(&mut PythonEnvironment)) -> Box<dyn Environment> {
    let mut section = PythonEnvironment { file: file.path.clone(), ..PythonEnvironment::default() };
    change(&mut section);
    python_environment(section.start().unwrap())()
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn episode() -> Episode {
    let mut prompt = Prompt::from(vec![ChatMessage::new("user", "Play.")]);
    prompt.metadata.insert("answer".into(), "7".into());
    Episode { prompt, seed: 5, index: 0 }
}

fn call(name: &str, arguments: Value) -> Action {
    let arguments = arguments.as_object().unwrap().clone();
    Action { text: format!("call {name}"), calls: vec![ToolCall::new(name, arguments)], ..Action::default() }
}

fn says(text: &str) -> Action {
    Action { text: text.to_owned(), ..Action::default() }
}

fn named(name: &str) -> impl FnOnce(&mut PythonEnvironment) {
    let name = name.to_owned();
    |of| of.environment = Some(name)
}

#[test]
fn public_methods_are_tools_as_in_trl_and_a_turn_without_a_call_ends_the_rollout() {
    let file = File::new("my_env.py", SOURCE);
    let mut one = environment(&file, named("Hidden"));
    let mut other = environment(&file, named("Hidden"));
    let opening = one.reset(&episode(), soon()).unwrap();
    assert_eq!(opening, [ChatMessage::new("user", "Play. Find the number.")]);
    other.reset(&Episode { seed: 6, ..episode() }, soon()).unwrap();
    let tools = one.tools();
    assert_eq!((tools.len(), tools[0].name.as_str()), (1, "compare"));
    assert_eq!(tools[0].description, "Compares a guess with the hidden number.");
    let guess = json!({"type": "integer", "description": "The guess."});
    assert_eq!(tools[0].parameters, json!({"type": "object", "properties": {"guess": guess}, "required": ["guess"]}));
    let step = one.step(&call("compare", json!({"guess": 1})), soon()).unwrap();
    assert_eq!((step.results[0].content.as_str(), step.results[0].success, step.done), ("no", true, false));
    for guess in 1..10 {
        one.step(&call("compare", json!({"guess": guess})), soon()).unwrap();
    }
    let step = one.step(&call("compare", json!({"wrong": 1})), soon()).unwrap();
    assert!(!step.results[0].success && step.results[0].content.contains("unexpected keyword argument"), "{step:?}");
    assert!(one.step(&says("done"), soon()).unwrap().done);
    assert_eq!(one.grade(soon()).unwrap().reward, 1.0);
    assert_eq!(other.grade(soon()).unwrap().reward, 0.25, "rollouts are apart");
}

#[test]
fn a_reward_function_grades_the_environment_with_trls_arguments() {
    let file = File::new("my_env.py", SOURCE);
    let mut graded = environment(&file, |of| {
        (of.environment, of.reward_function) = (Some("Hidden".to_owned()), Some("by_environment".to_owned()));
    });
    graded.reset(&episode(), soon()).unwrap();
    // Python's random.Random(5).randint(1, 9) is 5.
    graded.step(&call("compare", json!({"guess": 5})), soon()).unwrap();
    graded.step(&says("done"), soon()).unwrap();
    assert_eq!(graded.grade(soon()).unwrap().reward, 2.0);
}

#[test]
fn a_step_answers_each_turn_and_a_saved_state_goes_on_in_another_process() {
    let file = File::new("my_env.py", SOURCE);
    let mut counter = environment(&file, named("Counter"));
    let opening = counter.reset(&episode(), soon()).unwrap();
    assert_eq!(opening, [ChatMessage::new("system", "Count."), ChatMessage::new("user", "Begin.")]);
    let step = counter.step(&says("gym"), soon()).unwrap();
    assert_eq!((step.messages, step.reward, step.done), (vec![ChatMessage::new("user", "seen")], 0.5, false));
    counter.step(&says("x"), soon()).unwrap();
    let state = counter.save().unwrap();

    let mut resumed = environment(&file, named("Counter"));
    resumed.reset(&episode(), soon()).unwrap();
    resumed.restore(&state).unwrap();
    assert!(resumed.step(&says("x"), soon()).unwrap().done);
    let grade = resumed.grade(soon()).unwrap();
    assert_eq!((grade.reward, grade.correct, &grade.metadata["turns_seen"]), (3.0, Some(true), &json!(3)));
}

#[test]
fn functions_alone_are_tools_async_or_not() {
    let file = File::new("my_env.py", SOURCE);
    let mut tools = environment(&file, |of| of.tools = vec!["add".to_owned(), "later".to_owned()]);
    assert_eq!(tools.reset(&episode(), soon()).unwrap(), [ChatMessage::new("user", "Play.")]);
    assert_eq!(tools.tools().iter().map(|tool| tool.name.as_str()).collect::<Vec<_>>(), ["add", "later"]);
    let both =
        Action { calls: [call("add", json!({"a": 2})).calls, call("later", json!({"text": "é"})).calls].concat(), ..says("") };
    let results = tools.step(&both, soon()).unwrap().results;
    assert_eq!(results.iter().map(|result| result.content.as_str()).collect::<Vec<_>>(), ["3", "é"]);
    assert!(tools.step(&says("7"), soon()).unwrap().done);
    assert_eq!(tools.grade(soon()).unwrap().reward, 0.0, "[reward] judges");
}

#[test]
fn what_fails_is_the_rollouts_failure_and_a_step_that_hangs_is_late() {
    let file = File::new("my_env.py", SOURCE);
    let make = {
        let section =
            PythonEnvironment { file: file.path.clone(), environment: Some("Counter".to_owned()), ..Default::default() };
        python_environment(section.start().unwrap())
    };
    let fresh = || {
        let mut fresh = make();
        fresh.reset(&episode(), soon()).unwrap();
        fresh
    };
    let error = fresh().step(&says("fail"), soon()).unwrap_err();
    assert!(error.to_string().ends_with("OSError: the machine is gone") && !error.is_late(), "{error}");
    let mut bystander = fresh();
    let error = fresh().step(&says("hang"), Instant::now() + Duration::from_millis(500)).unwrap_err();
    assert!(error.is_late() && error.to_string().contains("gave no answer within"), "{error}");
    let error = bystander.step(&says("x"), soon()).unwrap_err();
    assert!(error.to_string().contains("its process ended") && !error.is_late(), "{error}");
    let error = fresh().step(&says("die"), soon()).unwrap_err();
    assert!(error.to_string().contains("exit status: 4"), "{error}");
    assert_eq!(fresh().step(&says("x"), soon()).unwrap().reward, 0.5, "another process takes the next rollouts");
}

#[test]
fn a_call_waits_for_those_of_other_rollouts_before_its_time_begins() {
    let file = File::new("my_env.py", SOURCE);
    let section = PythonEnvironment { file: file.path.clone(), environment: Some("Counter".to_owned()), ..Default::default() };
    let of_a_process = python_environment(section.start().unwrap());
    let of_a_server = served_environment("http://127.0.0.1:1", RetryPolicy::default(), 1).unwrap();
    for make in [of_a_process, of_a_server] {
        let (mut one, mut other) = (make(), make());
        let calling = one.room().unwrap();
        let (tell, told) = mpsc::channel();
        let waits = std::thread::spawn(move || tell.send(other.room().is_ok()));
        assert!(told.recv_timeout(Duration::from_millis(20)).is_err(), "there is one call at a time");
        drop(calling);
        assert_eq!(told.recv(), Ok(true));
        waits.join().unwrap().unwrap();
    }
}

#[test]
fn an_environment_that_cannot_be_used_is_an_error_at_the_start() {
    let file = File::new("my_env.py", SOURCE);
    let refused = |change: &dyn Fn(&mut PythonEnvironment)| {
        let mut section = PythonEnvironment { file: file.path.clone(), ..PythonEnvironment::default() };
        change(&mut section);
        section.start().err().unwrap().to_string()
    };
    let why = refused(&|of| of.tools = vec!["untyped".to_owned()]);
    assert!(why.ends_with("tool untyped: its argument `text` has no type hint"), "{why}");
    let why = refused(&|of| of.environment = Some("add".to_owned()));
    assert!(why.contains("missing 1 required positional argument: 'a'"), "{why}");
    let why = refused(&|of| of.environment = Some("Gone".to_owned()));
    assert!(why.contains("has no `Gone`; it defines Counter, Hidden, add, by_environment, later, untyped"), "{why}");
}
