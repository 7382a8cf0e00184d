//! `runs`, `compare`, `report` and `run.json`: what is remembered of runs, and that no secret is.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::asking::tiny_run;
use crate::evaluating::EVALUATED;
use crate::fork_server::output;
use crate::running::{GRPO, Running, TINY, command, plain_run_args, read, rollflow, run_args};

fn record(run: &Path) -> Value {
    serde_json::from_str(&read(&run.join("run.json"))).unwrap()
}

#[test]
fn a_run_records_what_it_was() {
    let folder = tempfile::tempdir().unwrap();
    let run = tiny_run(folder.path(), &["seed=7"]);
    let found = record(&run);
    assert_eq!((found["state"].as_str(), found["seed"].as_u64(), found["steps"].as_u64()), (Some("finished"), Some(7), Some(3)));
    let session = &found["sessions"][0];
    for key in ["started", "ended", "version"] {
        assert!(session[key].as_str().is_some_and(|text| !text.is_empty()), "{key}: {session}");
    }
    assert!(session["machine"]["threads"].as_u64() > Some(0));
    assert_eq!(found["metrics"]["reward_mean"]["count"], 3);

    // What begins with its checkpoint is its child, and a resume another session of the same run.
    let model = format!("model={{kind=\"folder\",path={:?}}}", run.join("checkpoints/step_000003").to_str().unwrap());
    let child = folder.path().join("child");
    rollflow(&plain_run_args(GRPO, &child, &[&TINY[5..], &[&*model]].concat())).ok();
    assert_eq!(record(&child)["parents"][0]["run"].as_str(), run.to_str());
    assert_eq!(rollflow(&["resume", run.to_str().unwrap(), "--set", "train.steps=5"]).code, Some(0));
    let resumed = record(&run);
    assert_eq!((resumed["sessions"].as_array().map(Vec::len), resumed["steps"].as_u64()), (Some(2), Some(5)));
}

#[test]
fn runs_are_found_by_what_they_were() {
    let folder = tempfile::tempdir().unwrap();
    let (one, other) = (tiny_run(&folder.path().join("deep"), &["name=one"]), folder.path().join("other"));
    let failed = rollflow(&run_args(
        GRPO,
        &other,
        &["name=other", "train.gap_halt=1e-30", "train.gap_warn=1e-31", "train.probe=false", "train.lr=1e-1"],
    ));
    assert_eq!(failed.code, Some(1), "{}", failed.err);
    let find = |args: &[&str]| {
        let found = rollflow(&[&["runs", folder.path().to_str().unwrap()], args].concat());
        (found.out.contains(one.to_str().unwrap()), found.out.contains(other.to_str().unwrap()))
    };
    assert_eq!(find(&[]), (true, true));
    assert_eq!(find(&["--state", "finished"]), (true, false));
    assert_eq!(find(&["--state", "failed", "--json"]), (false, true));
    assert_eq!(find(&["--name", "one"]), (true, false));
    assert_eq!(find(&["--pipeline", "sft"]), (false, false));
    assert!(find(&["--where", "reward_mean>-1"]).0);
    assert_eq!(find(&["--where", "reward_mean<-1"]), (false, false));
    assert!(
        record(&other)["sessions"][0]["error"].as_str().is_some_and(|error| error.contains("disagree")),
        "{}",
        record(&other)
    );
}

#[test]
fn a_killed_run_is_told_from_one_that_runs() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let mut running =
        Running::start(&run_args(GRPO, &run, &["train.steps=1000000", "train.target_reward=9", "checkpoint.every=0"]));
    let metrics = run.join("metrics.jsonl");
    running.until("it trained", |_| read(&metrics).lines().count() >= 2);
    let state = || {
        let listed = rollflow(&["runs", folder.path().to_str().unwrap(), "--json"]);
        serde_json::from_str::<Value>(&listed.out).unwrap()["state"].as_str().unwrap().to_owned()
    };
    assert_eq!(state(), "running");
    let page = rollflow(&["report", run.to_str().unwrap()]);
    assert_eq!(page.code, Some(0), "a run that goes on has a page: {}", page.err);
    drop(running);
    assert_eq!(state(), "died");
    // It was killed in the middle of a row.
    for name in ["metrics.jsonl", "timings.jsonl"] {
        fs::write(run.join(name), read(&run.join(name)) + "{\"step\":9,\"lo").unwrap();
    }
    let diagnosed = rollflow(&["diagnose", run.to_str().unwrap()]);
    assert!(diagnosed.code == Some(1) && diagnosed.out.contains("ended without notice"), "{}{}", diagnosed.out, diagnosed.err);
    let listed = rollflow(&["runs", folder.path().to_str().unwrap(), "--where", "reward_mean>-1", "--json"]);
    assert!(listed.out.contains("\"died\""), "its metrics are known: {}{}", listed.out, listed.err);
}

#[test]
fn runs_are_compared_by_their_ends_and_by_what_their_recipes_have_different() {
    let folder = tempfile::tempdir().unwrap();
    let (one, other) = (tiny_run(folder.path(), &[]), folder.path().join("other"));
    assert_eq!(rollflow(&run_args(GRPO, &other, &["seed=3", "filter=[{kind=\"nonzero_std\"}]"])).code, Some(0));
    let args = ["compare", one.to_str().unwrap(), other.to_str().unwrap()];
    let shown = rollflow(&args).ok();
    for part in ["reward_mean", "recipe: seed", "recipe: filter[0].kind", "finished"] {
        assert!(shown.out.contains(part), "{part}:\n{}", shown.out);
    }
    assert!(!shown.out.contains("recipe: train.lr"), "it is the same in both");
    let compared: Value = serde_json::from_str(&rollflow(&[&args[..], &["--json"]].concat()).out).unwrap();
    assert_eq!(compared["recipe"]["seed"], serde_json::json!(["0", "3"]));
    assert!(compared["runs"][0]["metrics"]["reward_mean"]["last_tenth"].is_number());
    let refused = rollflow(&["compare", one.to_str().unwrap(), folder.path().to_str().unwrap()]);
    assert_eq!(refused.code, Some(2));
}

/// The page holds what the files hold.
#[test]
fn the_page_has_the_runs_curves_samples_graph_and_times() {
    let folder = tempfile::tempdir().unwrap();
    let run = tiny_run(folder.path(), &EVALUATED);
    let page = read(&run.join("report.html"));
    let (_, rest) = page.split_once("type=\"application/json\">").unwrap();
    let data: Value = serde_json::from_str(rest.split_once("</script>").unwrap().0).unwrap();
    assert_eq!((data["state"].as_str(), data["samples"].as_array().map(Vec::len)), (Some("finished"), Some(3 * 4 * 4)));
    assert_eq!(data["curves"]["reward_mean"]["points"].as_array().map(Vec::len), Some(3));
    assert_eq!(data["evaluations"].as_array().map(Vec::len), Some(3));
    assert_eq!(data["staleness"], serde_json::json!([[0, 48]]), "every trained sample, in a synchronous run");
    let names =
        |of: &Value| of.as_array().unwrap().iter().map(|one| one["name"].as_str().unwrap().to_owned()).collect::<Vec<_>>();
    assert_eq!(names(&data["stages"]), names(&data["graph"]["nodes"]));
    rollflow(&["report", run.to_str().unwrap(), "--json"]).ok();
    assert_eq!(read(&run.join("report.html")), page);
}

/// R320: a token that a reward's service asks for comes from the environment and is nowhere in what a run leaves or says.
#[test]
fn no_secret_is_written_or_said() {
    let folder = tempfile::tempdir().unwrap();
    let secret = "s3cr3t-7f1e9c";
    let service = crate::serving::Guarded::start(secret);
    let run = folder.path().join("run");
    let reward = format!("reward={{kind=\"http\",url=\"{}\",token_env=\"REWARD_TOKEN\",retries=0}}", service.url());
    let args = run_args(GRPO, &run, &["eval={every=1,samples=2,limit=2}"]).into_iter().map(str::to_owned);
    let args: Vec<String> = args.chain(["--set".to_owned(), reward]).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let started = |token: &str| {
        let output = output(command(&args).env("REWARD_TOKEN", token));
        (output.status.code(), String::from_utf8(output.stdout).unwrap() + &String::from_utf8(output.stderr).unwrap())
    };
    let (code, said) = started(secret);
    assert_eq!(code, Some(0), "{said}");
    assert!(!said.contains(secret));
    for command in [&["report", run.to_str().unwrap(), "--json"][..], &["runs", folder.path().to_str().unwrap(), "--json"]] {
        assert!(!rollflow(command).out.contains(secret));
    }
    let mut looked = 0;
    let mut folders = vec![run.clone()];
    while let Some(at) = folders.pop() {
        for entry in fs::read_dir(at).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            looked += 1;
            let bytes = fs::read(&path).unwrap();
            assert!(!bytes.windows(secret.len()).any(|part| part == secret.as_bytes()), "{}", path.display());
        }
    }
    assert!(looked > 10, "{looked} files");

    // A wrong one is refused by the service, and not told either.
    fs::remove_dir_all(&run).unwrap();
    let (_, said) = started("wr0ng-token");
    assert!(said.contains("401") && !said.contains("wr0ng-token"), "{said}");
}

/// R320: a recipe is written down with its run, so that one which seems to hold a secret is refused, wherever in it that stands, and not said again.
#[test]
fn a_recipe_with_a_secret_in_it_is_refused_before_anything_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = folder.path().join("mine.toml");
    let sets = [
        "reward={kind=\"http\",url=\"http://me:hunter2@127.0.0.1:9/score\"}",
        "reward={kind=\"http\",url=\"http://127.0.0.1:9/score?api_key=hunter2\"}",
        "engine={kind=\"vllm\",urls=[\"http://me:hunter2@127.0.0.1:9\"]}",
        "engine={launch=\"vllm\",env=[\"HF_TOKEN=hunter2\"]}",
        "engine={launch=\"vllm\",flags=[\"--api-key\",\"hunter2\"]}",
        "environment={kind=\"agent\",url=\"http://me:hunter2@127.0.0.1:9/\"}",
        "reward={kind=\"http\",url=\"http://127.0.0.1:9/hunter20a1b2c3d4e5f6a7b8/score\"}",
        "chat.variables={api_key=\"hunter2\"}",
        "chat={variables={deep={password=\"hunter2 and more\"}}}",
    ];
    for set in sets {
        let (key, value) = set.split_once('=').unwrap();
        fs::write(&recipe, format!("include = {:?}\n{key} = {value}\n", fs::canonicalize(format!("../{GRPO}")).unwrap()))
            .unwrap();
        let out = folder.path().join("run");
        let given = rollflow(&["run", GRPO, "--set", set, "--out", out.to_str().unwrap()]);
        let written = rollflow(&["run", recipe.to_str().unwrap(), "--out", out.to_str().unwrap()]);
        let variable = output(command(&["check", GRPO, "--json"]).env(format!("ROLLFLOW__{}", key.to_uppercase()), value));
        let variable = (variable.status.code(), String::from_utf8(variable.stdout).unwrap());
        for (code, said) in [(given.code, given.out + &given.err), (written.code, written.out + &written.err), variable] {
            assert_eq!(code, Some(2), "{set}: {said}");
            assert!(said.contains("token_env") && !said.contains("hunter2"), "{set}: {said}");
        }
        assert!(!out.exists(), "{set}");
    }
}

/// A key that a recipe does not have is named without the value that was given to it.
#[test]
fn a_secret_for_a_key_that_is_unknown_is_not_echoed() {
    for set in ["engine.token=hunter2", "engine={token='hunter2'}", "reward.api_key=\"hunter2\""] {
        let refused = rollflow(&["check", GRPO, "--set", set]);
        let said = refused.out + &refused.err;
        assert!(refused.code == Some(2) && said.contains("--set") && !said.contains("hunter2"), "{set}: {said}");
    }
}
