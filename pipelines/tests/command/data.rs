//! Recipes over data sets: what is drawn from where, what is left out, and that a run goes on where it was.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::crashes::refuses_fewer_steps;
use crate::running::{GRPO, SFT, rollflow, run_args};

/// 30 sums and a line that is none, as questions; 10 more as pairs.
fn data(folder: &Path) -> (String, String) {
    let (questions, pairs) = (folder.join("questions"), folder.join("pairs.json"));
    fs::create_dir_all(&questions).unwrap();
    let line = |n: usize| format!("{{\"question\": \"{}+{}=\", \"answer\": {}}}\n", n % 10, n / 10, n % 10 + n / 10);
    fs::write(questions.join("train-00000-of-00001.jsonl"), (0..30).map(line).collect::<String>() + "{\"other\": 1}\n").unwrap();
    fs::write(questions.join("test-00000-of-00001.jsonl"), line(99)).unwrap();
    let pair = |n: usize| serde_json::json!({"prompt": format!("{n}+{n}="), "completion": format!("{}", n + n)});
    fs::write(&pairs, serde_json::to_string(&(0..10).map(pair).collect::<Vec<_>>()).unwrap()).unwrap();
    (questions.display().to_string(), pairs.display().to_string())
}

fn rows(run: &Path) -> Vec<Value> {
    let text = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn total(rows: &[Value], key: &str) -> f64 {
    rows.iter().filter_map(|row| row[key].as_f64()).sum()
}

/// R042, R043, R045: weights are kept, and the sum of all sources is all that was trained.
#[test]
fn a_mixture_of_prompts_is_drawn_by_weight_counted_by_source_and_told() {
    let folder = tempfile::tempdir().unwrap();
    let (questions, pairs) = data(folder.path());
    let run = folder.path().join("run");
    let task = format!(
        "task={{kind=\"data\",shuffle=true,sources=[{{data={questions:?},weight=3}},{{data={pairs:?},name=\"doubles\",weight=1}}]}}"
    );
    let sft = format!("sft={{steps=2,batch=4,sources=[{{data={pairs:?},repeat=2}}]}}");
    let sets = [task.as_str(), &sft, "train.steps=10", "reward={kind=\"exact\"}"];
    let ended = rollflow(&run_args(GRPO, &run, &sets));
    assert_eq!(ended.code, Some(0), "{}", ended.err);
    for said in ["Data: questions: 30 records; skipped: 1 of no known shape", "Data: doubles: 10 records"] {
        assert!(ended.out.contains(said), "{}", ended.out);
    }
    let rows = rows(&run);
    let (questions, doubles) = (total(&rows, "source_groups_questions"), total(&rows, "source_groups_doubles"));
    assert_eq!(questions + doubles, 40.0);
    assert!((28.0..=32.0).contains(&questions), "{questions} of 40 at a weight of 3 to 1");
    assert!(total(&rows, "source_tokens_questions") > 0.0);
    let rollouts = fs::read_to_string(run.join("rollouts.jsonl")).unwrap();
    let rollout: Value = serde_json::from_str(rollouts.lines().next().unwrap()).unwrap();
    assert!(rollout["metadata"]["answer"].is_string(), "R005: {rollout}");
}

/// Laws C1, C2: the same steps on the same data, whether or not the run was interrupted; other data is refused.
#[test]
fn supervised_training_on_data_sets_goes_on_where_it_was() {
    let folder = tempfile::tempdir().unwrap();
    let (questions, pairs) = data(folder.path());
    let sources = format!("sft.sources=[{{data={questions:?},split=\"train[:80%]\",repeat=2}},{{data={pairs:?}}}]");
    let tiny = ["model.hidden=16", "model.layers=1", "model.heads=2", "model.kv_heads=1", "model.intermediate=32", "sft.batch=4"];
    let args = |run: &Path, steps: &str| {
        let sets = tiny.iter().copied().chain([sources.as_str(), steps, "checkpoint.every=3", "sft.schedule.warmup=0"]);
        let sets: Vec<String> = sets.flat_map(|set| ["--set".to_owned(), set.to_owned()]).collect();
        [vec!["run".to_owned(), SFT.to_owned(), "--out".to_owned(), run.display().to_string()], sets].concat()
    };
    let start = |run: &Path, steps: &str| {
        let args = args(run, steps);
        let ended = rollflow(&args.iter().map(String::as_str).collect::<Vec<_>>());
        assert_eq!(ended.code, Some(0), "{}", ended.err);
    };
    let (whole, parts) = (folder.path().join("whole"), folder.path().join("parts"));
    start(&whole, "sft.steps=9");
    start(&parts, "sft.steps=3");
    let resume = || rollflow(&["resume", parts.to_str().unwrap(), "--set", "sft.steps=9"]);
    let resumed = resume();
    assert_eq!(resumed.code, Some(0), "{}", resumed.err);
    // The schedule's end is not the same, the data is.
    let drawn = |run: &Path| -> Vec<(Value, Value)> {
        rows(run).iter().map(|row| (row["source_groups_questions"].clone(), row["source_tokens_pairs"].clone())).collect()
    };
    assert_eq!((drawn(&parts), drawn(&parts).len()), (drawn(&whole), 9));
    refuses_fewer_steps(&parts, "sft.steps", 8, 9);
    fs::write(&pairs, "[{\"prompt\": \"1+1=\", \"completion\": \"2\"}]").unwrap();
    let refused = rollflow(&["resume", parts.to_str().unwrap(), "--set", "sft.steps=12"]);
    assert!(refused.code == Some(1) && refused.err.contains("trained on other data"), "{}", refused.err);
}

#[test]
fn a_recipe_with_data_that_is_not_there_or_contradicts_itself_is_refused_with_all_of_it() {
    let sets = [
        "task={kind=\"data\",sources=[{data=\"org/nowhere\",weight=1},{data=\"pipelines/data/word_problems.jsonl\",split=\"train[\"}]}",
        "sft.data=\"no/such.jsonl\"",
    ];
    let refused = rollflow(&["check", GRPO, "--set", sets[0], "--set", sets[1]]);
    assert_eq!(refused.code, Some(2));
    for part in [
        "`task.sources[1].split` is \"train[\"",
        "give all of them one, or none",
        "hf download --repo-type dataset org/nowhere",
        "no/such.jsonl",
    ] {
        assert!(refused.err.contains(part), "{part}: {}", refused.err);
    }
}

#[test]
fn a_bad_line_ends_the_run_before_it_begins_and_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("x.jsonl");
    fs::write(&file, "{\"prompt\": \"1+1=\", \"completion\": \"2\"}\n{\"prompt\": \n").unwrap();
    let (run, set) = (folder.path().join("run"), format!("sft.data={file:?}"));
    let ended = rollflow(&["run", SFT, "--out", run.to_str().unwrap(), "--set", &set]);
    assert!(ended.code == Some(1) && ended.err.contains("x.jsonl:2: not JSON"), "{}", ended.err);
}
