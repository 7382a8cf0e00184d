//! Code that is judged by tests: what it passes, that cheating gains nothing, and what becomes of it as a reward and in an environment.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rollflow::env::{Action, Environment, Episode, Grade, ToolCall, ToolFormat, programming_environment};
use rollflow::prelude::*;
use rollflow::rollout::{Agent, roll_out, why_lost};
use rollflow::sandbox::{CodeTests, Job, Limits, Sandbox, SandboxConfig};
use rollflow::stages::reward::{CodeReward, CodeRule, CodeScore};
use serde_json::{Map, Value, json};

use super::{config, limits, passed, processes};
use crate::speaker::Speaker;

fn judge() -> Sandbox {
    Sandbox::new(config()).unwrap()
}

#[test]
fn code_passes_the_tests_that_it_passes_and_is_told_what_failed_first() {
    let judge = judge();
    let tests = json!(["assert f(1) == 2", "assert f(-1) == 0", "x = f(2)\nassert x == 3, f'f(2) is {x}'"]);
    for (code, count, complaint) in [
        ("def f(x): return x + 1", 3, None),
        ("print('hello')\ndef f(x): return 2", 1, Some("AssertionError")),
        ("def f(x): return x if x == 2 else x + 1", 2, Some("f(2) is 2")),
        ("def f(x): return y", 0, Some("NameError")),
        ("def f(x) return x", 0, Some("SyntaxError")),
        ("", 0, Some("NameError")),
        ("def f(x):\n    while x == 1: pass\n    return x + 1", 2, Some("too long")),
        ("x = '\\ud800'\ndef f(x): raise ValueError('\\ud800 \\n\\0')", 0, Some("ValueError")),
    ] {
        let results = judge.test(code, &tests).unwrap();
        assert_eq!((passed(&results), results.len()), (count, 3), "{code}: {results:?}");
        let failure = results.iter().find_map(|result| result.as_ref().err());
        assert_eq!(failure.is_some(), complaint.is_some());
        assert!(failure.is_none_or(|said| said.contains(complaint.unwrap())), "{code}: {results:?}");
    }
}

#[test]
fn programs_are_compared_by_what_they_print() {
    let judge = judge();
    let tests = json!({ "inputs": ["1 2\n", "5 5", "0 0"], "outputs": ["3", "10\n", "0"] });
    for (code, count) in [
        ("print(sum(map(int, input().split())), ' ')", 3),
        ("a, b = map(int, input().split())\nprint(a + b if a else 'zero')", 2),
        ("print(3)\nexit(1)", 0),
        ("print(3); print(3)", 0),
        ("if __name__ == '__main__': print(3)", 1),
    ] {
        assert_eq!(passed(&judge.test(code, &tests).unwrap()), count, "{code}");
    }
}

#[test]
fn output_may_be_as_long_as_expected_and_failures_are_short() {
    let judge = judge();
    let numbers: Vec<String> = (1..=100_000).map(|number| number.to_string()).collect();
    let pair = json!({ "inputs": [""], "outputs": [numbers] });
    assert_eq!(judge.test("print(*range(1, 100001), sep='\\n')", &pair).unwrap(), [Ok(())]);
    for (code, tests) in [
        ("raise ValueError('x' * 60000)", pair),
        ("import os\ndef f():\n    os.write(2, b'x' * 10000)\n    os._exit(1)", json!(["assert f()"])),
    ] {
        let failure = judge.test(code, &tests).unwrap().remove(0).unwrap_err();
        assert!(failure.contains("xxx") && failure.len() <= 300, "{} bytes: {failure}", failure.len());
    }
}

#[test]
fn loading_and_single_tests_of_many_may_take_more_than_an_equal_share_of_the_time() {
    let code = "import time\ntime.sleep(0.3)\ndef f(x):\n    if x == 7: time.sleep(0.3)\n    return x + 1";
    let tests: Vec<String> = (0..40).map(|x| format!("assert f({x}) == {}", x + 1)).collect();
    // An equal share would be less than 0.3 s.
    let limits = Limits { wall: Duration::from_secs(10), ..limits() };
    let judge = Sandbox::new(SandboxConfig { limits, ..config() }).unwrap();
    let results = judge.test(code, &json!(tests)).unwrap();
    assert_eq!(passed(&results), 40, "{results:?}");
}

#[test]
fn the_same_code_is_run_once_for_the_same_tests() {
    let judge = judge();
    // No two runs of it come to the same.
    let tests = json!(vec!["import random\nassert random.random() < 0.5"; 40]);
    let first = judge.test("x = 1", &tests).unwrap();
    std::thread::scope(|scope| {
        let again: Vec<_> = (0..8).map(|_| scope.spawn(|| judge.test("x = 1", &tests).unwrap())).collect();
        again.into_iter().for_each(|judged| assert_eq!(judged.join().unwrap(), first));
    });
    let others: Vec<_> = (2..6).map(|at| judge.test(&format!("x = {at}"), &tests).unwrap()).collect();
    assert!(others.iter().any(|other| *other != first), "{first:?} {others:?}");
}

#[test]
fn a_reward_is_the_share_of_tests_or_all_of_them_and_names_what_is_missing() {
    let rule = CodeRule { template: "def f(x):\n    return {code}\n# {prompt}".to_owned(), ..CodeRule::default() };
    let reward = |score| CodeReward::in_sandbox(Sandbox::new(config()).unwrap(), CodeRule { score, ..rule.clone() });
    let (all, reward) = (reward(CodeScore::All), reward(CodeScore::Share));
    let sample = |response: &str, tests: Value| {
        let metadata = [("tests".to_owned(), tests)].into_iter().collect();
        Sample { response: response.to_owned(), prompt: "add {code}".into(), metadata, ..Sample::default() }
    };
    let tests = json!(["assert f(1) == 2", "assert f(2) == 4"]);
    assert_eq!(reward.reward(&sample("```python\nx * 2\n```", tests.clone())), Ok(1.0));
    assert_eq!(reward.reward(&sample("x + 1", tests.clone())), Ok(0.5));
    assert_eq!(all.reward(&sample("x + 1", tests.clone())), Ok(0.0));
    assert!(reward.reward(&sample("x", json!(7))).unwrap_err().contains("no tests"));
    assert!(reward.reward(&Sample::default()).unwrap_err().contains("metadata[\"tests\"]"));
}

#[test]
fn a_model_tries_code_out_reads_what_it_printed_and_is_graded_by_tests() {
    let make = programming_environment(judge(), "tests");
    let metadata = [("tests".to_owned(), json!(["assert f(2) == 4", "assert f(3) == 9"]))].into_iter().collect();
    let episode = Episode { prompt: Prompt { text: "Square x.".into(), metadata, ..Prompt::default() }, ..Episode::default() };
    let deadline = Instant::now() + Duration::from_secs(60);
    let mut env = make();
    assert_eq!(env.reset(&episode, deadline).unwrap()[0].content, "Square x.");
    assert_eq!(env.tools()[0].name, "python");
    let call = |code: &str| {
        let arguments = [("code".to_owned(), code.into())].into_iter().collect();
        Action { calls: vec![ToolCall::new("python", arguments)], ..Action::default() }
    };
    let result = |env: &mut Box<dyn Environment>, code: &str| env.step(&call(code), deadline).unwrap().results.remove(0);
    let printed = result(&mut env, "print(3 ** 2)");
    assert_eq!((printed.content.as_str(), printed.success), ("9\n", true));
    let failed = result(&mut env, "print(1)\n1 / 0");
    assert!(!failed.success && failed.content.contains("1\n") && failed.content.contains("ZeroDivisionError"), "{failed:?}");
    let long = result(&mut env, "print('y' * 100 + 'n' * 12000)");
    assert!(long.content.starts_with("yyy") && long.content.len() < 5000, "{long:?}");
    let slow = env.step(&call("while True: pass"), Instant::now() + Duration::from_secs(1)).unwrap();
    assert!(slow.results[0].content.contains("time was up"), "{slow:?}");
    assert!(env.step(&Action { malformed: 1, ..Action::default() }, deadline).unwrap().results.is_empty());
    let answer = Action { text: "So:\n```python\ndef f(x): return 2 * x\n```".to_owned(), ..Action::default() };
    assert!(env.step(&answer, deadline).unwrap().done);
    // It goes on elsewhere from what was saved.
    let saved = env.save().unwrap();
    let mut other = make();
    other.reset(&episode, deadline).unwrap();
    assert_eq!(other.grade(deadline).unwrap(), Grade::correct(false));
    other.restore(&saved).unwrap();
    let grade = other.grade(deadline).unwrap();
    assert_eq!((grade.reward, grade.correct, &grade.metadata["tests_passed"]), (0.5, Some(false), &json!(1)));
}

/// Metadata with pairs of equal numbers below `count` as tests.
fn tested(count: usize) -> Map<String, Value> {
    let numbers: Vec<String> = (0..count).map(|number| number.to_string()).collect();
    [("tests".to_owned(), json!({ "inputs": numbers, "outputs": numbers }))].into_iter().collect()
}

/// Begins a rollout whose answer is `code`, with the tests of [`tested`].
fn answered(sandbox: &Sandbox, code: &str, count: usize) -> Box<dyn Environment> {
    let episode = Episode { prompt: Prompt { metadata: tested(count), ..Prompt::default() }, ..Episode::default() };
    let mut env = programming_environment(sandbox.clone(), "tests")();
    env.reset(&episode, Instant::now()).unwrap();
    env.step(&Action { text: code.to_owned(), ..Action::default() }, Instant::now()).unwrap();
    env
}

#[test]
fn grading_ends_at_its_deadline_and_has_time_for_pairs_after_one_that_hangs() {
    let limits = Limits { wall: Duration::from_secs(60), cpu: Duration::from_secs(60), ..limits() };
    let sandbox = Sandbox::new(SandboxConfig { limits, ..config() }).unwrap();
    let hangs = |below: usize| format!("n = int(input())\nwhile n < {below}: pass\nprint(n)");
    let slow = "import time\ntime.sleep(2)\nprint(input())";
    // The last one passes, because results that a deadline decided are not cached.
    for (code, count, seconds, reward) in
        [(hangs(20), 20, 1, 0.0), (hangs(1), 4, 12, 0.75), (slow.to_owned(), 1, 1, 0.0), (slow.to_owned(), 1, 60, 1.0)]
    {
        let mut env = answered(&sandbox, &code, count);
        let deadline = Instant::now() + Duration::from_secs(seconds);
        let grade = env.grade(deadline).unwrap();
        assert_eq!(grade.reward, reward, "{code}: {grade:?}");
        assert!(Instant::now() < deadline + Duration::from_secs(20), "{code}");
    }
    // A wrong result that was in time is cached.
    let tests = CodeTests::from_json(&json!({"fn_name": "f", "inputs": [[1]], "outputs": [0]})).unwrap();
    let code = "import time\ndef f(x): return time.monotonic_ns()";
    let [first, again] = [(); 2].map(|()| sandbox.run_tests(code, &tests, Instant::now() + Duration::from_secs(50)).unwrap());
    assert!(first[0].is_err() && first == again, "{first:?} {again:?}");
}

#[test]
fn waiting_for_other_programs_until_the_deadline_is_no_timeout_of_a_rollout() {
    let limits = Limits { wall: Duration::from_secs(30), ..limits() };
    let sandbox = Sandbox::new(SandboxConfig { concurrency: 1, limits, ..config() }).unwrap();
    let tokenizer = Arc::new(Tokenizer::characters("()/:<>abcdefghijklmnopqrstuvwxyz \n", 64).unwrap());
    // A step that runs a program, and a grade.
    let says = |_: &str, index| ["<python><code>print()</code></python>", "print(input())"][index as usize].to_owned();
    let agent = Agent::by(programming_environment(sandbox.clone(), "tests")).parser(ToolFormat::Xml);
    let agent = agent.limits(|of| (of.step_timeout, of.replays) = (1.5, 0));
    let prompt = Prompt { metadata: tested(1), ..Prompt::from("repeat") };
    let params = SamplingParams { max_new_tokens: 64, ..SamplingParams::default() };
    let mark = format!("mark-slot-{}", std::process::id());
    let mut other = Job::python("import time\ntime.sleep(6)");
    other.arguments.push(mark.clone());
    std::thread::scope(|scope| {
        let other = scope.spawn(|| sandbox.run(&other).unwrap());
        while !processes().any(|line| line.contains(&mark)) {
            assert!(!other.is_finished());
            std::thread::sleep(Duration::from_millis(5));
        }
        let mut engine = Speaker::new(&tokenizer, says);
        let groups = roll_out(&mut engine, &tokenizer, Some(&agent), vec![prompt], 2, &params).unwrap();
        for sample in &groups[0].samples {
            assert_eq!(sample.metadata["stop_reason"], "environment_failed", "{sample:?}");
            assert!(why_lost(sample).unwrap().contains("too many other programs"), "{sample:?}");
        }
        assert!(other.join().unwrap().succeeded());
    });
}
