//! Distillation by the command: the recipe's student reaches its teacher's accuracy, and what cannot be distilled is refused by name.

use serde_json::Value;

use crate::running::{SFT, read, rollflow};

const DISTILL: &str = "pipelines/recipes/distill.toml";

#[test]
fn a_small_student_learns_its_teachers_sums_without_a_reward() {
    let folder = tempfile::tempdir().unwrap();
    let (teacher, student) = (folder.path().join("teacher"), folder.path().join("student"));
    let path = |path: &std::path::Path| path.to_str().unwrap().to_owned();
    // The shipped teacher is larger: a debug build would take minutes.
    let sizes = ["model.hidden=64", "model.layers=2", "model.intermediate=192"].map(str::to_owned);
    let run = |recipe: &str, out: &std::path::Path, sets: &[String]| {
        let out = path(out);
        let sets = sets.iter().flat_map(|set| ["--set", set]);
        let ended = rollflow(&["run", recipe, "--out", &out].into_iter().chain(sets).collect::<Vec<_>>());
        assert_eq!(ended.code, Some(0), "{}", ended.err);
        ended
    };
    let taught = ["sft.lr=3e-3", "sft.steps=250"].map(str::to_owned);
    run(SFT, &teacher, &[&sizes[..], &taught[..]].concat());
    let of_teacher = format!("reference.path={:?}", path(&teacher));
    let sets = ["batch.groups=32", "train.steps=300", "train.target_reward=0.9", "generate.max_num_seqs=64"];
    run(DISTILL, &student, &[&sizes[..], &sets.map(str::to_owned)[..], &[of_teacher]].concat());
    let rows: Vec<Value> = read(&student.join("metrics.jsonl")).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let mean = |rows: &[Value], key: &str| rows.iter().map(|row| row[key].as_f64().unwrap()).sum::<f64>() / rows.len() as f64;
    let (first, last) = (&rows[..10], &rows[rows.len() - 10..]);
    assert!(
        mean(last, "reward_mean") > 0.25 && mean(first, "reward_mean") < 0.1,
        "{} {}",
        mean(first, "reward_mean"),
        mean(last, "reward_mean")
    );
    assert!(mean(last, "teacher_kl_mean_nats") < 0.5 * mean(first, "teacher_kl_mean_nats"));
    let other = rollflow(&[
        "run",
        DISTILL,
        "--out",
        &path(&folder.path().join("other")),
        "--set",
        "model.vocab=80",
        "--set",
        &format!("reference.path={:?}", path(&teacher)),
    ]);
    assert!(other.code == Some(1) && other.err.contains("vocabulary") || other.err.contains("tokens"), "{}", other.err);
}

#[test]
fn distillation_needs_a_teacher_and_no_critic() {
    let check = |sets: &[&str]| {
        rollflow(
            &[&["check", "pipelines/recipes/ppo.toml"][..], &sets.iter().flat_map(|set| ["--set", set]).collect::<Vec<_>>()]
                .concat(),
        )
    };
    let bad = check(&["train.distill={}"]);
    assert_eq!(bad.code, Some(2));
    assert!(bad.err.contains("`train.distill` looks at a reference policy, and there is no section [reference]"), "{}", bad.err);
    assert!(bad.err.contains("`train.distill` sets advantages, and so does [critic]"), "{}", bad.err);
}
