//! What a run says while it lives (R124, R137): lines that a person reads, on standard output, and above the progress line on a terminal.

use std::path::Path;

use crate::running::{GRPO, SFT, TINY_MODEL, plain_run_args, rollflow, run_args};
use crate::terminal::on_terminal;

/// Where this line stands; it stands there once.
fn at(lines: &[&str], starts_with: &str) -> usize {
    let found: Vec<usize> = (0..lines.len()).filter(|&at| lines[at].starts_with(starts_with)).collect();
    assert_eq!(found.len(), 1, "{starts_with:?} once in {lines:#?}");
    found[0]
}

/// The lines, each of which starts with what is expected. Stages run side by side, so only what one stage says is in order.
fn assert_in_order(lines: &[&str], expected: &[&str]) {
    let places: Vec<usize> = expected.iter().map(|start| at(lines, start)).collect();
    assert!(places.is_sorted(), "{expected:?} in this order: {lines:#?}");
}

fn checkpoint(run: &Path, step: u64) -> String {
    format!("Saved checkpoint to {}", run.join(format!("checkpoints/step_{step:06}")).display())
}

/// The names of a step's numbers.
fn shown(line: &str) -> Vec<&str> {
    line.split_whitespace().filter_map(|word| Some(word.split_once('=')?.0)).collect()
}

#[test]
fn supervised_training_says_how_it_begins_goes_and_ends() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let sets = ["sft.steps=4", "sft.batch=8", "sft.fraction=0.5", "checkpoint.every=2", "observe.log_every=2"];
    let sets = [TINY_MODEL, &["sft.schedule.warmup=1"], &sets].concat();
    let ended = rollflow(&plain_run_args(SFT, &run, &sets)).ok();
    let lines: Vec<&str> = ended.out.lines().collect();
    assert_eq!(lines[..4], ["Starting SFT training…", "  Samples: 50", "  Steps: 4", "  Batch size: 8"]);
    assert_in_order(&lines, &["  Batch", "Step 1:", "Step 2:", "Step 4:", "Training complete!", "sft-addition finished"]);
    assert_in_order(&lines, &["  Batch", &checkpoint(&run, 2), &checkpoint(&run, 4), "Training complete!"]);
    assert!(!ended.out.contains("Step 3:"), "log_every");
    assert_eq!(shown(lines[at(&lines, "Step 2:")]), ["loss", "grad_norm", "lr"]);
}

#[test]
fn reinforcement_says_syncs_and_checkpoints_too() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let sets = ["train.steps=4", "checkpoint.every=2", "observe.log_every=2", "observe.progress=false"];
    let ended = rollflow(&run_args(GRPO, &run, &sets)).ok();
    let lines: Vec<&str> = ended.out.lines().collect();
    let reinforcement = at(&lines, "Starting RL training…");
    assert_in_order(&lines[..reinforcement], &["Starting SFT training…", "Step 1:", "Step 2:", "Training complete!"]);
    let lines = &lines[reinforcement..];
    assert_eq!(lines[1..3], ["  Steps: 4", "  Batch size: 4 groups of 4"]);
    assert_in_order(lines, &["Step 1:", "Step 2:", "Step 4:", "RL training complete!", "grpo-addition finished"]);
    assert_in_order(lines, &[&checkpoint(&run, 2), &checkpoint(&run, 4), "RL training complete!"]);
    // Versions 2 and 4 are of steps in which nothing is logged.
    let synced = [1, 3, 5].map(|version| format!("Synced weights to 1 engines (version {version})"));
    assert_in_order(lines, &synced.each_ref().map(String::as_str));
    assert_eq!(lines.iter().filter(|line| line.starts_with("Synced")).count(), 3);
    assert_eq!(shown(lines[at(lines, "Step 2:")]), ["reward", "loss", "grad_norm", "lr"]);
}

#[test]
fn on_a_terminal_lines_stand_above_one_progress_line() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    // Long enough for the progress line to be drawn again and again between the lines.
    let (code, screen) = on_terminal(&run_args(GRPO, &run, &["train.steps=400", "observe.log_every=1"]));
    let lines: Vec<&str> = screen.iter().map(String::as_str).collect();
    assert_eq!(code, Some(0), "{lines:#?}");
    let reinforcement = at(&lines, "Starting RL training…");
    let progress: Vec<usize> = (0..lines.len()).filter(|&at| lines[at].contains("step 400/400")).collect();
    assert_eq!(progress.len(), 1, "{lines:#?}");
    assert_eq!(lines.iter().filter(|line| line.contains(['━', '┄'])).count(), 1, "one progress line: {lines:#?}");
    for step in 1..=400 {
        let said = reinforcement + at(&lines[reinforcement..], &format!("Step {step}:"));
        assert_eq!(shown(lines[said]), ["reward", "loss", "grad_norm", "lr"]);
        assert!(said < progress[0], "{lines:#?}");
    }
    assert_in_order(&lines, &[&checkpoint(&run, 400), "RL training complete!", "grpo-addition finished"]);
}

#[test]
fn a_run_a_resume_and_a_launch_print_each_warning_of_the_recipe_once() {
    let folder = tempfile::tempdir().unwrap();
    let (run, shared) = (folder.path().join("run"), folder.path().join("shared"));
    let sets = ["train.max_grad_norm=20", "train.steps=1", "train.threads=1"];
    let resume = ["resume", run.to_str().unwrap(), "--set", "train.steps=2"];
    let launch: Vec<&str> =
        ["launch", "--ranks", "2"].into_iter().chain(run_args(GRPO, &shared, &sets).into_iter().skip(1)).collect();
    for args in [&run_args(GRPO, &run, &sets)[..], &resume, &launch] {
        let ended = rollflow(args).ok();
        let warned = ended.err.matches("warning: train.max_grad_norm is 20.0, far from what is common").count();
        assert_eq!(warned, 1, "{args:?}: {}", ended.err);
    }
}
