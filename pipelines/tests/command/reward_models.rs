//! A reward model from pairs to rewards, by the command alone: trained, held to pairs it never saw, interrupted, and asked by `grpo`.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use rollflow::data::PromptText;
use rollflow::observe::Metric;
use rollflow::prelude::*;
use rollflow::stages::reward::Scorer;
use rollflow::train::ScoreModel;
use serde_json::Value;

use crate::crashes::{self, refuses_fewer_steps};
use crate::running::{Ended, GRPO, finished, plain_run_args, read, rollflow, rollouts, rows, run_args, with_sets};

const REWARD_MODEL: &str = "pipelines/recipes/reward_model.toml";
const SMALL: [&str; 4] = ["model.hidden=64", "model.layers=2", "model.intermediate=128", "reward_model.batch=48"];

/// Trains a small reward model in `out`.
fn train(out: &Path, sets: &[&str]) -> Ended {
    rollflow(&training(out, sets))
}

fn training<'a>(out: &'a Path, sets: &'a [&'a str]) -> Vec<&'a str> {
    with_sets(&plain_run_args(REWARD_MODEL, out, &SMALL), sets)
}

fn checkpoint(run: &Path, step: u64) -> PathBuf {
    run.join(format!("checkpoints/step_{step:06}"))
}

fn scorer(folder: &Path) -> Scorer {
    Scorer::new(&ScoreModel::load(folder).unwrap(), 1).unwrap()
}

/// Whether every answer earned what `reward` makes of its score and of whether it had ended.
fn assert_earned(run: &Path, scorer: &Scorer, reward: impl Fn(f64, bool) -> f64) {
    let rollouts = rollouts(run);
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
    let trained = train(&judge, &["reward_model.steps=300"]).ok();
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
    rollflow(&run_args(GRPO, &run, &alone)).ok();
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
    rollflow(&run_args(GRPO, &parts, &several)).ok();
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
    rollflow(&["resume", cut.to_str().unwrap(), "--set", "reward_model.steps=5"]).ok();
    for file in ["metrics.jsonl", "checkpoints/step_000005/model.safetensors"] {
        assert!(fs::read(whole.join(file)).unwrap() == fs::read(cut.join(file)).unwrap(), "{file} is the same");
    }
    refuses_fewer_steps(&cut, "reward_model.steps", 4, 5);
}

/// Laws C1 and C2.
#[test]
fn a_reward_model_of_adapters_that_was_killed_is_the_one_that_was_not() {
    let folder = tempfile::tempdir().unwrap();
    let (whole, killed) = (folder.path().join("whole"), folder.path().join("killed"));
    let sets =
        ["lora={rank=4,alpha=8}", "reward_model.steps=30", "checkpoint.every=1", "model.layers=1", "eval={every=10,limit=8}"];
    train(&whole, &sets).ok();
    assert!(crashes::killed(&killed, &training(&killed, &sets), (6, 21), || ()) >= 3);
    for file in ["adapter_config.json", "adapter_model.safetensors", "optimizer.safetensors"] {
        let at = |run: &Path| read(&checkpoint(run, 30).join("metadata.json")).contains(file);
        assert!(at(&whole) && at(&killed), "{file} is part of the checkpoint");
    }
    for file in ["adapter_model.safetensors", "optimizer.safetensors"] {
        crashes::same_bytes(&checkpoint(&whole, 30).join(file), &checkpoint(&killed, 30).join(file));
    }
    for file in ["metrics.jsonl", "evaluations.jsonl", "base/model.safetensors"] {
        crashes::same_bytes(&whole.join(file), &killed.join(file));
    }
}

#[test]
fn a_reward_model_of_adapters_is_exported_asked_and_gone_on_with() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let sets = ["lora={rank=8,alpha=16}", "reward_model.steps=120", "reward_model.lr=3e-3"];
    let judge = path("judge");
    train(&judge, &sets).ok();
    let loss = |run: &Path, at: usize| rows(run)[at]["loss"].as_f64().unwrap();
    // The trunk is random and stays so.
    let learned = (110..120).map(|at| loss(&judge, at)).sum::<f64>() / 10.0;
    assert!(learned < 0.92 * loss(&judge, 0), "{} {learned}", loss(&judge, 0));
    let adapters = checkpoint(&judge, 120);
    assert!(adapters.join("adapter_model.safetensors").is_file() && !adapters.join("model.safetensors").exists());

    // The model that they are merged into scores as they do over their base, and so do they when they are exported.
    let (merged, apart) = (path("merged"), path("apart"));
    for (to, further) in [(&merged, None), (&apart, Some("--adapter"))] {
        let args = ["export", judge.to_str().unwrap(), to.to_str().unwrap()];
        rollflow(&args.into_iter().chain(further).collect::<Vec<_>>()).ok();
    }
    let config: Value = serde_json::from_str(&read(&merged.join("config.json"))).unwrap();
    assert_eq!(config["architectures"][0], "LlamaForSequenceClassification");
    let scores = [&adapters, &merged, &apart].map(|of| {
        let scorer = scorer(of);
        ["7", "95", "12"].map(|answer| scorer.score(&"3+4=".into(), answer).unwrap())
    });
    for others in &scores[1..] {
        assert!(others.iter().zip(&scores[0]).all(|(a, b)| (a - b).abs() < 1e-4), "{scores:?}");
    }

    let path_of = format!("reward.path={}", adapters.display());
    rollflow(&run_args(GRPO, &path("grpo"), &["reward={kind=\"model\"}", &path_of])).ok();

    // A language model is adapted where it lies, and adapters of the same kind go on being trained.
    let model = format!("model={{kind=\"folder\",path={:?}}}", path("grpo").join("checkpoints/step_000003"));
    let again = |name: &str, model: &str, sets: &[&str]| {
        let sets = [&["reward_model.steps=3", "reward_model.schedule.warmup=0", model][..], sets].concat();
        rollflow(&plain_run_args(REWARD_MODEL, &path(name), &sets))
    };
    again("words", &model, &sets[..1]).ok();
    let recipe = read(&path("words").join("recipe.toml"));
    assert!(recipe.contains("ask = \"as_written\""), "the folder has a chat template, and its run read plain text: {recipe}");
    assert!(!path("words").join("base").exists() && checkpoint(&path("words"), 3).join("adapter_model.safetensors").is_file());
    assert!(scorer(&checkpoint(&path("words"), 3)).score(&"3+4=".into(), "7").unwrap().is_finite());
    let model = format!("model={{kind=\"folder\",path={adapters:?}}}");
    again("on", &model, &sets[..1]).ok();
    assert!(loss(&path("on"), 0) < loss(&judge, 0), "it goes on from where it was");
    let refused = again("refused", &model, &["lora={rank=3}"]);
    assert!(refused.code == Some(1) && refused.err.contains("rank 8") && refused.err.contains("rank 3"), "{}", refused.err);
    again("full", &model, &[]).ok();
    assert!(checkpoint(&path("full"), 3).join("model.safetensors").is_file());
}

#[test]
fn check_shows_the_adapters_of_a_reward_model_with_their_rate_and_memory() {
    let checked = rollflow(&["check", REWARD_MODEL, "--set", "lora={rank=4}"]);
    assert!(checked.code == Some(0) && checked.out.contains("the trainer's adapters: "), "{}{}", checked.out, checked.err);
    let unread = rollflow(&["check", REWARD_MODEL, "--set", "lora={sync=\"adapter\"}"]);
    assert!(unread.code == Some(2) && unread.err.contains("`lora.sync` has no effect"), "{}", unread.err);
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
    let ended = train(&first, &sets).ok();
    assert!(!ended.out.contains("Held-out"), "{}", ended.out);
    let scorer = scorer(&checkpoint(&first, 20));
    let score = |prompt: &str, answer: &str| scorer.score(&prompt.into(), answer).unwrap();
    assert!(score("say a", "a") > score("say a", "b") && score("say c", "c") > score("say c", "4"));
    let model = format!("model={{kind=\"folder\",path={:?}}}", checkpoint(&first, 20));
    rollflow(&plain_run_args(REWARD_MODEL, &second, &[&[&*model], &sets[..]].concat())).ok();
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
    let sets = [&*task, "reward_model.held_out=0", "reward_model.steps=2", "reward_model.schedule={kind=\"constant\"}"];
    let ended = train(&folder.path().join("run"), &sets).ok();
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
    finished(&of_words, &["train.steps=1"]);
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
