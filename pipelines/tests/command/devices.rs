//! Recipes that name several devices (R127): the processor more than once, or GPUs, where the environment puts all recipes on one
//! (`ROLLFLOW__MODEL__DEVICE=cuda`).

use crate::running::{GRPO, SFT, TINY_MODEL, plain_run_args, read, rollflow, rows, run_args, with_sets};

/// Two more devices beside a recipe's own, in the words of `--set`.
fn more(key: &str) -> String {
    let gpus = std::env::var("ROLLFLOW__MODEL__DEVICE").is_ok_and(|device| device.starts_with("cuda"));
    let devices = if gpus { ["cuda:1", "cuda:2"] } else { ["cpu", "cpu"] };
    format!("{key}={devices:?}")
}

fn losses(folder: &std::path::Path, name: &str, sets: &[&str]) -> Vec<f64> {
    let run = folder.join(name);
    rollflow(&plain_run_args(SFT, &run, &[TINY_MODEL, &["sft.steps=12", "sft.batch=16"], sets].concat())).ok();
    rows(&run).iter().map(|row| row["loss"].as_f64().unwrap()).collect()
}

#[test]
fn n1_supervised_steps_on_several_devices_are_those_on_one() {
    let folder = tempfile::tempdir().unwrap();
    let alone = losses(folder.path(), "alone", &[]);
    let together = losses(folder.path(), "together", &[&more("sft.replica_devices")]);
    assert_eq!(alone.len(), 12);
    for (alone, together) in alone.iter().zip(&together) {
        assert!((alone - together).abs() < 1e-4, "{alone} {together}");
    }
}

#[test]
fn a_run_generates_and_trains_on_several_devices() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let (generators, beside) = (more("generate.devices"), more("train.replica_devices"));
    let sets = [&generators, "generate.workers=2", &beside, "flow.max_staleness=2"];
    rollflow(&run_args(GRPO, &run, &[&sets[..], &["train.steps=6"]].concat())).ok();
    assert_eq!(read(&run.join("metrics.jsonl")).lines().count(), 6);
    assert!(read(&run.join("report.html")).contains("[\"token ledger\",\""));
}

#[test]
fn check_tells_of_devices_that_nobody_uses_or_that_are_not_there() {
    let check = |sets: &[&str]| {
        let ended = rollflow(&with_sets(&["check", GRPO], sets));
        assert_eq!(ended.code, Some(2), "{}", ended.out);
        ended.err
    };
    let told = check(&["generate.devices=[\"cpu\",\"cpu\"]"]);
    assert!(told.contains("names 2 devices for 1 of `generate.workers`"), "{told}");
    let told = check(&["model.device=cuda:1", "train.replica_devices=[\"cuda:2\",\"cuda:1\",\"cuda:2\"]"]);
    assert_eq!(told.matches("which is in use there already").count(), 2, "{told}");
    let told = check(&["train.replica_devices=[\"cuda:63\"]", "generate.devices=[\"cuda:62\"]"]);
    assert!(
        told.contains("`train.replica_devices` is \"cuda:63\"") && told.contains("`generate.devices` is \"cuda:62\""),
        "{told}"
    );
}
