//! Runs that are held to a reference policy, and runs on pairs.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::running::{GRPO, TINY, rollflow, rows, run_args, with_sets};

const DPO: &str = "pipelines/recipes/dpo.toml";

fn last_row(run: &Path) -> Value {
    rows(run).pop().unwrap()
}

/// Runs to the end and gives the last row of its metrics.
fn last(run: &Path, sets: &[&str]) -> Value {
    rollflow(&run_args(GRPO, run, sets)).ok();
    last_row(run)
}

/// In the loss and in the reward: the mean divergence of the last of 100 steps, free and held.
#[test]
fn the_dearer_distance_is_the_less_a_policy_moves_away() {
    let folder = tempfile::tempdir().unwrap();
    let far = |distance: &str, key: &str| {
        let run = folder.path().join("run");
        let sets = ["reference={kind=\"frozen\"}", "train.steps=100", "train.lr=5e-3", distance];
        last(&run, &sets);
        let rows = rows(&run);
        fs::remove_dir_all(&run).unwrap();
        rows[80..].iter().map(|row| row[key].as_f64().unwrap()).sum::<f64>() / 20.0
    };
    let [free, held] = ["1e-9", "1"].map(|coef| far(&format!("train.kl_loss={{beta={coef}}}"), "kl_loss_mean_nats"));
    assert!((0.0..0.4 * free).contains(&held), "{held} {free}");
    let cost = |coef| far(&format!("train.kl_reward={{beta={coef},estimator=\"k3\"}}"), "kl_reward_mean_nats");
    let [free, held] = ["0", "1"].map(cost);
    assert!((0.0..0.6 * free).contains(&held), "{held} {free}");
}

#[test]
fn a_folder_is_a_reference_too_if_it_speaks_of_the_same_tokens() {
    let folder = tempfile::tempdir().unwrap();
    let (first, second, other) = (folder.path().join("first"), folder.path().join("second"), folder.path().join("other"));
    last(&first, &["train.steps=2"]);
    let model = first.join("checkpoints/step_000002");
    let reference = format!("reference={{kind=\"frozen\",path={:?}}}", model.to_str().unwrap());
    // Without a warm-up it begins elsewhere than that folder stands.
    let row = last(&second, &[&reference, "train.kl_loss={beta=0.1}", "sft={steps=1}", "train.steps=1"]);
    assert!(row["kl_loss_mean_nats"].as_f64().unwrap() > 0.0, "{row}");
    assert!(!second.join("reference").exists(), "it is found where it was");
    let sets = [&reference, "train.kl_loss={beta=0.1}", "model.vocab=80"];
    let refused = rollflow(&run_args(GRPO, &other, &sets));
    assert_eq!(refused.code, Some(1));
    assert!(
        refused.err.contains("reads other tokens than the policy") && refused.err.contains("the tokenizers differ"),
        "{}",
        refused.err
    );
}

#[test]
fn a_reference_and_pairs_are_part_of_a_forecast() {
    let folder = tempfile::tempdir().unwrap();
    let profile = folder.path().join("profile.json");
    let args = ["simulate", DPO, "--profile", profile.to_str().unwrap(), "--record", "3", "--steps", "50"];
    let forecast = rollflow(&with_sets(&args, &[&TINY[..], &["train.lr=1e-3"]].concat())).ok();
    assert!(forecast.out.contains("steps/h"), "{}", forecast.out);
    let recorded: Value = serde_json::from_slice(&fs::read(&profile).unwrap()).unwrap();
    assert!(["pairs", "reference"].iter().all(|stage| recorded["stages"][stage]["item"].is_number()), "{recorded}");
}

#[test]
fn online_dpo_tells_how_many_pairs_it_has_right_and_by_how_much() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    rollflow(&run_args(DPO, &run, &["train.steps=3"])).ok();
    let row = last_row(&run);
    assert!(row["pair_accuracy_ratio"].as_f64().is_some_and(|share| (0.0..=1.0).contains(&share)), "{row}");
    assert!(row["pair_margin_mean"].is_number(), "{row}");
    assert!(run.join("reference/model.safetensors").exists(), "what the warm-up made is kept");
}
