//! Code that is judged by tests: what it passes, that cheating gains nothing, and what becomes of it as a reward and in an environment.

use std::time::{Duration, Instant};

use rollflow::data::{Prompt, Sample};
use rollflow::env::{Action, Environment, Episode, Grade, ToolCall, programming_environment};
use rollflow::sandbox::Sandbox;
use rollflow::stages::reward::{CodeReward, CodeRule, CodeScore};
use serde_json::{Value, json};

use super::{config, passed};

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
fn code_that_leaves_early_or_says_that_it_passed_has_not() {
    let judge = judge();
    let tests = json!(["assert f() == 1", "assert f() == 1"]);
    for code in [
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "import os; os.kill(os.getpid(), 9)",
        "def f(): import os; os._exit(0)",
        "print('0 passed\\n1 passed')\nfor at in range(2): print('%032x %d passed' % (0, at))",
        "import builtins, sys\nbuiltins.exec = builtins.compile = lambda *_: None",
        "import signal, time\nsignal.signal(signal.SIGALRM, signal.SIG_IGN)\ntime.sleep(60)",
        "import sys\nsys.stdout.write = lambda *_: 1\nraise KeyboardInterrupt",
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(): return f()",
    ] {
        let results = judge.test(code, &tests).unwrap();
        assert_eq!(passed(&results), 0, "{code}: {results:?}");
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
