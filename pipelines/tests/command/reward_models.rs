//! A reward model from pairs to rewards, by the command alone: trained, held to pairs it never saw, interrupted, and asked by `grpo`.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use rollflow::data::PromptText;
use rollflow::observe::logs::read_rollouts;
use rollflow::prelude::*;
use rollflow::stages::reward::Scorer;
use serde_json::Value;

use crate::crashes::refuses_fewer_steps;
use crate::running::{Ended, GRPO, read, rollflow, run_args};

const REWARD_MODEL: &str = "pipelines/recipes/reward_model.toml";

/// Trains a small reward model in `out`.
fn train(out: &Path, sets: &[&str]) -> Ended {
    let tiny = ["model.hidden=64", "model.layers=2", "model.intermediate=128", "reward_model.batch=48"];
    let sets = tiny.iter().chain(sets).flat_map(|set| ["--set", set]);
    let args: Vec<&str> = ["run", REWARD_MODEL, "--out", out.to_str().unwrap()].into_iter().chain(sets).collect();
    rollflow(&args)
}

fn rows(run: &Path) -> Vec<Value> {
    read(&run.join("metrics.jsonl")).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn checkpoint(run: &Path, step: u64) -> PathBuf {
    run.join(format!("checkpoints/step_{step:06}"))
}

fn scorer(folder: &Path) -> Scorer {
    Scorer::new(&ScoreModel::load(folder).unwrap(), 1).unwrap()
}

/// Whether every answer earned what `reward` makes of its score and of whether it had ended.
fn assert_earned(run: &Path, scorer: &Scorer, reward: impl Fn(f64, bool) -> f64) {
    let rollouts: Vec<_> = read_rollouts(run.join("rollouts.jsonl")).unwrap().map(Result::unwrap).collect();
    let mut seen: HashMap<(u64, PromptText, String, bool), f64> = HashMap::new();
    for rollout in &rollouts {
        let ended = rollout.status == Status::Completed;
        let expected = reward(scorer.score(&rollout.prompt, &rollout.response).unwrap(), ended);
        let earned = rollout.reward.unwrap();
        assert!((earned - expected).abs() < 1e-4 * (1.0 + expected.abs()), "{:?}: {earned}, scored {expected}", rollout.response);
        let same = seen.entry((rollout.group, rollout.prompt.clone(), rollout.response.clone(), ended)).or_insert(earned);
        assert_eq!(*same, earned, "the same text of one group has the same score to the bit");
    }
    assert!([true, false].iter().all(|ended| seen.keys().any(|key| key.3 == *ended)), "answers that ended, and others");
}

#[test]
fn a_reward_model_learns_from_pairs_and_its_folder_rewards_answers() {
    let folder = tempfile::tempdir().unwrap();
    let (judge, run, parts) = (folder.path().join("judge"), folder.path().join("grpo"), folder.path().join("parts"));
    let trained = train(&judge, &["reward_model.steps=300"]);
    assert_eq!(trained.code, Some(0), "{}", trained.err);
    let rows = rows(&judge);
    let of = |at: usize, metric: Metric| rows[at][metric.key()].as_f64().unwrap();
    assert_eq!(rows.len(), 300);
    assert!(of(299, Metric::PairAccuracy) > 0.9 && of(299, Metric::PairMargin) > 3.0 && of(0, Metric::PairAccuracy) < 0.8);
    assert!(rows[0].get(Metric::Entropy.key()).is_none(), "a score has no entropy");
    assert!(trained.out.contains("Step 300: accuracy="), "{}", trained.out);
    let held_out =
        trained.out.lines().find(|line| line.starts_with("Held-out pairs: 640 accuracy=")).expect("it is judged at the end");
    let accuracy = held_out.split(['=', ' ']).nth(4).unwrap().parse::<f64>().unwrap();
    assert!(accuracy > 0.7, "chance is 0.5: {held_out}");

    let model = checkpoint(&judge, 300);
    let config: Value = serde_json::from_str(&read(&model.join("config.json"))).unwrap();
    assert_eq!(config["architectures"][0], "LlamaForSequenceClassification");
    let (scorer, path) = (scorer(&model), format!("reward.path={}", model.display()));
    assert!(scorer.score(&"3+4=".into(), "7").unwrap() > scorer.score(&"3+4=".into(), "95").unwrap());
    let warm_up = ["sft.steps=40", "sft.lr=3e-3", "observe.rollouts_every=1"];
    let alone = [&warm_up[..], &["reward={kind=\"model\"}", &path, "reward.threads=2", "reward.missing_end_penalty=3"]].concat();
    let ended = rollflow(&run_args(GRPO, &run, &alone));
    assert_eq!(ended.code, Some(0), "{}", ended.err);
    assert_earned(&run, &scorer, |score, ended| if ended { score } else { score - 3.0 });
    let (again, recipe) = (folder.path().join("again"), run.join("recipe.toml"));
    assert_eq!(rollflow(&["run", recipe.to_str().unwrap(), "--out", again.to_str().unwrap()]).code, Some(0));
    for file in ["metrics.jsonl", "rollouts.jsonl"] {
        assert!(fs::read(run.join(file)).unwrap() == fs::read(again.join(file)).unwrap(), "law V3: {file} is the same");
    }

    let part = format!(
        "reward.part=[{{kind=\"model\",name=\"judge\",path={:?},weight=2.0}},{{kind=\"length\",name=\"any\",min=0,max=100}}]",
        model
    );
    let several = [&warm_up[..], &["reward={kind=\"parts\"}", &part]].concat();
    let ended = rollflow(&run_args(GRPO, &parts, &several));
    assert_eq!(ended.code, Some(0), "{}", ended.err);
    assert_earned(&parts, &scorer, |score, _| 2.0 * score + 1.0);
    assert!(self::rows(&parts).iter().all(|row| row["reward_part_judge"].is_number()));
}

/// Laws C1 and C2.
#[test]
fn its_training_goes_on_after_an_interruption_as_if_there_was_none() {
    let folder = tempfile::tempdir().unwrap();
    let (whole, cut) = (folder.path().join("whole"), folder.path().join("cut"));
    let sets = ["reward_model.schedule={kind=\"constant\"}", "checkpoint.every=2"];
    assert_eq!(train(&whole, &[&sets[..], &["reward_model.steps=5"]].concat()).code, Some(0));
    assert_eq!(train(&cut, &[&sets[..], &["reward_model.steps=3"]].concat()).code, Some(0));
    let resumed = rollflow(&["resume", cut.to_str().unwrap(), "--set", "reward_model.steps=5"]);
    assert_eq!(resumed.code, Some(0), "{}", resumed.err);
    for file in ["metrics.jsonl", "checkpoints/step_000005/model.safetensors"] {
        assert!(fs::read(whole.join(file)).unwrap() == fs::read(cut.join(file)).unwrap(), "{file} is the same");
    }
    refuses_fewer_steps(&cut, "reward_model.steps", 4, 5);
}

#[test]
fn pairs_come_from_a_file_and_a_reward_model_may_go_on_from_its_own_folder() {
    let folder = tempfile::tempdir().unwrap();
    let (data, first, second) = (folder.path().join("pairs.jsonl"), folder.path().join("first"), folder.path().join("second"));
    let task = format!("task={{kind=\"data\",data={data:?},columns={{chosen=\"good\",rejected=\"bad\"}}}}");
    let keys = ["reward_model.held_out=0", "reward_model.steps=20"];
    let sets = [&keys[..], &[task.as_str()]].concat();
    fs::write(
        &data,
        "{\"question\": \"say a\", \"good\": \"a\", \"bad\": \"b\"}\n{\"question\": \"say c\", \"good\": \"c\", \"bad\": 4}\n",
    )
    .unwrap();
    let ended = train(&first, &sets);
    assert_eq!(ended.code, Some(0), "{}", ended.err);
    assert!(!ended.out.contains("Held-out"), "{}", ended.out);
    let scorer = scorer(&checkpoint(&first, 20));
    let score = |prompt: &str, answer: &str| scorer.score(&prompt.into(), answer).unwrap();
    assert!(score("say a", "a") > score("say a", "b") && score("say c", "c") > score("say c", "4"));
    let model = format!("model={{kind=\"folder\",path={:?}}}", checkpoint(&first, 20));
    let args = ["run", REWARD_MODEL, "--out", second.to_str().unwrap(), "--set", &model].into_iter();
    let ended = rollflow(&args.chain(sets.iter().flat_map(|set| ["--set", set])).collect::<Vec<_>>());
    assert_eq!(ended.code, Some(0), "{}", ended.err);
    let loss = |run: &Path, at: usize| rows(run)[at]["loss"].as_f64().unwrap();
    assert!(loss(&second, 0) < loss(&first, 0), "it goes on from where it was");

    fs::write(&data, "{\"question\": \"say a\", \"good\": \"a\", \"bad\": \"a\"}\n").unwrap();
    let same = train(&folder.path().join("same"), &sets);
    assert!(same.code == Some(1) && same.err.contains("all records were skipped: 1 whose answers are the same"), "{}", same.err);
    let long = "9".repeat(3000);
    fs::write(&data, format!("{{\"question\": \"a\", \"good\": \"{long}\", \"bad\": \"b\"}}\n")).unwrap();
    let long = train(&folder.path().join("long"), &sets);
    assert!(long.code == Some(1) && long.err.contains("pair 0: ") && long.err.contains("at most 2048"), "{}", long.err);
}

#[test]
fn pairs_come_from_data_sets_in_any_format_too() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("ranked.json");
    let pair = |chosen: &str, rejected: &str| serde_json::json!({"question": "say a", "chosen": chosen, "rejected": rejected});
    fs::write(&data, serde_json::json!([pair("a", "b"), pair("a", "a"), pair("a", "c")]).to_string()).unwrap();
    let task = format!("task={{kind=\"data\",data={data:?}}}");
    let ended = train(
        &folder.path().join("run"),
        &[&task, "reward_model.held_out=0", "reward_model.steps=2", "reward_model.schedule={kind=\"constant\"}"],
    );
    assert_eq!(ended.code, Some(0), "{}", ended.err);
    assert!(ended.out.contains("Data: ranked: 2 records; skipped: 1 whose answers are the same"), "{}", ended.out);
}

#[test]
fn a_folder_that_is_no_reward_model_and_a_section_that_is_missing_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let missing = rollflow(&["check", GRPO, "--set", "reward={kind=\"model\",path=\"no/where\"}"]);
    assert!(
        missing.code == Some(2) && missing.err.contains("`reward.path` is no/where, which does not exist"),
        "{}",
        missing.err
    );
    let of_words = folder.path().join("words");
    let ended = rollflow(&run_args(GRPO, &of_words, &["train.steps=1"]));
    assert_eq!(ended.code, Some(0), "{}", ended.err);
    let path = format!("reward={{kind=\"model\",path={:?}}}", checkpoint(&of_words, 1));
    let refused = rollflow(&run_args(GRPO, &folder.path().join("run"), &[&path]));
    assert!(refused.code == Some(1) && refused.err.contains("gives words and no score"), "{}", refused.err);

    let recipe = folder.path().join("recipe.toml");
    fs::write(
        &recipe,
        "pipeline = \"reward_model\"\n[model]\nkind = \"tiny\"\n[task]\nkind = \"arithmetic\"\n[train]\nlr = 1e-3\n",
    )
    .unwrap();
    let refused = rollflow(&["check", recipe.to_str().unwrap()]);
    assert_eq!(refused.code, Some(2));
    for part in ["has no section [reward_model]", "[train] means nothing to pipeline = \"reward_model\""] {
        assert!(refused.err.contains(part), "{}", refused.err);
    }
}
