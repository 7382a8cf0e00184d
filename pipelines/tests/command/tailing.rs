//! `tail` and the conditions of `--where`.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::running::{GRPO, Running, finished, json_lines, read, rollflow, run_args};
use crate::terminal::written_on_terminal;

const EVERY: [&str; 1] = ["observe.rollouts_every=1"];

#[test]
fn the_last_samples_of_a_finished_run_that_fit_are_printed_a_line_each() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    finished(&run, &EVERY);
    let tail = |args: &[&str]| rollflow(&[&["tail", run.to_str().unwrap()], args].concat());

    let last = tail(&[]);
    assert_eq!((last.code, last.out.lines().count()), (Some(0), 10), "{}{}", last.out, last.err);
    let line = last.out.lines().next().unwrap();
    let parts = ["step 3 · ", " · reward ", " tokens · ", " → "];
    assert!(parts.iter().all(|part| line.contains(part)) && !line.contains('\x1b'), "{line}");
    let some = tail(&["--last", "1000", "--where", "step == 2 && (sample < 2 || sample == 3)"]).out;
    assert_eq!(some.lines().count(), 4 * 3, "{some}");
    assert_eq!(tail(&["--where", "reward >= 7"]).out, "", "none fits");

    let wrong = tail(&["--where", "step == 2 && rewrad < 1"]);
    assert_eq!(wrong.code, Some(2));
    assert!(wrong.err.contains("unknown field `rewrad`") && wrong.err.contains("\n               ^"), "{}", wrong.err);
    assert_eq!(rollflow(&["tail", folder.path().to_str().unwrap()]).code, Some(2), "there is no run");
    fs::remove_file(run.join("rollouts.jsonl")).unwrap();
    let none = tail(&[]);
    assert!(none.code == Some(1) && none.err.contains("observe.rollouts_every = 1"), "{}", none.err);
}

#[test]
fn new_samples_of_a_run_are_printed_as_it_records_them_until_it_ends() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let mut running =
        Running::start(&run_args(GRPO, &run, &["train.steps=1000000", "train.target_reward=9", "observe.rollouts_every=1"]));
    running.until("it records samples", |_| !read(&run.join("rollouts.jsonl")).is_empty());
    let mut tail = Running::start(&["tail", run.to_str().unwrap(), "--last", "0", "--where", "sample == 1"]);
    let step = |line: &str| line.strip_prefix("step ")?.split(' ').next()?.parse::<u64>().ok();
    let first = tail.line(step);
    let later = tail.line(|line| step(line).filter(|step| *step > first));
    assert!(later > first && !tail.has_ended());
    running.interrupt();
    assert_eq!(running.end(), Some(0));
    assert_eq!(tail.end(), Some(0), "it ends with the run");
}

/// Replaces the values of `keys` in every recorded rollout.
pub fn rewrite_rollouts(run: &Path, keys: &[(&str, Value)]) {
    let file = run.join("rollouts.jsonl");
    let with = |mut line: Value| {
        keys.iter().for_each(|(key, value)| line[*key] = value.clone());
        format!("{line}\n")
    };
    fs::write(&file, json_lines(&file).into_iter().map(with).collect::<String>()).unwrap();
}

#[test]
fn a_terminal_gets_colours_and_no_command_of_a_completion() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    finished(&run, &EVERY);
    rewrite_rollouts(&run, &[("response", "a\x1b[2J\x1b]0;title\x07\nb".into()), ("advantage", 1.0.into())]);
    let args = ["tail", run.to_str().unwrap(), "--last", "1"];
    let shown = " a\\u{1b}[2J\\u{1b}]0;title\\u{7}\\nb\r\n";
    let (code, coloured) = written_on_terminal(&args, &[]);
    assert_eq!(code, Some(0));
    assert!(coloured.contains("\x1b[32mreward ") && coloured.ends_with(shown), "{coloured:?}");
    let (_, plain) = written_on_terminal(&args, &[("NO_COLOR", "1")]);
    assert!(!plain.contains('\x1b') && plain.ends_with(shown), "{plain:?}");
    let piped = rollflow(&args).out;
    assert!(!piped.contains('\x1b') && piped.lines().count() == 1, "{piped:?}");
}
