//! `--metrics`: Prometheus reads a run while it lives.

use std::net::{SocketAddr, TcpListener};

use rollflow::flow::State;
use rollflow::observe::Metric;

use crate::running::{GRPO, Running, json_lines, read, rollflow, rows, run_args};
use crate::support::{exposition::Exposition, http::get};

const STAGES: [&str; 8] = ["prompts", "generate", "reward", "filter", "batch", "train", "sync", "log"];

/// The value of one series.
fn value(scrape: &Exposition, metric: Metric, labels: &[(&str, &str)]) -> Option<f64> {
    scrape.family(metric.name())?.value(metric.name(), labels)
}

#[test]
fn a_live_run_is_scraped() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let sets = ["train.steps=1000000", "train.target_reward=9", "flow.max_staleness=1"];
    let args = [run_args(GRPO, &run, &sets), vec!["--metrics", "127.0.0.1:0"]].concat();
    let mut running = Running::start(&args);
    let address: SocketAddr =
        running.line(|line| Some(line.strip_prefix("metrics: http://")?.strip_suffix("/metrics")?.parse().unwrap()));
    assert_ne!(address.port(), 0, "the address that it got, not the one that was asked for");

    let mut scrape = Exposition::default();
    let complete = |scrape: &Exposition| {
        value(scrape, Metric::Steps, &[]).is_some_and(|steps| steps >= 3.0)
            && STAGES.iter().all(|stage| value(scrape, Metric::StageTime, &[("stage", stage), ("state", "busy")]).is_some())
    };
    running.until("three steps were scraped", |_| {
        let answer = get(address, "/metrics");
        if let Some(path) = std::env::var_os("ROLLFLOW_SCRAPE") {
            std::fs::write(path, &answer.body).unwrap();
        }
        scrape = Exposition::parse(&answer.body).unwrap();
        complete(&scrape)
    });
    running.interrupt();

    for stage in STAGES {
        let seconds =
            State::ALL.map(|state| value(&scrape, Metric::StageTime, &[("stage", stage), ("state", state.name())]).unwrap());
        assert!(seconds.iter().sum::<f64>() > 0.0, "law F4: {stage} is somewhere: {seconds:?}");
    }
    for ends in STAGES.windows(2) {
        let edge = [("from", ends[0]), ("to", ends[1])];
        let depth = value(&scrape, Metric::EdgeItems, &edge).unwrap();
        assert!(depth <= value(&scrape, Metric::EdgeCapacityItems, &edge).unwrap(), "law F1: {edge:?}");
        assert!(
            value(&scrape, Metric::EdgeTokens, &edge).is_some() && value(&scrape, Metric::EdgeCapacityTokens, &edge).is_some()
        );
    }
    assert!(value(&scrape, Metric::Tokens, &[("fate", "trained")]).unwrap() > 0.0);
    assert_eq!(value(&scrape, Metric::PlannedSteps, &[]), Some(1e6));
    assert_eq!(value(&scrape, Metric::RunInfo, &[("name", "grpo-addition"), ("pipeline", "grpo")]), Some(1.0));
    assert!(value(&scrape, Metric::ProcessMemory, &[]).unwrap() > 1e7 && value(&scrape, Metric::DiskFree, &[]).unwrap() > 0.0);
    assert!(value(&scrape, Metric::GeneratedTokens, &[]).unwrap() > 0.0);
    let reward = value(&scrape, Metric::RewardMean, &[]).unwrap();
    assert!((0.0..=1.0).contains(&reward));
    for metric in
        [Metric::Loss, Metric::GradNorm, Metric::Entropy, Metric::ClipFraction, Metric::LogProbGapMean, Metric::PublishLag]
    {
        assert!(value(&scrape, metric, &[]).is_some_and(f64::is_finite), "{}", metric.name());
    }
    assert!(value(&scrape, Metric::WeightVersion, &[("role", "trainer")]).is_some_and(|version| version >= 1.0));
    let stale = scrape.family(Metric::SampleStaleness.name()).unwrap();
    assert!(stale.buckets(Metric::SampleStaleness.name()).len() > 1, "a histogram with buckets");
    assert_eq!(running.end(), Some(0));
}

#[test]
fn planned_steps_and_the_bound_of_staleness_are_those_of_the_part_that_runs() {
    let folder = tempfile::tempdir().unwrap();
    for (name, sets, reinforces) in [
        ("supervised", ["sft.steps=1000000", "train.steps=7"], false),
        ("reinforced", ["sft.steps=2", "train.steps=1000000"], true),
    ] {
        let run = folder.path().join(name);
        let sets = [&sets[..], &["pipeline=\"sft_then_grpo\"", "train.target_reward=9"]].concat();
        let args = [run_args(GRPO, &run, &sets), vec!["--metrics", "127.0.0.1:0"]].concat();
        let mut running = Running::start(&args);
        let address: SocketAddr =
            running.line(|line| Some(line.strip_prefix("metrics: http://")?.strip_suffix("/metrics")?.parse().unwrap()));
        let part = if reinforces { run.clone() } else { run.join("sft") };
        running.until("it trained", |_| read(&part.join("metrics.jsonl")).lines().count() >= 3);
        let scrape = Exposition::parse(&get(address, "/metrics").body).unwrap();
        assert_eq!(value(&scrape, Metric::PlannedSteps, &[]), Some(1e6), "{name}");
        assert_eq!(value(&scrape, Metric::StalenessBound, &[]).is_some(), reinforces, "{name}");
        running.interrupt();
        assert_eq!(running.end(), Some(0));
    }
}

#[test]
fn a_busy_port_is_named_and_leaves_the_folder_free() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let holder = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = holder.local_addr().unwrap().to_string();
    let refused = rollflow(&[run_args(GRPO, &run, &[]), vec!["--metrics", &address]].concat());
    assert_eq!(refused.code, Some(1));
    assert!(refused.err.contains(&address) && refused.err.contains("--metrics"), "{}", refused.err);
    assert!(!run.exists(), "the same command works once the port is free");
    let misspelt = rollflow(&[run_args(GRPO, &run, &[]), vec!["--metrics", "localhost"]].concat());
    assert_eq!(misspelt.code, Some(2));
    assert!(misspelt.err.contains("localhost"), "{}", misspelt.err);
}

/// `metrics.jsonl` is the same in every repetition; times are in a file apart, with a row for each of its steps, also after a resume.
#[test]
fn each_step_has_a_row_of_times_and_totals() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    rollflow(&run_args(GRPO, &run, &["train.steps=6", "flow.max_staleness=0", "checkpoint.every=2"])).ok();
    rollflow(&["resume", run.to_str().unwrap(), "--set", "train.steps=9"]).ok();
    let (metrics, timings) = (rows(&run), json_lines(&run.join("timings.jsonl")));
    let steps = |rows: &[serde_json::Value]| rows.iter().map(|row| row["step"].as_u64().unwrap()).collect::<Vec<_>>();
    assert_eq!(steps(&timings), (1..=9).collect::<Vec<_>>());
    assert_eq!(steps(&metrics), steps(&timings));
    let number = |row: &serde_json::Value, key: &str| row[key].as_f64().unwrap_or_else(|| panic!("{key} in {row}"));
    for pair in timings.windows(2) {
        assert!(number(&pair[1], "time_seconds") > number(&pair[0], "time_seconds"));
        // A resumed process counts from its own start.
        if number(&pair[1], "step") != 7.0 {
            assert!(number(&pair[1], "elapsed_seconds") > number(&pair[0], "elapsed_seconds"));
            // Equal where a whole step was generated before the row of the step before was written.
            assert!(number(&pair[1], "generated_tokens") >= number(&pair[0], "generated_tokens"));
            assert!(number(&pair[1], "trained_tokens") > number(&pair[0], "trained_tokens"));
        }
    }
    assert!(number(&timings[0], "generated_tokens") > 0.0);
    assert!(timings.iter().all(|row| number(row, "trained_tokens_per_second") > 0.0 && number(row, "step_seconds") > 0.0));
    assert!(metrics.iter().all(|row| row.as_object().unwrap().keys().all(|key| !key.contains("second"))));
}

/// Files of a run's monitoring name its address, and other addresses are refused.
#[test]
fn monitoring_is_written_for_the_addresses_that_are_given() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("m");
    rollflow(&["monitor", "127.0.0.1:9464", "gpu1:9464", "--out", out.to_str().unwrap()]).ok();
    let read = |name: &str| std::fs::read_to_string(out.join(name)).unwrap();
    assert!(read("prometheus.yml").contains("targets: [\"127.0.0.1:9464\", \"gpu1:9464\"]"), "{}", read("prometheus.yml"));
    assert!(read("rules.yml").contains("alert: RollflowNoProgress") && read("kubernetes.yml").contains("kubernetes_sd_configs"));
    let dashboard: serde_json::Value = serde_json::from_str(&read("dashboard.json")).unwrap();
    assert_eq!(dashboard["uid"], "rollflow");
    let bad = rollflow(&["monitor", "a\"b:1", "--out", out.to_str().unwrap()]);
    assert!(bad.code == Some(2) && bad.err.contains("write it as HOST:PORT"), "{}", bad.err);
}
