//! Distillation by the command: the recipe's student reaches its teacher's accuracy, and what cannot be distilled is refused by name.

use serde_json::Value;

use crate::model_serving::Server;
use crate::running::{SFT, TINY_MODEL, plain_run_args, read, rollflow, rows, with_sets};

const DISTILL: &str = "pipelines/recipes/distill.toml";

#[test]
fn a_small_student_learns_its_teachers_sums_without_a_reward() {
    let folder = tempfile::tempdir().unwrap();
    let (teacher, student) = (folder.path().join("teacher"), folder.path().join("student"));
    let path = |path: &std::path::Path| path.to_str().unwrap().to_owned();
    // The shipped teacher is larger: a debug build would take minutes.
    let sizes = ["model.hidden=64", "model.layers=2", "model.intermediate=192"].map(str::to_owned);
    let run = |recipe: &str, out: &std::path::Path, sets: &[String]| rollflow(&plain_run_args(recipe, out, sets)).ok();
    let taught = ["sft.lr=3e-3", "sft.steps=250"].map(str::to_owned);
    run(SFT, &teacher, &[&sizes[..], &taught[..]].concat());
    let of_teacher = format!("teacher.path={:?}", path(&teacher));
    let sets = ["batch.groups=32", "train.steps=300", "train.target_reward=0.9", "generate.max_num_seqs=64"];
    run(DISTILL, &student, &[&sizes[..], &sets.map(str::to_owned)[..], std::slice::from_ref(&of_teacher)].concat());
    let metrics = rows(&student);
    let mean = |rows: &[Value], key: &str| rows.iter().map(|row| row[key].as_f64().unwrap()).sum::<f64>() / rows.len() as f64;
    let (first, last) = (&metrics[..10], &metrics[metrics.len() - 10..]);
    assert!(
        mean(last, "reward_mean") > 0.25 && mean(first, "reward_mean") < 0.1,
        "{} {}",
        mean(first, "reward_mean"),
        mean(last, "reward_mean")
    );
    assert!(mean(last, "teacher_kl_mean_nats") < 0.5 * mean(first, "teacher_kl_mean_nats"));
    // Over the whole vocabulary every token of the teacher counts: the student is there sooner.
    let whole = folder.path().join("whole");
    let over = [&of_teacher, "teacher.top_k=64", "teacher.beta=0.5"].map(str::to_owned);
    let steps = ["train.steps=150", "train.target_reward=0.9"].map(str::to_owned);
    run(
        DISTILL,
        &whole,
        &[&sizes[..], &sets[..1].iter().map(|set| (*set).to_owned()).collect::<Vec<_>>(), &steps, &over].concat(),
    );
    let metrics = rows(&whole);
    let (first, last) = (&metrics[..10], &metrics[metrics.len() - 10..]);
    let divergence = |rows| mean(rows, "teacher_divergence_mean_nats");
    assert!(divergence(last) < 0.5 * divergence(first), "{} {}", divergence(first), divergence(last));
    let other = rollflow(&[
        "run",
        DISTILL,
        "--out",
        &path(&folder.path().join("other")),
        "--set",
        "model.vocab=80",
        "--set",
        &of_teacher,
    ]);
    let refused = "the tokenizers differ: the token ";
    assert!(other.code == Some(1) && other.err.contains(refused), "{}", other.err);
}

/// A teacher on a server judges every token as the same teacher in the process does, and one that is gone ends the run by name.
#[test]
fn a_teacher_on_a_server_is_the_same_teacher() {
    let folder = tempfile::tempdir().unwrap();
    let teacher = folder.path().join("teacher");
    let run = |recipe: &str, out: &str, sets: &[&str]| {
        rollflow(&plain_run_args(recipe, &folder.path().join(out), &[TINY_MODEL, &["sft.steps=5"], sets].concat()))
    };
    run(SFT, "teacher", &["sft.schedule={}"]).ok();
    let server = Server::start(&teacher, &["--tinker", "--state", folder.path().join("state").to_str().unwrap()]);
    let sizes = ["train.steps=3", "batch.groups=4", "generate.max_num_seqs=8", "flow.max_staleness=0"];
    let here = format!("kind=\"frozen\",path={:?}", teacher.to_str().unwrap());
    let there = format!("kind=\"server\",url={:?},retries=1,pause=0.1", server.url);
    let by_tinker = format!("kind=\"tinker\",url={:?}", server.url);
    let rows = |name: &str, sets: &[&str]| -> Vec<Value> {
        run(DISTILL, name, &[&sizes[..], sets].concat()).ok();
        rows(&folder.path().join(name))
    };
    // By sampled tokens, by the likeliest, and by the whole vocabulary.
    let ways = ["", ",top_k=5, beta=0", ",top_k=100, beta=0.5"];
    for (nth, distill) in ways.into_iter().enumerate() {
        let rows = |name: &str, teacher: &str| rows(&format!("{name}-{nth}"), &[&format!("teacher={{{teacher}{distill}}}")]);
        let (local, served) = (rows("local", &here), [rows("served", &there), rows("tinker", &by_tinker)].concat());
        assert_eq!((local.len(), served.len()), (3, 6));
        for (local, served) in local.iter().cycle().zip(&served) {
            let divergence = (nth > 0).then_some("teacher_divergence_mean_nats");
            for key in ["teacher_kl_mean_nats", "loss", "grad_norm", "reward_mean"].into_iter().chain(divergence) {
                let (local, served) = (local[key].as_f64().unwrap(), served[key].as_f64().unwrap());
                assert!((local - served).abs() < 1e-3 * local.abs().max(1.0), "{distill} {key}: {local} {served}");
            }
        }
    }
    drop(server);
    let there = format!("teacher={{{there}}}");
    let gone = run(DISTILL, "gone", &[&sizes[..], &[&there]].concat());
    assert_eq!(gone.code, Some(1));
    // Samples are judged in parallel, and groups by several workers.
    let parts = ["stage \"teacher\" ", "failed: sample ", "cannot connect"];
    assert!(parts.iter().all(|part| gone.err.contains(part)), "{}", gone.err);
    // The likeliest tokens are scored as the engine scores them: at temperature 1.
    let greedy = rows("greedy", &[&format!("teacher={{{here}}}"), "generate.temperature=0"]);
    let gaps: Vec<f64> = greedy.iter().filter_map(|row| row["log_prob_gap_max_nats"].as_f64()).collect();
    assert!(!gaps.is_empty() && gaps.iter().all(|gap| *gap < 1e-3), "{greedy:?}");
    let warm = run(DISTILL, "warm", &[&sizes[..], &[&there, "generate.temperature=0.7"]].concat());
    assert!(warm.err.contains("`generate.temperature` is 0.7, and the server of [teacher] scores at 1"), "{}", warm.err);
}

/// Each data set has its teacher, in the process or on a server, and a teacher may read another prompt than the policy.
#[test]
fn teachers_go_by_data_set_and_may_be_given_a_hint() {
    let folder = tempfile::tempdir().unwrap();
    let run = |recipe: &str, out: &str, sets: &[&str]| {
        rollflow(&plain_run_args(recipe, &folder.path().join(out), &[TINY_MODEL, &["sft.steps=5"], sets].concat()))
    };
    for (name, seed) in [("one", "seed=1"), ("other", "seed=2")] {
        run(SFT, name, &["sft.schedule={}", seed]).ok();
    }
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let line = |a: u32, b: u32| format!("{{\"prompt\": \"{a}+{b}=\", \"answer\": \"{}\"}}\n", a + b);
    for (name, first) in [("low.jsonl", 0), ("high.jsonl", 5)] {
        let lines: String = (0..20).map(|at| line(first + at % 4, at / 4)).collect();
        std::fs::write(path(name), lines).unwrap();
    }
    let task = format!("task={{kind=\"data\", sources=[{{data={:?}}}, {{data={:?}}}]}}", path("low.jsonl"), path("high.jsonl"));
    let sizes = ["train.steps=3", "batch.groups=4", "generate.max_num_seqs=8", "flow.max_staleness=0", &task];
    let rows = |name: &str, teacher: &str| -> String {
        run(DISTILL, name, &[&sizes[..], &[&format!("teacher={{{teacher}, top_k=3}}")]].concat()).ok();
        read(&folder.path().join(name).join("metrics.jsonl"))
    };
    let [one, other] = ["one", "other"].map(|name| format!("kind=\"frozen\", path={:?}", path(name)));
    let alone = rows("alone", &one);
    let by_source = |low: &str, high: &str| format!("kind=\"by_source\", part=[{{{low}, sources=[\"low\"]}}, {{{high}}}]");
    assert_eq!(rows("twice", &by_source(&one, &one)), alone, "the same teacher twice is that teacher");
    assert_ne!(rows("each", &by_source(&one, &other)), alone);
    let server = Server::start(&folder.path().join("other"), &[]);
    let served = format!("kind=\"server\", url={:?}", server.url);
    let number =
        |rows: &str, key: &str| serde_json::from_str::<Value>(rows.lines().next_back().unwrap()).unwrap()[key].as_f64().unwrap();
    let (here, there) = (rows("here", &by_source(&one, &other)), rows("there", &by_source(&one, &served)));
    let key = "teacher_divergence_mean_nats";
    assert!((number(&here, key) - number(&there, key)).abs() < 1e-3, "{here} {there}");
    drop(server);
    // The policy's own prompt is no hint; the answer before it is.
    assert_eq!(rows("same", &format!("{one}, hint=\"{{prompt}}\"")), alone);
    assert_ne!(rows("hinted", &format!("{one}, hint=\"{{answer}} {{prompt}}\"")), alone);
    let missing =
        run(DISTILL, "missing", &[&sizes[..], &[&format!("teacher={{{one}, hint=\"{{solution}} {{prompt}}\"}}")]].concat());
    assert!(missing.code == Some(1) && missing.err.contains("`teacher.hint` asks for {solution}"), "{}", missing.err);
    let bare = format!("teacher={{kind=\"by_source\", part=[{{{one}, sources=[\"low\", \"no\"]}}]}}");
    let bad = rollflow(&["check", DISTILL, "--set", &task, "--set", &bare]);
    assert!(bad.code == Some(2) && bad.err.contains("names \"no\", which is no data set of the task"), "{}", bad.err);
    assert!(bad.err.contains("none scores every data set") && bad.err.contains("name high, or"), "{}", bad.err);
}

/// Without `[reward]` nothing is rewarded, whatever the data: the same steps are trained, and no row has a reward.
#[test]
fn distillation_needs_no_reward_and_goes_together_with_a_reference() {
    let folder = tempfile::tempdir().unwrap();
    let run = |recipe: &str, out: &str, sets: &[&str]| {
        rollflow(&plain_run_args(recipe, &folder.path().join(out), &[TINY_MODEL, sets].concat()))
    };
    assert_eq!(run(SFT, "teacher", &["sft.steps=30", "seed=1", "sft.schedule={}"]).code, Some(0));
    let of_teacher = format!("teacher.path={:?}", folder.path().join("teacher"));
    let rows = |recipe: &str, out: &str, sets: &[&str]| -> Vec<Value> {
        let sizes = ["sft.steps=5", "train.steps=3", "batch.groups=4", "generate.max_num_seqs=8", "flow.max_staleness=0"];
        run(recipe, out, &[&sizes[..], &[&of_teacher], sets].concat()).ok();
        rows(&folder.path().join(out))
    };
    let rewarded = rows(DISTILL, "rewarded", &[]);
    let recipe: String = read(&std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(DISTILL))
        .replace("[reward]\nkind = \"exact\"\n", "");
    let bare = folder.path().join("bare.toml");
    std::fs::write(&bare, recipe.replace("target_reward = 0.95\n", "")).unwrap();
    let unrewarded = rows(bare.to_str().unwrap(), "bare", &[]);
    assert_eq!((rewarded.len(), unrewarded.len()), (3, 3));
    for (with, without) in rewarded.iter().zip(&unrewarded) {
        for key in ["loss", "grad_norm", "teacher_kl_mean_nats", "entropy_nats"] {
            assert_eq!(with[key], without[key], "{key}");
        }
        let named = |row: &Value| {
            row.as_object().unwrap().keys().filter(|key| key.starts_with("reward") || key.as_str() == "group_pass_ratio").count()
        };
        assert_eq!((named(with), named(without)), (5, 0), "{without}");
    }
    // The distance from the start is a second scorer, with its own column.
    let held = rows(bare.to_str().unwrap(), "held", &["reference={kind=\"frozen\"}", "train.kl_loss={beta=0.1}"]);
    assert_eq!(held[0]["teacher_kl_mean_nats"], unrewarded[0]["teacher_kl_mean_nats"]);
    assert_eq!(held[0]["kl_loss_mean_nats"].as_f64(), Some(0.0), "the policy is its own reference at first: {}", held[0]);
    assert!(held[2]["kl_loss_mean_nats"].as_f64().unwrap() > 0.0);
    let follows = rows(bare.to_str().unwrap(), "follows", &["teacher={kind=\"ema\"}"]);
    assert_eq!(follows.len(), 3);
    assert!(folder.path().join("follows/checkpoints/step_000003/teacher.safetensors").exists());
    let bad = rollflow(&["check", bare.to_str().unwrap(), "--set", "train.target_reward=0.5", "--set", "teacher.rewards=true"]);
    assert_eq!(bad.code, Some(2));
    assert!(bad.err.contains("`train.target_reward`: there is no reward (reward.kind = \"none\")"), "{}", bad.err);
    assert!(bad.err.contains("`teacher.rewards`: there is no reward"), "{}", bad.err);
}

#[test]
fn distillation_needs_a_teacher_and_no_critic() {
    let check = |recipe: &str, sets: &[&str]| rollflow(&with_sets(&["check", recipe], sets));
    let bad = check("pipelines/recipes/grpo.toml", &["pipeline=\"distill\""]);
    assert_eq!(bad.code, Some(2));
    assert!(bad.err.contains("pipeline = \"distill\" has no section [teacher]"), "{}", bad.err);
    let ppo = |teacher: &str, sets: &[&str]| {
        let teacher = format!("teacher={{kind=\"frozen\"{teacher}}}");
        check("pipelines/recipes/ppo.toml", &[&[teacher.as_str()][..], sets].concat())
    };
    let bad = ppo(", beta=0.5", &[]);
    assert!(bad.err.contains("`critic`: a critic sets advantages, and so does [teacher]"), "{}", bad.err);
    assert!(bad.err.contains("`teacher.beta`: sampled tokens alone give the reverse divergence"), "{}", bad.err);
    let bad = ppo(", top_k=8, discount=0.5", &["train.top_entropy=0.5"]);
    assert!(bad.err.contains("`teacher.discount`: a divergence of distributions concerns one token"), "{}", bad.err);
    assert!(bad.err.contains("`teacher.top_k`: the loss compares the tokens of a whole batch"), "{}", bad.err);
}
