//! `simulate`: forecasts from a recorded profile, or from one written by hand.

use std::fs;
use std::time::Duration;

use serde_json::{Value, json};

use crate::running::{Ended, GRPO, Running, SFT, TINY, rollflow, with_sets};

/// `simulate grpo.toml` with the tiny values, that profile and these arguments.
fn simulate(profile: &std::path::Path, args: &[&str]) -> Ended {
    let command = with_sets(&["simulate", GRPO, "--profile", profile.to_str().unwrap()], &TINY);
    rollflow(&[&command[..], args].concat())
}

/// The number before `unit`, in every forecast.
fn numbers(out: &str, unit: &str) -> Vec<f64> {
    let before = |line: &str| line.split(unit).next()?.split_whitespace().last()?.parse().ok();
    out.lines().filter(|line| line.contains(unit)).filter_map(before).collect()
}

#[test]
fn a_profile_is_recorded_once_and_the_same_what_if_has_the_same_answer() {
    let folder = tempfile::tempdir().unwrap();
    let profile = folder.path().join("profile.json");
    let args = ["--record", "5", "--steps", "200", "--vary", "flow.max_staleness=0,1,3"];
    let first = simulate(&profile, &args).ok();
    assert!(first.out.contains("5 steps took") && first.out.contains("simulated they take"), "{}", first.out);
    let recorded: Value = serde_json::from_slice(&fs::read(&profile).unwrap()).unwrap();
    assert_eq!(recorded["recorded"]["steps"], 5);
    assert_eq!(recorded["answers"]["recorded"].as_array().map(Vec::len), Some(5 * 4), "groups of the steps, nothing dropped");

    let second = simulate(&profile, &args);
    assert!(!second.out.contains("recording"), "{}", second.out);
    assert!(first.out.ends_with(&second.out), "{} and {}", first.out, second.out);
    let lines: Vec<&str> = second.out.lines().filter(|line| line.contains("steps/h")).collect();
    assert_eq!(lines.len(), 3, "{}", second.out);
    assert!(lines[0].starts_with("flow.max_staleness=0") && lines[0].ends_with("staleness 0: 100%"), "{}", lines[0]);
    assert!(!lines[1].contains("2: "), "law V2: {}", lines[1]);

    // The number of slots is then found by measuring, but simulated time.
    let adaptive = ["--set", "generate.max_num_seqs=0", "--set", "flow.max_staleness=1", "--steps", "200"];
    let (once, again) = (simulate(&profile, &adaptive), simulate(&profile, &adaptive));
    assert_eq!((once.code, &once.out), (Some(0), &again.out), "{}", once.err);
}

#[test]
fn an_interrupted_simulation_prints_the_figures_of_its_steps_fails_and_begins_no_other() {
    let folder = tempfile::tempdir().unwrap();
    let profile = folder.path().join("profile.json");
    let command = with_sets(&["simulate", GRPO, "--profile", profile.to_str().unwrap(), "--record", "5"], &TINY);
    let mut running = Running::start(&[&command[..], &["--steps", "100000000", "--vary", "flow.max_staleness=0,1"]].concat());
    running.line(|line| line.contains("simulated they take").then_some(()));
    // Some steps are simulated.
    std::thread::sleep(Duration::from_secs(2));
    running.interrupt();
    let figures = running.line(|line| line.contains("steps/h").then(|| line.to_owned()));
    assert!(figures.starts_with("flow.max_staleness=0"), "{figures}");
    let stopped = running.line(|line| line.starts_with("error:").then(|| line.to_owned()));
    assert!(stopped.starts_with("error: interrupted: stopped after ") && stopped.ends_with(" of 100000000 steps"), "{stopped}");
    assert_eq!(running.end(), Some(1));
    let steps = stopped.split_whitespace().nth(4).unwrap();
    let whole = simulate(&profile, &["--steps", steps, "--set", "flow.max_staleness=0"]).ok();
    let (part, whole) = (numbers(&figures, "steps/h")[0], numbers(&whole.out, "steps/h")[0]);
    assert!((0.5..2.0).contains(&(part / whole)), "{part} and {whole} steps an hour");
}

/// One token a millisecond and slot, and a step of training takes 100 ms.
fn drawn(sigma: f64) -> Value {
    json!({
        "decode": { "pass": 1e-3, "row": 0.0, "prefill": 0.0 },
        "stages": { "train": { "item": 0.1 } },
        "answers": { "drawn": { "median": 60.0, "sigma": sigma, "success": 0.5 } },
        "recorded": null,
    })
}

#[test]
fn a_profile_is_simulated_where_the_recipes_devices_are_absent_and_none_is_recorded_there() {
    let folder = tempfile::tempdir().unwrap();
    let profile = folder.path().join("profile.json");
    let args = ["--set", "model.device=\"cuda:63\"", "--steps", "20"];
    let refused = simulate(&profile, &args);
    assert!(refused.code == Some(2) && refused.err.contains("cuda:63"), "{refused:?}");
    fs::write(&profile, drawn(0.0).to_string()).unwrap();
    let ended = simulate(&profile, &args);
    assert!(ended.code == Some(0) && ended.out.contains("steps/h"), "{ended:?}");
}

#[test]
fn what_a_long_tail_costs_and_over_sampling_gives_back_is_seen_ahead() {
    let folder = tempfile::tempdir().unwrap();
    let (even, tailed) = (folder.path().join("even.json"), folder.path().join("tailed.json"));
    fs::write(&even, drawn(0.0).to_string()).unwrap();
    fs::write(&tailed, drawn(1.2).to_string()).unwrap();
    // As many groups under way in both cases: twice a batch.
    let sets = ["--set", "generate.max_new_tokens=400", "--set", "flow.max_staleness=2", "--set", "flow.window=8"];
    let args: Vec<&str> = sets.into_iter().chain(["--steps", "300", "--vary", "batch.oversampling_factor=1,2"]).collect();
    let rates = |profile| {
        let ended = simulate(profile, &args).ok();
        numbers(&ended.out, "steps/h")
    };
    let (even, tailed) = (rates(&even), rates(&tailed));
    // The trainer alone takes 0.1 s a step, which even answers nearly hide behind.
    assert!((29_000.0..=36_000.0).contains(&even[0]), "{even:?}");
    assert!(tailed[0] < 0.9 * even[0], "a batch waits for its longest answer: {tailed:?}, {even:?}");
    assert!(tailed[1] > 1.05 * tailed[0], "with twice as many to choose from it waits less: {tailed:?}");
}

/// Forecasts of a profile in which engine and trainer take long, on a cluster with these keys.
fn on_cluster(keys: &str, vary: &str, sets: &[&str]) -> Ended {
    let folder = tempfile::tempdir().unwrap();
    let (profile, cluster) = (folder.path().join("profile.json"), folder.path().join("cluster.toml"));
    let mut times = drawn(0.5);
    times["decode"] = json!({ "pass": 1e-3, "row": 1e-3, "prefill": 1e-5 });
    times["stages"]["train"] = json!({ "item": 0.01, "token": 1e-4 });
    fs::write(&profile, times.to_string()).unwrap();
    fs::write(&cluster, format!("[cluster]\n{keys}")).unwrap();
    let common = ["generate.max_num_seqs=32", "flow.max_staleness=2", "generate.max_new_tokens=200"];
    let args = ["--cluster", cluster.to_str().unwrap(), "--steps", "300", "--vary", vary];
    simulate(&profile, &with_sets(&args, &[&common[..], sets].concat()))
}

fn rates(keys: &str, vary: &str, sets: &[&str]) -> Vec<f64> {
    let ended = on_cluster(keys, vary, sets).ok();
    numbers(&ended.out, "steps/h")
}

#[test]
fn more_engines_help_until_the_trainer_is_the_bottleneck_and_more_ranks_until_their_link_is() {
    let engines = rates("", "cluster.engines=1,2,4,64,128", &[]);
    assert!(engines[1] > 1.7 * engines[0] && engines[2] > 1.4 * engines[1], "{engines:?}");
    assert!(engines[4] < 1.05 * engines[3], "{engines:?}");
    let ranks = rates("engines = 64\nparameters = 1e6\nlink = 1e9", "cluster.ranks=1,2,4", &[]);
    assert!(ranks[1] > ranks[0] && ranks[2] > ranks[1], "{ranks:?}");
    let slow = on_cluster("engines = 64\nparameters = 1e7\nlink = 1e8", "cluster.ranks=1,2", &[]);
    let found = numbers(&slow.out, "steps/h");
    assert!(found[1] < found[0] && slow.out.contains("exchanges of ranks take"), "0.4 s of exchange a part: {}", slow.out);
    let keys = "engines = 64\nranks = 4\nparameters = 1e6\nlink = 1e9";
    let sharded = rates(keys, r#"ranks.shard="nothing","parameters""#, &["train.micro_batch_tokens=16"]);
    assert!(sharded[1] < sharded[0], "parameters are gathered for each micro-batch: {sharded:?}");
}

#[test]
fn failures_outages_and_slow_weights_cost_time_and_the_same_seed_repeats_them() {
    let failing = rates("engines = 4\nabsence = 60", "cluster.failures=0,60,60", &[]);
    assert!(failing[1] == failing[2] && failing[1] < 0.8 * failing[0], "{failing:?}");
    let outage = rates("engines = 4", "cluster.outages=[],[{at=1,engines=3,seconds=1e6}]", &[]);
    assert!(outage[1] < 0.6 * outage[0], "one engine of four is left: {outage:?}");
    let synchronous = ["flow.max_staleness=0"];
    let pause = rates("engines = 4", "cluster.pause=0,2", &synchronous);
    assert!(pause[1] < 0.8 * pause[0], "{pause:?}");
    let servers = [&synchronous[..], &[r#"engine={kind="rollflow",urls=["http://127.0.0.1:1"]}"#]].concat();
    let keys = "engines = 4\nversion_bytes = 1e8\nlink = 1e8";
    let carried = on_cluster(keys, r#"engine.carry="folder","stream""#, &servers);
    let found = numbers(&carried.out, "steps/h");
    assert!(found[0] < 0.8 * pause[0] && found[1] < found[0], "one link sends four copies: {}, {}", carried.out, carried.err);
    assert_eq!(numbers(&carried.out, " s to the engines"), [2.0, 4.0], "{}", carried.out);
    let seldom = [&servers[..], &["cluster.version_bytes=1e9", "flow.max_staleness=1"]].concat();
    let every = rates(keys, "sync.every=1,4", &seldom);
    assert!(every[1] > 2.0 * every[0], "a version for four steps: {every:?}");
}

#[test]
fn machines_that_make_no_sense_are_named() {
    let refused = |keys: &str, vary: &str, sets: &[&str], part: &str| {
        let ended = on_cluster(keys, vary, sets);
        assert!(ended.code == Some(2) && ended.err.contains(part), "{}", ended.err);
    };
    refused("engine = 1", "cluster.ranks=1", &[], "did you mean `engines`");
    refused("", "cluster.ranks=0,1", &[], "`cluster.ranks` is 0");
    refused("", "cluster.ranks=2", &[], "set cluster.parameters");
    refused("", "cluster.engines=1", &["cluster.link=0"], "`cluster.link` is 0");
    let workers = on_cluster("engines = 2", "generate.workers=2", &[]);
    assert!(workers.code == Some(1) && workers.err.contains("generate.workers has to be 1"), "{}", workers.err);
}

#[test]
fn a_profile_that_makes_no_sense_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let profile = folder.path().join("profile.json");
    fs::write(&profile, "{\"decode\": 7}").unwrap();
    let ended = simulate(&profile, &[]);
    assert_eq!(ended.code, Some(1));
    assert!(ended.err.contains("profile.json") && ended.err.contains("line 1"), "{}", ended.err);
    let mut empty = drawn(0.0);
    empty["answers"] = json!({ "recorded": [[]] });
    fs::write(&profile, empty.to_string()).unwrap();
    let ended = simulate(&profile, &[]);
    assert!(ended.err.contains("answers.recorded needs at least one group"), "{}", ended.err);
    let mut unknown = drawn(0.0);
    unknown["stages"]["trian"] = json!({ "item": 1.0 });
    fs::write(&profile, unknown.to_string()).unwrap();
    let ended = simulate(&profile, &[]);
    assert!(ended.err.contains("\"trian\"") && ended.err.contains("generate, reward"), "{}", ended.err);
    let ended = rollflow(&["simulate", SFT, "--profile", profile.to_str().unwrap()]);
    assert_eq!(ended.code, Some(2), "{}", ended.err);
    assert!(ended.err.contains("only pipelines that reinforce"), "{}", ended.err);
}

#[test]
fn every_variant_that_can_not_be_is_told_before_the_first_forecast() {
    let folder = tempfile::tempdir().unwrap();
    let profile = folder.path().join("profile.json");
    fs::write(&profile, drawn(0.0).to_string()).unwrap();
    let ended = simulate(&profile, &["--steps", "10", "--vary", "flow.max_staleness=0,soon,whenever"]);
    assert_eq!((ended.code, ended.out.as_str()), (Some(2), ""), "{}", ended.err);
    assert!(ended.err.contains("soon") && ended.err.contains("whenever"), "{}", ended.err);
}
