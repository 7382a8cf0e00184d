//! `diff`: where two runs differ, and its exit codes.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::running::{Ended, GRPO, finished, read, rollflow, rollflow_with, run_args};

fn diff(a: &Path, b: &Path, args: &[&str]) -> Ended {
    rollflow(&[&["diff", a.to_str().unwrap(), b.to_str().unwrap()], args].concat())
}

#[test]
fn a_run_equals_itself_and_a_copy_with_exit_code_0() {
    let folder = tempfile::tempdir().unwrap();
    let [a, b] = ["a", "b"].map(|name| folder.path().join(name));
    [&a, &b].into_iter().for_each(|run| finished(run, &[]));
    let same = diff(&a, &b, &[]);
    assert_eq!(same.code, Some(0), "{}{}", same.out, same.err);
    for line in ["recipe: no difference", "record: no difference", "metrics: no difference", "  reward_mean "] {
        assert!(same.out.lines().any(|of| of.starts_with(line)), "{line}: {}", same.out);
    }
    let json: Value = serde_json::from_str(&diff(&a, &b, &["--json"]).out).unwrap();
    assert_eq!((&json["equal"], &json["first_difference"]), (&Value::Bool(true), &Value::Null));
}

#[test]
fn keys_facts_and_the_first_differing_step_are_shown_with_both_values_and_exit_code_1() {
    let folder = tempfile::tempdir().unwrap();
    let [a, b] = ["a", "b"].map(|name| folder.path().join(name));
    finished(&a, &[]);
    finished(&b, &["seed=3", "train.lr=2e-3"]);
    let found = diff(&a, &b, &[]);
    assert_eq!(found.code, Some(1), "{}", found.err);
    let cells = |name: &str| {
        let line = found.out.lines().find(|line| line.trim_start().starts_with(name));
        line.unwrap_or_else(|| panic!("{name}: {}", found.out)).split_whitespace().skip(1).map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!((cells("train.lr"), cells("seed")), (vec!["0.0003".into(), "0.002".into()], vec!["0".into(), "3".into()]));
    assert!(found.out.contains("metrics: first difference at step 1, in "), "{}", found.out);
    assert_eq!(cells("learning_rate"), ["0.0003", "0.002"]);

    // A number that only one run has at its last step.
    let rows = read(&a.join("metrics.jsonl"));
    let (start, last) = rows.trim_end().rsplit_once('\n').unwrap();
    fs::write(b.join("metrics.jsonl"), format!("{start}\n{}\n", last.replacen('{', "{\"new\":\"NaN\",", 1))).unwrap();
    let json: Value = serde_json::from_str(&diff(&a, &b, &["--json"]).out).unwrap();
    assert_eq!(json["first_difference"], serde_json::json!({"step": 3, "metrics": {"new": [null, "NaN"]}}));
    assert_eq!(json["recipe"]["train.lr"], serde_json::json!(["0.0003", "0.002"]));
}

#[test]
fn folders_without_a_run_are_named_together_with_exit_code_2() {
    let folder = tempfile::tempdir().unwrap();
    let [a, b] = ["no", "none"].map(|name| folder.path().join(name));
    let refused = diff(&a, &b, &[]);
    assert_eq!(refused.code, Some(2));
    assert!([&a, &b].iter().all(|run| refused.err.contains(run.to_str().unwrap())), "{}", refused.err);
}

/// A run's record says of what data and with what variables it was made, and keeps no secret.
#[test]
fn data_that_changed_and_variables_of_libraries_are_found() {
    let folder = tempfile::tempdir().unwrap();
    let (data, [a, b]) = (folder.path().join("data.jsonl"), ["a", "b"].map(|name| folder.path().join(name)));
    let run = |out: &Path, line: &str, threads: &str| {
        fs::write(&data, line).unwrap();
        let task = format!("task={{data={data:?}}}");
        let variables = [("OMP_WAIT_POLICY", threads), ("CUDA_SECRET_KEY", "hidden-one"), ("UNRELATED", "hidden-two")];
        rollflow_with(&run_args(GRPO, out, &[&task, "train.steps=1"]), &variables).ok();
        let record = read(&out.join("run.json"));
        assert!(!record.contains("hidden-") && record.contains("OMP_WAIT_POLICY"), "{record}");
    };
    run(&a, "{\"prompt\": \"1+1=\", \"answer\": \"2\"}\n", "active");
    run(&b, "{\"prompt\": \"1+1=\", \"answer\": \"3\"}\n", "passive");
    let json: Value = serde_json::from_str(&diff(&a, &b, &["--json"]).out).unwrap();
    assert!(json["record"]["contents of task"].is_array(), "{json}");
    assert_eq!(json["record"]["variable OMP_WAIT_POLICY"], serde_json::json!(["active", "passive"]));
}
