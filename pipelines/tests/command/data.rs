//! Recipes over data sets: what is drawn from where, what is left out, and that a run goes on where it was.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::crashes::refuses_fewer_steps;
use crate::running::{GRPO, SFT, TINY, TINY_MODEL, plain_run_args, rollflow, rows, run_args, with_sets};

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
    let ended = rollflow(&run_args(GRPO, &run, &sets)).ok();
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
    let start = |run: &Path, steps: &str| {
        let sets = ["sft.batch=4", &sources, steps, "checkpoint.every=3", "sft.schedule.warmup=0"];
        rollflow(&plain_run_args(SFT, run, &[TINY_MODEL, &sets].concat())).ok();
    };
    let (whole, parts) = (folder.path().join("whole"), folder.path().join("parts"));
    start(&whole, "sft.steps=9");
    start(&parts, "sft.steps=3");
    let resume = || rollflow(&["resume", parts.to_str().unwrap(), "--set", "sft.steps=9"]);
    resume().ok();
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

/// Records that the chat template refuses, or that truncation leaves nothing of to train, as a prompt and as an example.
#[test]
fn unusable_records_are_skipped_with_their_reason_by_check_and_by_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str, text: &str| {
        let path = folder.path().join(name);
        fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let refuses = "{% for m in messages %}{% if 'bad' in m.content %}{{ raise_exception('no bad words') }}{% endif %}{{ m.content }}{% endfor %}";
    let chat = format!("chat={{template={:?},ask=\"user\"}}", path("chat.jinja", refuses));
    let pair =
        |prompt: &str, completion: &str| serde_json::json!({"prompt": prompt, "completion": completion}).to_string() + "\n";
    let prompts = path("prompts.jsonl", &[pair("1+1=", "2"), pair("a bad sum", "2"), pair("2+2=", "4")].concat());
    let imitated = path("imitated.jsonl", &[pair("1+1=", "2"), pair("2+2=", "4"), pair("3+3=", "a bad one")].concat());
    let long = path("long.jsonl", &[pair("1+1=", "2"), pair(&"1".repeat(100), "2")].concat());
    let task = |data: &str| format!("task={{kind=\"data\",data={data:?}}}");
    let [prompts, imitated, long] = [prompts, imitated, long].map(|data| task(&data));
    let refused = ["1 that the tokenizer or the chat template refuses", "no bad words"];
    let cases = [
        (GRPO, vec![&*chat, &*prompts], refused),
        (GRPO, vec![&*chat, &*imitated, "sft={steps=2,batch=2}"], refused),
        (SFT, vec![&*chat, &*imitated], refused),
        (SFT, vec![&*chat, &*imitated, "sft.packing=best_fit", "sft.max_length=64"], refused),
        (SFT, vec![&*long, "sft.max_length=64", "sft.batch=1"], ["1 with nothing to train in the first 64 tokens"; 2]),
    ];
    for (at, (recipe, sets, told)) in cases.into_iter().enumerate() {
        let sizes = TINY.iter().copied().filter(|set| recipe == GRPO || set.starts_with("model.") || set.starts_with("sft."));
        let sets: Vec<&str> = sizes.chain(["sft.schedule.warmup=0"].into_iter().filter(|_| recipe == SFT)).chain(sets).collect();
        let out = folder.path().join(format!("run{at}"));
        for args in [with_sets(&["check", recipe], &sets), plain_run_args(recipe, &out, &sets)] {
            let ended = rollflow(&args);
            assert_eq!(ended.code, Some(0), "{recipe} {sets:?}: {}", ended.err);
            assert!(told.iter().all(|part| ended.out.contains(part)), "{told:?}: {}", ended.out);
        }
    }
    // An environment opens the conversation: the template may never see the prompt.
    let shown = format!("sft.data={:?}", folder.path().join("imitated.jsonl"));
    let agent = ["check", "pipelines/recipes/calculator_agent.toml", "--set", &chat, "--set", &prompts, "--set", &shown];
    let checked = rollflow(&agent);
    let all = "task.data: prompts, 3 records in 1 file; 0.2 steps";
    assert!(checked.code == Some(0) && checked.out.contains(all), "{} {}", checked.out, checked.err);
}

/// Writes eight sums to a file. Those of `answered` have a reference answer. Returns its path.
fn sums(folder: &Path, name: &str, answered: fn(usize) -> bool) -> String {
    let answer = |n: usize| if answered(n) { format!(",\"answer\":\"{}\"", n + 1) } else { String::new() };
    let path = folder.join(name);
    fs::write(&path, (0..8).map(|n| format!("{{\"prompt\":\"{n}+1=\"{}}}\n", answer(n))).collect::<String>()).unwrap();
    path.display().to_string()
}

#[test]
fn prompts_without_the_answer_that_the_reward_compares_with_are_skipped_and_a_source_of_them_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let half = sums(folder.path(), "half.jsonl", |n| n % 2 == 0);
    let none = sums(folder.path(), "none.jsonl", |_| false);
    let (task, pairs) = (format!("task={{kind=\"data\",data={half:?}}}"), format!("sft.data={half:?}"));
    let parts = "reward={kind=\"parts\",part=[{name=\"short\",kind=\"length\"},{name=\"right\",kind=\"exact\"}]}";
    let skipped = "task.data: half, 4 records in 1 file; skipped: 4 without a reference answer";
    for (reward, said) in [
        ("reward={kind=\"exact\"}", skipped),
        (parts, skipped),
        ("reward={kind=\"regex\",pattern=\"[0-9]\"}", "task.data: half, 8 records in 1 file;"),
    ] {
        let checked = rollflow(&with_sets(&["check", GRPO], &[task.as_str(), &pairs, reward])).ok();
        assert!(checked.out.contains(said), "{reward}: {}", checked.out);
    }
    let (run, mixed) = (folder.path().join("run"), folder.path().join("mixed"));
    let ended = rollflow(&run_args(GRPO, &run, &[&task, &pairs, "reward={kind=\"exact\"}"])).ok();
    assert!(ended.out.contains("Data: half: 4 records; skipped: 4 without a reference answer"), "{}", ended.out);
    assert!(!ended.out.contains("no ground truth") && !ended.err.contains("no ground truth"), "{}{}", ended.out, ended.err);

    let mixture = format!("task={{kind=\"data\",sources=[{{data={half:?}}},{{data={none:?}}}]}}");
    let sets = [mixture.as_str(), &pairs, "reward={kind=\"exact\"}"];
    let why = "none holds nothing to use: all records were skipped: 8 without a reference answer. Fields of the first: prompt.";
    let checked = rollflow(&with_sets(&["check", GRPO], &sets));
    assert_eq!(checked.code, Some(2), "{}", checked.out);
    for part in [&format!("`task.sources[1].data`: {why}"), "1 problem in the recipe"] {
        assert!(checked.err.contains(part), "{part}: {}", checked.err);
    }
    let ended = rollflow(&run_args(GRPO, &mixed, &sets));
    assert!(ended.code == Some(1) && ended.err.contains(why), "{}", ended.err);
}

/// The saved position counts all records, as an earlier version read them.
#[test]
fn a_run_that_began_with_unanswered_prompts_resumes_with_them() {
    let folder = tempfile::tempdir().unwrap();
    let (half, run) = (sums(folder.path(), "half.jsonl", |n| n % 2 == 0), folder.path().join("run"));
    let (task, pairs) = (format!("task={{kind=\"data\",data={half:?}}}"), format!("sft.data={half:?}"));
    rollflow(&run_args(GRPO, &run, &[&task, &pairs])).ok();
    let compares = |text: &str| text.replace("kind = \"regex\"\npattern = \"[0-9]\"\n", "kind = \"exact\"\n");
    let recipe = fs::read_to_string(run.join("recipe.toml")).unwrap();
    assert_ne!(compares(&recipe), recipe);
    fs::write(run.join("recipe.toml"), compares(&recipe)).unwrap();
    let mut record: Value = serde_json::from_slice(&fs::read(run.join("run.json")).unwrap()).unwrap();
    record["recipe"] = compares(record["recipe"].as_str().unwrap()).into();
    fs::write(run.join("run.json"), record.to_string()).unwrap();
    let resumed = rollflow(&["resume", run.to_str().unwrap(), "--set", "train.steps=5"]).ok();
    assert!(resumed.out.contains("Data: half: 8 records"), "{}", resumed.out);
    assert_eq!(rows(&run).len(), 5);
}

/// The warm-up of the recipe reads the same file.
#[test]
fn a_data_file_that_can_not_be_read_is_one_problem_which_says_how_to_convert_it() {
    let folder = tempfile::tempdir().unwrap();
    let cases = [
        ("q.csv", "train", "convert it with pandas: pandas.read_csv("),
        ("q.jsonl.gz", "train", "unpack it: gunzip "),
        ("q.jsonl.zst", "train", "unpack it: unzstd "),
        ("q.jsonl", "test", "a single file has no split \"test\""),
    ];
    for (name, split, said) in cases {
        let data = sums(folder.path(), name, |_| true);
        let task = format!("task={{kind=\"data\",data={data:?},split={split:?}}}");
        let checked = rollflow(&["check", GRPO, "--set", &task, "--set", "reward.kind=exact"]);
        assert_eq!(checked.code, Some(2), "{name}: {}", checked.out);
        assert!(checked.err.contains(said) && checked.err.contains("\n1 problem in the recipe"), "{name}: {}", checked.err);
    }
}

/// Pairs that a reward model can't read end its run; preference training leaves them out.
#[test]
fn check_finds_the_records_that_the_run_would_end_with_by_file_and_line() {
    let folder = tempfile::tempdir().unwrap();
    let (ranked, out) = (folder.path().join("ranked.jsonl"), folder.path().join("run"));
    let pair = |chosen: &str| serde_json::json!({"prompt": "1+1=", "chosen": chosen, "rejected": "3"}).to_string() + "\n";
    fs::write(&ranked, [pair("2"), pair(&"9".repeat(3000))].concat()).unwrap();
    let task = format!("task={{kind=\"data\",data={ranked:?}}}");
    let judge = ["pipelines/recipes/reward_model.toml", "--set", &task, "--set", "reward_model.held_out=0"];
    let checked = rollflow(&[&["check"][..], &judge].concat());
    assert!(checked.code == Some(2) && checked.err.contains("ranked.jsonl:2"), "{}", checked.err);
    let ran = rollflow(&[&["run"][..], &judge, &["--out", out.to_str().unwrap()]].concat());
    assert!([&checked, &ran].iter().all(|ended| ended.err.contains("at most 2048")) && ran.code == Some(1), "{}", ran.err);
    let checked = rollflow(&["check", "pipelines/recipes/dpo_pairs.toml", "--set", &task, "--set", "batch.groups=1"]).ok();
    assert!(checked.out.contains("1 records in 1 file; skipped: 1 longer than"), "{}", checked.out);
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
