//! `generate` and `score`: one looks at a model without a run, by the same engine and the same forward pass that a run uses.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rollflow::prelude::*;
use serde_json::{Value, json};

use crate::running::{GRPO, command, finished, rollflow};

/// A run that has ended, and its folder.
pub fn tiny_run(folder: &Path, sets: &[&str]) -> PathBuf {
    let run = folder.join("run");
    finished(&run, sets);
    run
}

/// What the command printed, given this on standard input.
fn told(args: &[&str], input: &str) -> (Option<i32>, String) {
    let mut child = command(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    (output.status.code(), String::from_utf8(output.stdout).unwrap())
}

fn lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn what_is_generated_is_what_score_finds_as_likely_as_the_engine_did() {
    let folder = tempfile::tempdir().unwrap();
    let run = tiny_run(folder.path(), &[]);
    let run = run.to_str().unwrap();
    let generate = ["generate", run, "3+4=", "--seed", "5", "--max-tokens", "12"];
    let answer = rollflow(&[&generate[..], &["--json"]].concat()).ok();
    let answer: Value = serde_json::from_str(&answer.out).unwrap();
    assert!(answer["tokens"].as_array().is_some_and(|tokens| !tokens.is_empty() && tokens.len() <= 12), "{answer}");

    // Shown as it comes, from standard input too, and the same each time.
    let text = format!("{}\n", answer["text"].as_str().unwrap());
    assert_eq!(rollflow(&generate).out, text);
    assert_eq!(told(&["generate", run, "--seed", "5", "--max-tokens", "12"], "3+4=\n"), (Some(0), text));
    assert_ne!(rollflow(&["generate", run, "3+4=", "--seed", "6", "--max-tokens", "12", "--json"]).out, answer.to_string());

    let policy = Policy::load(Path::new(run).join("checkpoints/step_000003")).unwrap();
    let prompt = policy.tokenizer().encode("3+4=").unwrap();
    let sampled: Vec<u32> = serde_json::from_value(answer["tokens"].clone()).unwrap();
    let tokens = [prompt.clone(), sampled].concat();
    let asked = json!({"id": "a", "tokens": tokens});
    let (code, scored) = told(&["score", run], &format!("{asked}\n{}\n", json!({"prompt": "3+4=", "completion": "7"})));
    assert_eq!(code, Some(0));
    let scored = lines(&scored);
    assert_eq!(scored[0]["id"], "a");
    let found = scored[0]["log_probs"].as_array().unwrap();
    assert!(found[0].is_null(), "nothing stands before the first token");
    for (found, sampled) in found[prompt.len()..].iter().zip(answer["log_probs"].as_array().unwrap()) {
        assert!((found.as_f64().unwrap() - sampled.as_f64().unwrap()).abs() < 1e-4, "{found} {sampled}");
    }
    let completion = scored[1]["log_probs"].as_array().unwrap();
    assert_eq!(completion.iter().filter(|found| !found.is_null()).count(), 1, "the prompt is given: {completion:?}");
}

#[test]
fn a_line_that_can_not_be_scored_says_why_and_harms_no_other() {
    let folder = tempfile::tempdir().unwrap();
    let run = tiny_run(folder.path(), &[]);
    let file = folder.path().join("lines.jsonl");
    let lines_of_file = [
        &b"{\"text\":\"1+1=2\"}\nnonsense\n{\"tokens\":[1,9999]}\n\n{\"text\":\"5\",\"tokens\":[1]}\n"[..],
        b"{\"text\":\"\xff\"}\n{\"text\":\"2\"}\n",
    ];
    std::fs::write(&file, lines_of_file.concat()).unwrap();
    let scored = rollflow(&["score", run.to_str().unwrap(), file.to_str().unwrap()]);
    assert_eq!(scored.code, Some(1));
    let rows = lines(&scored.out);
    let errors: Vec<(u64, &str)> = rows.iter().filter_map(|row| Some((row["line"].as_u64()?, row["error"].as_str()?))).collect();
    assert_eq!(errors.iter().map(|(line, _)| *line).collect::<Vec<_>>(), [2, 3, 5, 6], "blank lines count");
    assert!(errors[1].1.contains("vocabulary"), "{errors:?}");
    assert!(rows[0]["sum"].as_f64().unwrap() < 0.0);
    assert_eq!((rows[5]["sum"].as_f64(), rows[5]["mean"].is_null()), (Some(0.0), true), "one token has nothing before it");
    for temperature in ["0", "-1", "nan", "inf"] {
        let refused = rollflow(&["score", run.to_str().unwrap(), &format!("--temperature={temperature}")]);
        assert!(refused.code == Some(2) && refused.err.contains("above 0"), "{}", refused.err);
    }
}

#[test]
fn what_is_neither_a_model_nor_a_run_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    for args in [&["generate", path, "a"][..], &["score", path]] {
        let refused = rollflow(args);
        assert_eq!(refused.code, Some(1));
        assert!(refused.err.contains(path) && refused.err.contains("neither a model"), "{}", refused.err);
    }
}

/// Whoever closes the pipe has seen enough: no panic, no error.
#[test]
fn a_closed_pipe_is_no_failure() {
    let folder = tempfile::tempdir().unwrap();
    let run = tiny_run(folder.path(), &[]);
    let run = run.to_str().unwrap();
    for args in [&["generate", run, "3+4=", "--max-tokens", "60"][..], &["check", GRPO], &["report", run], &["score", run]] {
        let plain = command(args);
        let mut shell = Command::new("sh");
        // The reader is gone when the first word comes.
        shell.args(["-c", "{ sleep 0.2; echo '{\"text\":\"1\"}' | \"$0\" \"$@\"; echo \"code $?\" >&2; } | true"]);
        let output = shell.arg(plain.get_program()).args(args).current_dir(plain.get_current_dir().unwrap()).output().unwrap();
        assert_eq!(String::from_utf8(output.stderr).unwrap().trim(), "code 0", "{args:?}");
    }
}
