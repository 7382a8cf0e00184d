//! `grpo_offline`: learning from what was recorded, without a generator (R046, R139).

use std::fs;
use std::path::Path;

use rollflow::data::arithmetic;
use rollflow::engine::SamplingParams;
use rollflow::observe::logs::Rollout;
use rollflow::prelude::*;
use rollflow::rollout::complete;
use serde_json::{Value, json};

use crate::agents::GAME;
use crate::crashes::refuses_fewer_steps;
use crate::running::{Ended, GRPO, TINY_MODEL, finished, json_lines, plain_run_args, rollflow, rollouts, rows, run_args};

pub const OFFLINE: &str = "pipelines/recipes/grpo_offline.toml";

/// The share of all single-digit sums that the newest checkpoint of a run gets right when it takes the likeliest token each time.
fn greedy_accuracy(run: &Path) -> f64 {
    let checkpoint = fs::read_dir(run.join("checkpoints")).unwrap().map(|entry| entry.unwrap().path()).max().unwrap();
    let policy = Policy::load(checkpoint).unwrap();
    let params = SamplingParams { temperature: 0.0, max_new_tokens: 4, ..SamplingParams::default() };
    let sums = arithmetic::addition(1);
    let prompts = (0..).zip(&sums).map(|(ordinal, sum)| Prompt { ordinal, ..Prompt::from(sum) }).collect();
    let groups = complete(&mut policy.engine(25, 0), policy.tokenizer(), prompts, 1, &params).unwrap();
    let right = sums.iter().zip(&groups).filter(|(sum, group)| {
        let sample = &group.samples[0];
        sample.response == sum.completion && sample.status == Status::Completed
    });
    right.count() as f64 / sums.len() as f64
}

fn run(out: &Path, sets: &[String]) -> Ended {
    rollflow(&plain_run_args(OFFLINE, out, sets))
}

/// The shipped recipe on the shipped rollouts: from a model that knows nothing to one that is right more often than those who were recorded.
#[test]
fn a_policy_learns_from_recorded_rollouts_alone() {
    let folder = tempfile::tempdir().unwrap();
    let (out, untrained) = (folder.path().join("run"), folder.path().join("untrained"));
    let ended = run(&out, &[]).ok();
    assert!(ended.out.contains("the trainer's own, at the step that learns from them"), "{}", ended.out);
    let recorded = json_lines(Path::new("data/rollouts_addition.jsonl"));
    let recorded = recorded.iter().map(|row| row["reward"].as_f64().unwrap()).sum::<f64>() / recorded.len() as f64;
    assert_eq!(
        run(&untrained, &["train.steps=1".to_owned(), "train.lr=1e-12".to_owned(), "train.schedule.warmup=0".to_owned()]).code,
        Some(0)
    );
    let (before, after) = (greedy_accuracy(&untrained), greedy_accuracy(&out));
    assert!(
        before < 0.1 && after > recorded + 0.4,
        "{before} before, {after} after, {recorded} of the recorded answers are right"
    );
}

/// This project's own rollouts, with their log-probabilities, continue the policy that sampled them. A run goes on where it was (law C2).
#[test]
fn rollouts_of_a_run_are_learned_from_with_their_log_probabilities_and_groups() {
    let folder = tempfile::tempdir().unwrap();
    let online = folder.path().join("online");
    finished(&online, &["observe.rollouts_every=1"]);
    let recorded = json_lines(&online.join("rollouts.jsonl"));
    let groups: std::collections::BTreeSet<u64> = recorded.iter().map(|row| row["group"].as_u64().unwrap()).collect();
    let sets = |steps: u64| {
        let checkpoint = online.join("checkpoints/step_000003");
        vec![
            format!("model={{kind=\"folder\",path={checkpoint:?}}}"),
            format!("task.path={:?}", online.join("rollouts.jsonl")),
            "filter=[]".to_owned(),
            "batch.groups=3".to_owned(),
            "checkpoint.every=2".to_owned(),
            "observe.rollouts_every=1".to_owned(),
            "train.schedule.kind=constant".to_owned(),
            "train.correction={kind=\"truncated_is\"}".to_owned(),
            // Whatever was earned, something is learned.
            "train.advantage={kind=\"constant\",baseline=0.5}".to_owned(),
            format!("train.steps={steps}"),
            "train.schedule.warmup=0".to_owned(),
        ]
    };
    let (whole, parts) = (folder.path().join("whole"), folder.path().join("parts"));
    let ended = run(&whole, &sets(8)).ok();
    let said = format!("Rollouts: {} in {} groups", recorded.len(), groups.len());
    assert!(ended.out.contains(&said) && ended.out.contains("Behaviour log-probabilities: as recorded"), "{said}: {}", ended.out);
    let rows_of_whole = rows(&whole);
    assert!(rows_of_whole[0]["log_prob_gap_mean_nats"].as_f64().unwrap() < 0.1, "they are those of nearly the same policy");
    assert!(rows_of_whole[0]["correction_weight_mean"].is_number());
    let first = &json_lines(&whole.join("rollouts.jsonl"))[0];
    assert!(recorded.iter().any(|row| row["tokens"] == first["tokens"]), "law D1");

    assert_eq!(run(&parts, &sets(4)).code, Some(0));
    rollflow(&["resume", parts.to_str().unwrap(), "--set", "train.steps=8"]).ok();
    let losses = |rows: Vec<Value>| rows.iter().map(|row| (row["loss"].clone(), row["reward_mean"].clone())).collect::<Vec<_>>();
    assert_eq!(losses(rows(&parts)), losses(rows_of_whole), "law C2");
    refuses_fewer_steps(&parts, "train.steps", 7, 8);
}

/// Law D1: of rollouts of several turns, what the model sampled is learned from again, and not what its environment said.
#[test]
fn rollouts_of_several_turns_are_learned_from_where_the_model_spoke() {
    let folder = tempfile::tempdir().unwrap();
    let (online, offline) = (folder.path().join("online"), folder.path().join("offline"));
    let sets = [&GAME[..], &["observe.rollouts_every=1"]].concat();
    assert_eq!(rollflow(&run_args(GRPO, &online, &sets)).code, Some(0));
    let recorded = rollouts(&online);
    let turns = |row: &Rollout| row.metadata["turns"].as_u64().unwrap();
    assert!(recorded.iter().any(|row| turns(row) > 1), "some have several turns");
    let sets = [
        format!("model={{kind=\"folder\",path={:?}}}", online.join("checkpoints/step_000003")),
        format!("task.path={:?}", online.join("rollouts.jsonl")),
        "filter=[]".to_owned(),
        "batch.groups=12".to_owned(),
        "observe.rollouts_every=1".to_owned(),
        "train.advantage={kind=\"constant\",baseline=0.5}".to_owned(),
        "train.steps=1".to_owned(),
        "train.schedule.warmup=0".to_owned(),
    ];
    run(&offline, &sets).ok();
    // Tokens that nobody sampled have no log-probability on record: taken for sampled ones, they would be far off.
    let row = &rows(&offline)[0];
    assert!(row["log_prob_gap_mean_nats"].as_f64().unwrap() < 0.1, "{row}");
    let sampled: usize = recorded.iter().map(|row| row.versions.generated()).sum();
    let learned = rollouts(&offline);
    assert_eq!(learned.iter().map(|row| row.versions.generated()).sum::<usize>(), sampled);
    let told = |rows: &[Rollout]| {
        let mut all: Vec<_> = rows.iter().map(|row| (row.tokens.clone(), turns(row), row.index, row.part)).collect();
        all.sort();
        all
    };
    assert_eq!(told(&learned), told(&recorded));
}

#[test]
fn rollouts_that_make_no_sense_are_counted_and_a_prompt_is_a_group() {
    let folder = tempfile::tempdir().unwrap();
    let (file, out) = (folder.path().join("plain.jsonl"), folder.path().join("run"));
    let records = [
        json!({"prompt": "1+1=", "response": "2", "reward": 1}),
        json!({"prompt": "2+2=", "response": "5", "reward": 0.0, "log_probs": [-0.5, -0.25]}),
        json!({"prompt": "1+1=", "response": "3", "reward": 0}),
        json!({"prompt": "2+2=", "response_tokens": [8, 1], "reward": 1}),
        json!({"prompt": "3+3=", "response": "6", "reward": 1}),
        json!({"prompt": "3+3=", "response": "6"}),
        json!({"prompt": "3+3=", "reward": 1}),
        json!({"prompt": "4+4=", "response": "8", "reward": 1, "log_probs": [-1.0]}),
    ];
    fs::write(&file, records.map(|record| format!("{record}\n")).concat()).unwrap();
    let sets = [
        "filter=[{kind=\"nonzero_std\"}]".to_owned(),
        format!("task.path={file:?}"),
        "train.steps=2".to_owned(),
        "model.hidden=16".to_owned(),
        "batch.groups=2".to_owned(),
        "train.schedule.warmup=0".to_owned(),
    ];
    let ended = run(&out, &sets).ok();
    for said in [
        "Rollouts: 4 in 2 groups",
        "1 whose log_probs are not as many as its tokens",
        "1 without a response",
        "1 without a reward that is a number",
        "Groups left out: 1 ",
        "recorded for 1 rollouts; for 3 the trainer's own",
    ] {
        assert!(ended.out.contains(said), "{said}: {}", ended.out);
    }
    assert_eq!(rows(&out)[0]["reward_mean"], 0.5);
}

/// Laws C1, C2: with a reference, a critic and supervised samples beside, a run that goes on ends as one that was never interrupted.
#[test]
fn recorded_rollouts_are_learned_from_with_a_reference_a_critic_and_mixed_samples() {
    let folder = tempfile::tempdir().unwrap();
    let pairs = folder.path().join("pairs.jsonl");
    fs::write(&pairs, "{\"prompt\": \"1+1=\", \"completion\": \"2\"}\n{\"prompt\": \"2+2=\", \"completion\": \"4\"}\n").unwrap();
    let sets = |steps: u64| {
        let more = [
            "batch.groups=4",
            "checkpoint.every=2",
            "train.schedule={kind=\"constant\"}",
            "train.advantage={kind=\"group_mean\"}",
            "train.proximal=recompute",
            "reference.kind=frozen",
            "train.kl_loss={beta=0.1}",
            "critic={lr=1e-3}",
            "mix={weight=0.5,every=2,batch=2}",
            "filter=[]",
        ];
        let all = TINY_MODEL.iter().chain(&more).map(|set| (*set).to_owned());
        all.chain([format!("sft={{data={pairs:?}}}"), format!("train.steps={steps}")]).collect::<Vec<_>>()
    };
    let (whole, parts) = (folder.path().join("whole"), folder.path().join("parts"));
    run(&whole, &sets(6)).ok();
    let found = rows(&whole);
    assert_eq!(found.iter().filter(|row| row["mixed_loss"].is_number()).count(), 3, "every second step");
    assert!(found.iter().all(|row| row["critic_loss"].is_number()), "{found:?}");
    assert_eq!(run(&parts, &sets(2)).code, Some(0));
    rollflow(&["resume", parts.to_str().unwrap(), "--set", "train.steps=6"]).ok();
    let model = |run: &Path| fs::read(run.join("checkpoints/step_000006/model.safetensors")).unwrap();
    assert!(model(&whole) == model(&parts), "the same weights to the bit");
}

#[test]
fn mixed_samples_are_learned_at_temperature_1_whatever_the_rollouts_temperature_is() {
    let folder = tempfile::tempdir().unwrap();
    let pairs = folder.path().join("pairs.jsonl");
    fs::write(&pairs, "{\"prompt\": \"1+1=\", \"completion\": \"2\"}\n{\"prompt\": \"2+2=\", \"completion\": \"4\"}\n").unwrap();
    let loss = |temperature: &str| {
        let more = ["batch.groups=4", "train.steps=1", "train.schedule={kind=\"constant\"}", "mix={weight=0.5,batch=2}"];
        let sets = TINY_MODEL.iter().chain(&more).map(|set| (*set).to_owned());
        let own = [format!("sft={{data={pairs:?}}}"), format!("generate.temperature={temperature}")];
        let out = folder.path().join(temperature);
        run(&out, &sets.chain(own).collect::<Vec<_>>()).ok();
        rows(&out)[0]["mixed_loss"].as_f64().unwrap()
    };
    assert_eq!(loss("1.0"), loss("0.5"), "before the first update");
}

/// `[reward]` instead of the recorded rewards: what a group earns now is what filters and advantages see.
#[test]
fn recorded_rollouts_are_scored_anew_where_the_recipe_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let (file, out) = (folder.path().join("plain.jsonl"), folder.path().join("run"));
    let record = |response: &str, reward: f64| format!("{}\n", json!({"prompt": "1+1=", "response": response, "reward": reward}));
    let words = |response: &str| format!("{}\n", json!({"prompt": "2+2=", "response": response, "reward": 1}));
    fs::write(&file, record("2", 0.0) + &record("x", 0.0) + &words("a") + &words("b")).unwrap();
    let sets = [
        "filter=[{kind=\"nonzero_std\"}]".to_owned(),
        format!("task={{path={file:?},rescore=true}}"),
        "reward={kind=\"regex\",pattern=\"[0-9]\"}".to_owned(),
        "train.steps=1".to_owned(),
        "model.hidden=16".to_owned(),
        "batch.groups=1".to_owned(),
        "train.schedule.warmup=0".to_owned(),
    ];
    let ended = run(&out, &sets).ok();
    assert!(ended.out.contains("Rollouts: 2 in 1 groups") && ended.out.contains("Groups left out: 1 "), "{}", ended.out);
    assert_eq!(rows(&out)[0]["reward_mean"], 0.5, "1 for a digit, 0 for none");
    let refused = rollflow(&["check", OFFLINE, "--set", "reward.kind=exact"]);
    assert!(refused.code == Some(2) && refused.err.contains("[reward] means nothing"), "{}", refused.err);
    let refused = rollflow(&["check", OFFLINE, "--set", "task.rescore=true"]);
    assert!(refused.code == Some(2) && refused.err.contains("the recipe has no `reward`"), "{}", refused.err);
}

#[test]
fn what_is_answered_already_needs_the_pipeline_for_it() {
    let task = ["--set", "task={kind=\"rollouts\",path=\"pipelines/data/rollouts_addition.jsonl\"}"];
    let refused = rollflow(&[&["check", GRPO], &task[..]].concat());
    assert!(refused.code == Some(2) && refused.err.contains("pipeline = \"grpo_offline\""), "{}", refused.err);
    let refused = rollflow(&["check", OFFLINE, "--set", "task={kind=\"arithmetic\"}"]);
    assert!(refused.code == Some(2) && refused.err.contains("task.kind = \"rollouts\""), "{}", refused.err);
    assert!(rollflow(&["graph", OFFLINE]).out.contains("rollouts"));
}
