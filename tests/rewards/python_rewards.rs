//! Reward functions in a Python file (law F6): every signature, and whatever the function does, every sample has a reward or a reason, and no
//! process stays.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rollflow::algo::rewards::{Aggregator, Combine, Parts};
use rollflow::judge::Service;
use rollflow::observe::logs::Failure;
use rollflow::prelude::*;
use rollflow::python::{PythonError, PythonProcesses, PythonReward, Workers};
use rollflow::stages::reward::RemoteReward;

/// A folder with a file of Python.
pub struct File {
    folder: tempfile::TempDir,
    pub path: PathBuf,
}

impl File {
    pub fn new(name: &str, source: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        fs::write(&path, source).unwrap();
        File { folder, path }
    }

    fn other(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn reward(&self, function: &str) -> PythonReward {
        PythonReward { file: self.path.clone(), function: function.to_owned(), ..PythonReward::default() }
    }

    fn score(&self, function: &str) -> (Vec<Option<f64>>, Vec<Failure>) {
        score(self.reward(function).start().unwrap(), Duration::from_secs(60))
    }
}

/// Completions 7, 8 and 77 of a prompt whose answer is 7.
fn group() -> Group {
    let mut prompt = Prompt::from("3+4=");
    prompt.metadata.insert("answer".into(), "7".into());
    let sample = |index, response: &str| {
        let mut sample =
            Sample { response: response.into(), status: Status::Completed, ..Sample::begin(&prompt, index, &[1, 2]) };
        sample.push(40 + index, -0.5, Default::default());
        sample
    };
    let samples = vec![sample(0, "7"), sample(1, "8"), sample(2, "77")];
    Group { samples, prompt: Arc::new(prompt), ..Group::default() }
}

fn score(workers: Workers, timeout: Duration) -> (Vec<Option<f64>>, Vec<Failure>) {
    let reward = RemoteReward::new(Service::python(workers, timeout));
    let (group, failures) = reward.score_blocking(group()).unwrap();
    (group.samples.iter().map(|sample| sample.reward).collect(), failures)
}

const SIGNATURES: &str = r#"
import asyncio, sys
from rollflow import reward


def plain(completion, answer):
    print("a line of user code")
    sys.stdout.flush()
    return completion == answer


@reward(name="right", weight=2.0)
def trl(prompts, completions, answer, **kwargs):
    assert prompts == ["3+4="] * len(completions), prompts
    assert sorted(kwargs) == ["completion_ids", "log_extra", "log_metric"], kwargs
    return [float(text == right) for text, right in zip(completions, answer)]


def by_tokens(completions, completion_ids):
    return [float(ids == [40]) for ids in completion_ids]


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "" and extra_info == {"answer": "7"}
    return {"score": float(solution_str == ground_truth), "length": len(solution_str), "note": "text"}


async def waits(completion, answer):
    await asyncio.sleep(0.01)
    return 1 if completion == answer else 0


class Callable:
    def __call__(self, completion, **columns):
        return float(completion == columns["answer"])
"#;

#[test]
fn a_function_of_any_signature_gives_the_same_rewards() {
    let file = File::new("my_reward.py", SIGNATURES);
    for function in ["plain", "trl", "by_tokens", "compute_score", "waits", "Callable"] {
        let (rewards, failures) = file.score(function);
        assert_eq!((rewards, failures), (vec![Some(1.0), Some(0.0), Some(0.0)], vec![]), "{function}");
    }
}

#[test]
fn other_numbers_of_a_result_and_logged_metrics_are_parts() {
    let source = "
def verl(data_source, solution_str, ground_truth):
    return {'score': 1, 'length': len(solution_str), 'note': 'text'}

def trl(completions, log_metric, log_extra):
    log_metric('mean_length', 1.5)
    log_extra('text', completions)
    return [0.0] * len(completions)
";
    let file = File::new("my_reward.py", source);
    for (function, parts) in [("verl", [("length", 2.0)]), ("trl", [("mean_length", 1.5)])] {
        let service = Service::python(file.reward(function).start().unwrap(), Duration::from_secs(60));
        let (group, failures) = RemoteReward::new(service).score_blocking(group()).unwrap();
        assert!(failures.is_empty(), "{failures:?}");
        assert_eq!(group.samples[2].reward_parts, BTreeMap::from(parts.map(|(name, value)| (name.to_owned(), value))));
    }
}

/// As TRL's sum of `reward_funcs`: NaN, which stands for None, is left out.
#[test]
fn none_leaves_a_part_out_and_is_a_failure_where_there_is_no_other() {
    let source = "
def one(completion): return 1.0
def sometimes(completions, **kwargs): return [None if text == '7' else 0.5 for text in completions]
def never(completion): return None
";
    let file = File::new("my_reward.py", source);
    let services = |names: &[&str]| {
        let service =
            |name: &&str| (name.to_string(), Service::python(file.reward(name).start().unwrap(), Duration::from_secs(60)));
        names.iter().map(service).collect::<Vec<_>>()
    };
    let scored = |aggregator: Aggregator, names: &[&str]| {
        let parts = names.iter().fold(Parts::new(aggregator), |parts, name| parts.remote(*name));
        let (group, failures) = RemoteReward::with_parts(parts, services(names)).score_blocking(group()).unwrap();
        (
            group.samples.iter().map(|sample| sample.reward).collect::<Vec<_>>(),
            failures.into_iter().map(|of| of.text).collect::<Vec<_>>(),
        )
    };
    let sum = Aggregator::weighted([1.0, 2.0]).at_least([None, Some(0.5)]);
    assert_eq!(scored(sum, &["one", "sometimes"]), (vec![Some(1.0), Some(2.0), Some(2.0)], vec![]));
    let product = Aggregator::new(Combine::Product);
    assert_eq!(scored(product, &["sometimes", "one"]).0, [Some(1.0), Some(0.5), Some(0.5)]);
    let (rewards, failures) = scored(Aggregator::new(Combine::Lexicographic), &["one", "sometimes"]);
    assert!(rewards[0].is_none() && rewards[1].is_some() && rewards[1] == rewards[2], "{rewards:?}");
    assert!(failures.len() == 1 && failures[0].contains("only a sum, a minimum or a product can leave one out"), "{failures:?}");
    let (rewards, failures) = scored(Aggregator::default(), &["never"]);
    assert!(rewards == [None; 3] && failures[0].contains("there is no value"), "{failures:?}");
    let (rewards, failures) = file.score("never");
    assert!(rewards == [None; 3] && failures[0].text.contains("does not apply to this sample (None)"), "{failures:?}");
}

#[test]
fn an_exception_costs_the_samples_of_its_call_and_shows_its_traceback() {
    let source = "
def helper(text):
    return 1 / (len(text) - 2)

def plain(completion): return helper(completion)

def batch(completions): return [helper(text) for text in completions]
";
    let file = File::new("my_reward.py", source);
    for (function, expected) in [("plain", [Some(-1.0), Some(-1.0), None]), ("batch", [None; 3])] {
        let (rewards, failures) = file.score(function);
        assert_eq!(rewards, expected, "{function}");
        let Some(Failure { sample: 2, attempts: 3, text, .. }) = failures.last() else { panic!("{failures:?}") };
        let path = file.path.display();
        assert!(text.contains(&format!("File \"{path}\", line 3, in helper")), "{text}");
        assert!(text.ends_with("ZeroDivisionError: division by zero") && !text.contains("<rollflow"), "{text}");
    }
}

#[test]
fn a_function_of_lists_gets_the_whole_group_in_every_attempt() {
    let source = "
calls = []

def best(completions, **kwargs):
    calls.append(list(completions))
    if len(calls) < 3:
        raise ValueError('not yet')
    assert calls == [['7', '8', '77']] * 3, calls
    return [float(len(text) == max(map(len, completions))) for text in completions]
";
    let (rewards, failures) = File::new("my_reward.py", source).score("best");
    assert_eq!((rewards, failures), (vec![Some(0.0), Some(0.0), Some(1.0)], vec![]));
}

#[test]
fn a_result_that_is_no_reward_is_a_failure_that_says_so() {
    let source = "
def text(completion): return 'good'
def nan(completion): return float('nan')
def large(completion): return 1e300
def too_few(completions): return [1.0]
def a_number(completions): return 1.0
def key(completion): return {'value': 1}
def unknown(completion, gold): return 1
";
    let file = File::new("my_reward.py", source);
    for (function, why) in [
        ("text", "returned 'good'; a reward is a number, None, or a dict"),
        ("nan", "returned nan; a reward must be finite"),
        ("large", "1e300"),
        ("too_few", "returned 1 rewards for 3 completions"),
        ("a_number", "returned 1.0; it must return a list with a number for each completion"),
        ("key", "returned {'value': 1}; a dict needs a key `score` or `reward`"),
        ("unknown", "takes `gold`, which is neither known here nor a column of the data; known: answer, completion, "),
    ] {
        let (rewards, failures) = file.score(function);
        assert_eq!(rewards, [None; 3], "{function}");
        assert!(failures[0].text.contains(why), "{function}: {}", failures[0].text);
    }
}

#[test]
fn a_call_that_hangs_ends_with_its_process_and_repeats_no_other_call() {
    let source = "
import os, subprocess, time

def hangs(completion):
    with open(__file__ + '.calls', 'a') as file: file.write(completion + ' ')
    if completion == '8':
        child = subprocess.Popen(['sleep', '1000'])
        with open(__file__ + '.child', 'w') as file: file.write(str(child.pid))
        time.sleep(1000)
    return 1.0
";
    let file = File::new("my_reward.py", source);
    let (rewards, failures) = score(file.reward("hangs").start().unwrap(), Duration::from_millis(700));
    assert_eq!(rewards, [Some(1.0), None, Some(1.0)], "{failures:?}");
    assert!(failures[0].text.contains("gave no answer within 0.7 s, and its process was ended"), "{}", failures[0].text);
    let mut calls: Vec<String> =
        fs::read_to_string(file.other("my_reward.py.calls")).unwrap().split_whitespace().map(str::to_owned).collect();
    calls.sort();
    assert_eq!(calls, ["7", "77", "8", "8", "8"], "the timeout is that of a call");
    let child: i32 = fs::read_to_string(file.other("my_reward.py.child")).unwrap().parse().unwrap();
    assert!(has_gone(child), "what the function started ends with it");
}

#[test]
fn a_process_that_dies_is_replaced_with_what_it_started_and_its_last_lines_are_shown() {
    let source = "
import os, subprocess, sys

def dies(completion):
    if completion == '77':
        child = subprocess.Popen(['sleep', '1000'])
        with open(__file__ + '.child', 'w') as file: file.write(str(child.pid))
        print('about to leave', file=sys.stderr)
        os._exit(3)
    return 1.0
";
    let file = File::new("my_reward.py", source);
    let (rewards, failures) = file.score("dies");
    assert_eq!(rewards, [Some(1.0), Some(1.0), None]);
    let text = &failures[0].text;
    assert!(text.contains("its process ended (exit status: 3; its last lines: about to leave"), "{text}");
    let child: i32 = fs::read_to_string(file.other("my_reward.py.child")).unwrap().parse().unwrap();
    assert!(has_gone(child), "what the function started ends with it");
}

#[cfg(target_os = "linux")]
#[test]
fn a_call_beyond_the_memory_limit_fails_and_others_do_not() {
    let source = "def grows(completion): return float(len(bytearray(400_000_000 if completion == '8' else 1)) > 0)";
    let file = File::new("my_reward.py", source);
    let processes = PythonProcesses { memory: Some(200), ..PythonProcesses::default() };
    let (rewards, failures) = score(PythonReward { processes, ..file.reward("grows") }.start().unwrap(), Duration::from_secs(60));
    assert_eq!(rewards, [Some(1.0), None, Some(1.0)]);
    assert!(failures[0].text.ends_with("MemoryError"), "{}", failures[0].text);
}

/// A call returns only when another one has begun, so that each proves that they overlap.
#[test]
fn async_calls_overlap_in_a_process_and_other_calls_in_several_processes() {
    let source = "
import asyncio, os, time
entered = []

async def waits(completions):
    entered.append(1)
    while len(entered) < 2:
        await asyncio.sleep(0.001)
    return [1.0] * len(completions)

def blocks(completions):
    open(__file__ + str(os.getpid()), 'w').close()
    while len([name for name in os.listdir(os.path.dirname(__file__)) if name.startswith('my_reward.py')]) < 3:
        time.sleep(0.001)
    return [1.0] * len(completions)
";
    for (function, count, capacity) in [("waits", 1, 16), ("blocks", 2, 2)] {
        let file = File::new("my_reward.py", source);
        let processes = PythonProcesses { processes: count, ..PythonProcesses::default() };
        let workers = PythonReward { processes, ..file.reward(function) }.start().unwrap();
        assert_eq!(workers.capacity(), capacity, "{function}");
        let reward = RemoteReward::new(Service::python(workers, Duration::from_secs(60)));
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| assert_eq!(reward.score_blocking(group()).unwrap().1, []));
            }
        });
    }
}

#[test]
fn a_file_that_does_not_load_is_an_error_with_the_reason() {
    let file = File::new("my_reward.py", "import not_installed_here\n");
    let refused = |reward: PythonReward| reward.start().err().unwrap().to_string();
    let why = refused(file.reward("reward"));
    assert!(why.contains("my_reward.py: reward did not load with python3:   File") && why.contains("line 1"), "{why}");
    assert!(why.ends_with("ModuleNotFoundError: No module named 'not_installed_here'"), "{why}");
    let gone = file.other("gone.py");
    let why = refused(PythonReward { file: gone.clone(), ..PythonReward::default() });
    assert!(why.ends_with(&format!("there is no file {}", gone.display())), "{why}");
    for (source, why) in [
        ("def score(completion): pass\n", "has no `reward`; it defines score"),
        ("def reward(:\n", "SyntaxError: invalid syntax"),
        ("reward = 3\n", "3 is no function"),
        ("import sys; sys.exit('no licence')\n", "SystemExit: no licence"),
        ("import os; os._exit(7)\n", "exit status: 7"),
        ("def reward(completions, environments): pass\n", "takes `environments`: a reward that reads the environment is named"),
        ("from rollflow import run\nrun('x.toml')\n", "run() was called while a run loads this file"),
    ] {
        fs::write(&file.path, source).unwrap();
        let refused = refused(file.reward("reward"));
        assert!(refused.contains(why), "{refused}");
    }
    let python = "/nowhere/python".to_owned();
    let processes = PythonProcesses { python, ..PythonProcesses::default() };
    let why = refused(PythonReward { processes, ..file.reward("reward") });
    assert!(why.starts_with("/nowhere/python can't be started: No such file") && why.contains(".venv/bin/python"), "{why}");
    fs::write(&file.path, "import time; time.sleep(1000)\n").unwrap();
    let processes = PythonProcesses { load_timeout: 0.5, ..PythonProcesses::default() };
    let why = refused(PythonReward { processes, ..file.reward("reward") });
    assert!(why.ends_with("it took more than 0.5 s (load_timeout)"), "{why}");
}

#[test]
fn a_file_may_import_its_neighbours_and_have_the_name_of_a_module() {
    let file = File::new("json.py", "from rules import rule\ndef reward(completion): return rule(completion)\n");
    fs::write(file.other("rules.py"), "def rule(text): return float(text)\n").unwrap();
    assert_eq!(file.score("reward").0, [Some(7.0), Some(8.0), Some(77.0)]);
}

#[test]
fn processes_end_with_their_workers() {
    let source = "import os\nopen(__file__ + '.pid', 'w').write(str(os.getpid()))\ndef reward(completion): return 1.0\n";
    let file = File::new("my_reward.py", source);
    let workers = file.reward("reward").start().unwrap();
    let process: i32 = fs::read_to_string(file.other("my_reward.py.pid")).unwrap().parse().unwrap();
    assert!(is_alive(process));
    drop(workers);
    assert!(has_gone(process));
}

#[test]
fn a_late_call_is_another_error_than_a_failed_one() {
    let file = File::new("my_reward.py", "import time\ndef reward(completion): time.sleep(100)\n");
    let workers = file.reward("reward").start().unwrap();
    let question = serde_json::json!({ "prompt": "", "samples": [{ "response": "", "status": "completed", "metadata": {} }] });
    let late = workers.block_on(workers.ask(question, Duration::from_millis(200)));
    assert!(matches!(late, Err(PythonError::Late { .. })), "{late:?}");
}

fn is_alive(process: i32) -> bool {
    let state = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    // A zombie has ended.
    state.rsplit(')').next().is_some_and(|rest| !rest.is_empty() && !rest.trim_start().starts_with('Z'))
}

/// Whether a process is gone, or goes soon.
fn has_gone(process: i32) -> bool {
    let begun = Instant::now();
    while is_alive(process) && begun.elapsed() < Duration::from_secs(20) {
        std::thread::sleep(Duration::from_millis(20));
    }
    !is_alive(process)
}
