//! Our functions against recorded outputs of the systems they equal, over `$ROLLFLOW_GOLDEN` or `tests/golden`.
//!
//! A case that we claim and get wrong, or can't run, fails. A kind that we don't have yet is listed as such and never counted as
//! passed. [`table`] says which is which. [`properties`] holds the laws that no recorded case shows.
#![allow(clippy::unwrap_used)]

mod advantages;
mod aggregation;
mod case;
mod chat;
mod corrections;
mod distillation;
mod divergence;
mod grpo;
mod masked;
#[path = "../support/objective.rs"]
mod objective;
mod optimizers;
mod packed;
mod packing;
mod preference;
mod properties;
mod rewards;
mod rloo;
mod rows;
mod schedules;
mod supervised;
mod table;
mod verl;
mod warpers;

use std::collections::BTreeMap;
use std::path::PathBuf;

use case::{Case, tensor};
use serde_json::{Value, json};

#[test]
fn functions_equal_the_systems_they_name() {
    let given = std::env::var_os("ROLLFLOW_GOLDEN").map(PathBuf::from);
    let folder = given.clone().unwrap_or_else(|| PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden")));
    let cases = case::read_folder(&folder);
    assert!(!cases.is_empty(), "no golden cases in {}", folder.display());

    let (mut passed, mut failures) = (BTreeMap::new(), Vec::new());
    let mut not_yet: BTreeMap<(String, String), usize> = BTreeMap::new();
    for case in &cases {
        let key = (case.family.clone(), case.kind().to_owned());
        match table::runner(case) {
            None => *not_yet.entry(key).or_default() += 1,
            Some(run) => match run_case(run, case) {
                Ok(()) => *passed.entry(key).or_insert(0usize) += 1,
                Err(why) => failures.push(format!("{} {}: {why}", case.family, case.name)),
            },
        }
    }
    for (word, kinds) in [("passed", &passed), ("not yet", &not_yet)] {
        for ((family, kind), count) in kinds {
            println!("{word:>8}  {family} {kind} ({count})");
        }
    }
    assert!(failures.is_empty(), "{} golden cases failed:\n{}", failures.len(), failures.join("\n"));
    if given.is_none() {
        for (family, _) in table::CLAIMED {
            assert!(passed.keys().any(|(passed, _)| passed == family), "no case of {family} was run");
        }
    }
}

/// A panic inside a runner fails that case, not the whole table.
fn run_case(run: table::Runner, case: &Case) -> Result<(), String> {
    std::panic::catch_unwind(|| run(case)).unwrap_or_else(|_| Err("the runner panicked".into()))
}

#[test]
fn a_wrong_number_and_an_unknown_setting_fail() {
    let folder = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden"));
    let cases = case::read_folder(&folder);
    let case = cases.iter().find(|case| case.name == "dapo/beta0.04_k3").unwrap();
    let run = table::runner(case).unwrap();
    assert_eq!(run(case), Ok(()));
    let mut wrong = case.clone();
    wrong.value["expected"]["loss"]["data"][0] = 1.0.into();
    assert!(run(&wrong).unwrap_err().contains("loss"));
    let mut unknown = case.clone();
    unknown.value["resolved"]["importance_sampling_level"] = "paragraph".into();
    assert!(run(&unknown).unwrap_err().contains("importance_sampling_level"));
    let mut unknown = case.clone();
    unknown.value["inputs"]["moon_phase"] = 1.into();
    assert!(run(&unknown).unwrap_err().contains("moon_phase"));
}

/// Law N1: a whole batch's size that is given from outside, and ranks whose gradients are averaged, for every function that takes them.
#[test]
fn the_size_of_the_whole_batch_and_ranks_are_inputs() {
    let folder = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden"));
    let cases = case::read_folder(&folder);
    let scaled = |value: &mut Value, by: f64| {
        for number in value["data"].as_array_mut().into_iter().flatten() {
            *number = (number.as_f64().unwrap() * by).into();
        }
    };
    let mut seen = 0;
    for case in cases.iter().filter(|case| ["verl_policy_losses", "trl_sft_loss"].contains(&case.family.as_str())) {
        let Some(run) = table::runner(case) else { continue };
        // What verl draws at random can't be scaled, and its geo_mean looks at no other rank.
        if run_case(run, case).is_err() || ["clip_cov", "geo_mean"].contains(&case.kind()) {
            continue;
        }
        let mut of_ranks = case.clone();
        let factor = if case.family == "trl_sft_loss" {
            let labels = case.value["inputs"]["labels"]["data"].as_array().unwrap();
            let columns = case.value["inputs"]["labels"]["shape"][1].as_u64().unwrap() as usize;
            let trained = (0..labels.len()).filter(|at| at % columns != 0 && labels[*at] != -100).count();
            of_ranks.value["inputs"]["num_items_in_batch"] = (4 * trained).into();
            0.25
        } else {
            let mask = tensor(&case.value["inputs"]["response_mask"]);
            let tokens: f64 = mask.data.iter().sum();
            let rows = mask.data.chunks(mask.shape[1]).filter(|row| row.iter().sum::<f64>() > 0.0).count();
            of_ranks.value["config"]["global_batch_info"] =
                json!({"dp_size": 2, "batch_num_tokens": 4.0 * tokens, "global_batch_size": 4 * rows});
            if case.value["config"]["loss_agg_mode"] == "token-sum" { 2.0 } else { 0.5 }
        };
        assert!(run_case(run, &of_ranks).is_err(), "{}: the size is not looked at", case.name);
        scaled(&mut of_ranks.value["expected"]["loss"], factor);
        scaled(&mut of_ranks.value["expected"]["grad_log_prob"], factor);
        assert_eq!(run_case(run, &of_ranks), Ok(()), "{}", case.name);
        seen += 1;
    }
    assert!(seen > 20, "only {seen} cases");
}

/// Every number that verl's functions gave is looked at: a case fails when the first of any of its results is another.
#[test]
fn no_result_of_verls_functions_goes_unread() {
    let folder = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden"));
    let cases = case::read_folder(&folder);
    let mut results = 0;
    for case in cases.iter().filter(|case| ["verl_advantages", "verl_kl_agg_value"].contains(&case.family.as_str())) {
        let Some(run) = table::runner(case) else { continue };
        let expected = &case.value["expected"];
        let parts: Vec<String> = match expected.as_object() {
            Some(parts) if !parts.contains_key("data") => parts.keys().map(|part| format!("/{part}/data")).collect(),
            Some(_) => vec!["/data".to_owned()],
            None => vec![String::new()],
        };
        for part in parts {
            let mut wrong = case.clone();
            let numbers = wrong.value["expected"].pointer_mut(&part).and_then(|data| data.as_array_mut()).unwrap();
            numbers[0] = (numbers[0].as_f64().unwrap() + 1.0).into();
            assert!(run_case(run, &wrong).is_err(), "{} {}: expected{part} is not looked at", case.family, case.name);
            results += 1;
        }
    }
    assert!(results > 50, "only {results} results were seen");
}
