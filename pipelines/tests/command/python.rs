//! Python through the whole command: the examples of the page *Python* run as they are, errors are found before a run, and runs start from
//! Python.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::fork_server::BINARY;
use crate::running::{GRPO, json_lines, read, rollflow, run_args, with_sets};

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

/// Writes the page's files of Python to `folder`.
fn page(folder: &Path) -> BTreeMap<String, PathBuf> {
    let page = read(&Path::new(ROOT).join("docs/how_to/python.md"));
    let blocks = page.split("```python\n# ").skip(1).map(|block| block.split("```").next().unwrap());
    let files = blocks.map(|block| {
        let (name, source) = block.split_once('\n').unwrap();
        let path = folder.join(name);
        fs::write(&path, source).unwrap();
        (name.to_owned(), path)
    });
    files.collect()
}

/// Runs two steps with these settings and returns the recorded rollouts.
fn rollouts(out: &Path, sets: &[&str]) -> Vec<Value> {
    let sets = [&["train.steps=2", "observe.rollouts_every=1"], sets].concat();
    rollflow(&run_args(GRPO, out, &sets)).ok();
    json_lines(&out.join("rollouts.jsonl"))
}

#[test]
fn every_reward_function_of_the_page_gives_what_it_says() {
    let folder = tempfile::tempdir().unwrap();
    let file = page(folder.path()).remove("my_reward.py").unwrap();
    let right = |row: &Value| row["response"].as_str().unwrap().trim() == row["metadata"]["answer"].as_str().unwrap();
    for (function, python_of) in [
        ("reward", (|row, right| f64::from(u8::from(right(row)))) as fn(&Value, fn(&Value) -> bool) -> f64),
        ("short", |row, _| -0.01 * row["response"].as_str().unwrap().chars().count() as f64),
    ] {
        let set = format!("reward={{kind=\"python\",file={file:?},function={function:?}}}");
        for row in rollouts(&folder.path().join(function), &[&set]) {
            let expected = python_of(&row, right);
            assert!((row["reward"].as_f64().unwrap() - expected).abs() < 1e-12, "{function}: {row}");
        }
    }
    for function in ["compute_score", "asks_a_service"] {
        let set = format!("reward={{kind=\"python\",file={file:?},function={function:?}}}");
        assert_eq!(rollouts(&folder.path().join(function), &[&set]).len(), 32, "{function}");
    }
    let part = |name: &str, more: &str| format!("{{name={name:?},kind=\"python\",file={file:?},function={name:?}{more}}}");
    let parts = [part("reward", ""), part("short", ",weight=0.5"), part("only_sevens", "")].join(",");
    let rows = rollouts(&folder.path().join("parts"), &[&format!("reward={{kind=\"parts\",part=[{parts}]}}")]);
    let mut left_out = 0;
    for row in rows {
        let part = |name: &str| row["reward_parts"][name].as_f64();
        let seven = row["metadata"]["answer"] == "7";
        assert_eq!(part("only_sevens").is_some(), seven, "{row}");
        left_out += usize::from(!seven);
        let sum = part("reward").unwrap() + 0.5 * part("short").unwrap() + part("only_sevens").unwrap_or(0.0);
        assert!((row["reward"].as_f64().unwrap() - sum).abs() < 1e-12, "{row}");
    }
    assert!(left_out > 0);
}

#[test]
fn every_environment_and_tool_of_the_page_takes_part_in_a_run() {
    let folder = tempfile::tempdir().unwrap();
    let file = page(folder.path()).remove("my_env.py").unwrap();
    for (name, keys) in [("Hidden", "environment=\"Hidden\""), ("Echo", "environment=\"Echo\""), ("add", "tools=[\"add\"]")] {
        let environment = format!("environment={{kind=\"python\",file={file:?},max_turns=3,processes=2,{keys}}}");
        let rows =
            rollouts(&folder.path().join(name), &[&environment, "reward={kind=\"environment\"}", "generate.max_new_tokens=16"]);
        assert_eq!(rows.len(), 32);
        for row in &rows {
            assert_eq!(row["reward"], row["metadata"]["environment_reward"], "{row}");
            let opening = row["metadata"]["conversation"][0]["content"].as_str().unwrap();
            assert_eq!(opening.ends_with("Find the hidden number from 1 to 9."), name == "Hidden", "{opening}");
        }
        let turns: Vec<u64> = rows.iter().map(|row| row["metadata"]["turns"].as_u64().unwrap()).collect();
        assert!(name != "Echo" || turns.iter().any(|turns| *turns > 1), "{turns:?}");
    }
}

#[test]
fn an_environment_brings_its_own_prompts_and_a_model_is_evaluated_in_it() {
    let folder = tempfile::tempdir().unwrap();
    let file = page(folder.path()).remove("my_env.py").unwrap();
    let environment = format!("environment={{kind=\"python\",file={file:?},max_turns=3,environment=\"Echo\"}}");
    let brings = ["task={kind=\"environment\",limit=6}", "reward={kind=\"environment\"}", "generate.max_new_tokens=16"];
    let imitated = folder.path().join("imitated.jsonl");
    fs::write(&imitated, "{\"prompt\": \"Say 1.\", \"completion\": \"1\"}\n").unwrap();
    let imitated = format!("sft.data={imitated:?}");
    let sets = [&brings[..], &[environment.as_str(), imitated.as_str()]].concat();
    for row in rollouts(&folder.path().join("run"), &sets) {
        let (asked, answer) = (row["prompt"].to_string(), row["metadata"]["answer"].as_str().unwrap().to_owned());
        assert!(asked.contains(&format!("Say {answer}.")) && answer.parse::<u32>().unwrap() < 6, "{row}");
    }
    let in_file = format!("{}:Echo", file.display());
    let out = folder.path().join("eval");
    let sets = [
        &brings[2..],
        &[
            "sft.steps=1",
            imitated.as_str(),
            "eval.task={kind=\"environment\"}",
            "eval.samples=2",
            "eval.limit=4",
            "environment.max_turns=3",
            "model.hidden=16",
        ],
    ]
    .concat();
    let args = ["eval", GRPO, "--environment", &in_file, "--out", out.to_str().unwrap()];
    let ended = rollflow(&with_sets(&args, &sets)).ok();
    assert!(ended.out.contains("eval_accuracy_ratio") && ended.out.contains("(95 %)"), "{}", ended.out);
    let refused = rollflow(&run_args(GRPO, &folder.path().join("no"), &[&brings[..], &[environment.as_str()]].concat()));
    assert!(refused.err.contains("the prompts of an environment come without completions to imitate"), "{}", refused.err);
    let refused = rollflow(&["eval", GRPO, "--environment", "nothing"]);
    assert!(refused.err.contains("write verifiers:NAME, openenv:URL or FILE.py:CLASS"), "{}", refused.err);
}

#[test]
fn check_loads_the_files_and_names_what_is_wrong_with_them() {
    let folder = tempfile::tempdir().unwrap();
    let file = page(folder.path()).remove("my_reward.py").unwrap();
    let check = |sets: &[&str]| rollflow(&with_sets(&["check", GRPO], sets));
    let good = check(&[&format!("reward={{kind=\"python\",file={file:?}}}")]).ok();
    assert!(good.out.contains("my_reward.py: reward loaded"), "{}", good.out);
    fs::write(folder.path().join("broken.py"), "import nothing_of_this_name\n").unwrap();
    let broken = folder.path().join("broken.py");
    let bad = check(&[
        &format!("reward={{kind=\"python\",file={broken:?}}}"),
        &format!("environment={{kind=\"python\",file={file:?},environment=\"Gone\"}}"),
    ]);
    assert_eq!(bad.code, Some(2), "{}", bad.err);
    assert!(bad.err.contains("`reward.file`: ") && bad.err.contains("No module named 'nothing_of_this_name'"), "{}", bad.err);
    assert!(
        bad.err.contains("`environment.file`: ") && bad.err.contains("has no `Gone`; it defines asks_a_service"),
        "{}",
        bad.err
    );
    let data = folder.path().join("data.jsonl");
    fs::write(&data, "{\"prompt\":\"1+1=\",\"answer\":\"2\",\"level\":3}\n").unwrap();
    let asking = folder.path().join("asking.py");
    fs::write(&asking, "def reward(completion, level, levle):\n    return 1.0\n").unwrap();
    let asked =
        || check(&[&format!("reward={{kind=\"python\",file={asking:?}}}"), "batch.groups=1", &format!("task={{data={data:?}}}")]);
    let bad = asked();
    let expected = "`reward.file`: the reward function takes `levle`, which is no column of the data";
    assert!(bad.err.contains(expected) && bad.err.contains("its columns are answer, level"), "{}", bad.err);
    assert_eq!(bad.err.matches("which is no column").count(), 1, "{}", bad.err);
    fs::write(&data, "{\"prompt\":\"1+1=\"}\n").unwrap();
    let bad = asked();
    assert_eq!(bad.err.matches("which is no column").count(), 2, "there are no columns: {}", bad.err);
    let bad = check(&["environment={kind=\"python\",file=\"x.py\"}"]);
    assert!(bad.err.contains("`environment.environment` and `environment.tools` are missing"), "{}", bad.err);
}

/// Law F6: dead letters hold the traceback, and `replay` scores them with a function that was mended.
#[test]
fn a_function_that_fails_leaves_dead_letters_that_are_scored_when_it_is_mended() {
    let folder = tempfile::tempdir().unwrap();
    let (file, out) = (folder.path().join("my_reward.py"), folder.path().join("run"));
    fs::write(&file, "def reward(completion, answer):\n    return 1.0 / (answer != '7')\n").unwrap();
    let set = format!("reward={{kind=\"python\",file={file:?},retries=0}}");
    rollflow(&run_args(GRPO, &out, &["train.steps=8", "flow.on_lost_sample=\"drop_group\"", &set])).ok();
    let letters = json_lines(&out.join("dead_letters.jsonl"));
    let text = letters[0]["failures"][0]["text"].as_str().unwrap();
    assert!(
        text.contains("my_reward.py\", line 2, in reward") && text.ends_with("ZeroDivisionError: float division by zero"),
        "{text}"
    );
    fs::write(&file, "def reward(completion, answer):\n    return 0.5\n").unwrap();
    rollflow(&["replay", out.to_str().unwrap()]).ok();
    let replayed = json_lines(&out.join("replayed.jsonl"));
    assert_eq!(replayed.len(), 4 * letters.len(), "every sample of a group");
    assert!(replayed.iter().all(|sample| sample["reward"] == 0.5));
}

#[test]
fn a_resumed_run_warns_of_a_file_that_changed() {
    let folder = tempfile::tempdir().unwrap();
    let (file, out) = (folder.path().join("my_reward.py"), folder.path().join("run"));
    fs::write(&file, "def reward(completion):\n    return 1.0\n").unwrap();
    let set = format!("reward={{kind=\"python\",file={file:?}}}");
    rollflow(&run_args(GRPO, &out, &["train.steps=2", &set])).ok();
    let resume = |steps: &str| rollflow(&["resume", out.to_str().unwrap(), "--set", steps]);
    let same = resume("train.steps=3");
    assert!(same.code == Some(0) && !same.err.contains("changed since"), "{}", same.err);
    fs::write(&file, "def reward(completion):\n    return 0.5\n").unwrap();
    let changed = resume("train.steps=4").ok();
    assert!(changed.err.contains("my_reward.py changed since this run began"), "{}", changed.err);
}

fn python(folder: &Path) -> Command {
    let mut python = Command::new("python3");
    python.current_dir(ROOT).env("PYTHONPATH", Path::new(ROOT).join("python")).env("ROLLFLOW", BINARY).env("TMPDIR", folder);
    python
}

#[test]
fn a_run_starts_from_python_yields_its_rows_and_samples_and_raises_its_errors() {
    let folder = tempfile::tempdir().unwrap();
    let script = page(folder.path()).remove("first_run.py").unwrap();
    let small = "\"sft.steps\": 2, \"model.hidden\": 16, \"batch.groups\": 4, \"filter\": []";
    let source = read(&script).replace("set={\"train.steps\": 3}", &format!("set={{\"train.steps\": 3, {small}}}"));
    fs::write(&script, source).unwrap();
    let ran = python(folder.path()).arg(&script).output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.success(), "{err}");
    assert_eq!(out.lines().take(3).map(|line| line.split(' ').next().unwrap()).collect::<Vec<_>>(), ["1", "2", "3"], "{out}");

    let failing = "from rollflow import *\nrun(Flow('pipelines/recipes/grpo.toml', set={'train.lr': -1.0})).wait()\n";
    let ran = python(folder.path()).args(["-c", failing]).output().unwrap();
    let err = String::from_utf8_lossy(&ran.stderr);
    assert!(err.contains("RunFailed: rollflow ended with code 2") && err.contains("train.lr"), "{err}");
}

#[test]
fn serve_env_serves_the_same_files_over_http_and_asks_for_its_token() {
    let folder = tempfile::tempdir().unwrap();
    let files = page(folder.path());
    for (target, section, more) in [("my_reward.py:reward", "reward", ""), ("my_env.py:Echo", "environment", ",max_turns=3")] {
        let (file, name) = target.split_once(':').unwrap();
        let target = format!("{}:{name}", files[file].display());
        let mut server = python(folder.path());
        server.args(["-m", "rollflow.serve_env", &target, "--token-env", "SERVED_TOKEN"]).env("SERVED_TOKEN", "secret");
        let mut server = Ends(server.stdout(Stdio::piped()).spawn().unwrap());
        let mut url = String::new();
        std::io::BufRead::read_line(&mut std::io::BufReader::new(server.0.stdout.take().unwrap()), &mut url).unwrap();
        let set = format!("{section}={{kind=\"http\",url={:?},token_env=\"RUN_TOKEN\"{more}}}", url.trim());
        let sets = [&set[..], "train.steps=2", "generate.max_new_tokens=16"];
        let sets =
            if section == "environment" { [&sets[..], &["reward={kind=\"environment\"}"]].concat() } else { sets.to_vec() };
        let out = folder.path().join(section);
        crate::running::rollflow_with(&run_args(GRPO, &out, &sets), &[("RUN_TOKEN", "secret")]).ok();
        let refused = folder.path().join(format!("{section}-refused"));
        if section == "reward" {
            let sets = [&sets[..], &["reward.on_failure=\"fail\""]].concat();
            let ended = crate::running::rollflow_with(&run_args(GRPO, &refused, &sets), &[("RUN_TOKEN", "wrong")]);
            assert!(ended.code == Some(1) && ended.err.contains("401"), "{}", ended.err);
        }
    }
}

/// A process that ends with the test.
struct Ends(std::process::Child);

impl Drop for Ends {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}
