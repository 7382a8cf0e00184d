//! Real servers on this machine, started, given weights, killed and ended as a run does it. Laws C1, D3, D4, V4; R261, R266 to R268.
//!
//! They run where `ROLLFLOW_ENGINE` says `vllm` or `sglang` and scripts/engines.sh has installed it: `make test-engines`.
#![allow(clippy::unwrap_used, reason = "what a test needs and lacks fails it")]

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rollflow::engine::remote::sync::{StepError, SyncConfig, SyncError, WeightSyncManager, WrongWeights};
use rollflow::engine::remote::{FleetHandle, InferenceEngine, PauseMode};
use rollflow::model::{Dtype, ModelConfig, Weights};
use rollflow::prelude::*;
use rollflow::recipe::Plan;
use rollflow_pipelines::servers::Servers;
use rollflow_pipelines::{engines, parts};

/// Which servers this is about, if any.
fn kind() -> Option<String> {
    std::env::var("ROLLFLOW_ENGINE").ok().filter(|kind| !kind.is_empty())
}

fn recipe(kind: &str) -> String {
    format!("{}/recipes/grpo_{kind}.toml", env!("CARGO_MANIFEST_DIR"))
}

fn plan(kind: &str, port: usize, sets: &[&str]) -> Plan {
    let sets: Vec<String> = sets.iter().map(|set| set.to_string()).chain([format!("engine.port={port}")]).collect();
    rollflow::recipe::load(Path::new(&recipe(kind)), &sets).unwrap()
}

/// A server that was started with the recipe's model, which others' weights can be given to.
struct Started {
    plan: Plan,
    policy: Policy,
    exporter: rollflow::stages::sync::Exporter,
    engine: Arc<dyn InferenceEngine>,
    _servers: Servers,
    _dir: tempfile::TempDir,
}

impl Started {
    fn new(kind: &str, port: usize, sets: &[&str]) -> Self {
        let (dir, plan) = (tempfile::tempdir().unwrap(), plan(kind, port, sets));
        let policy = parts::policy(&plan).unwrap();
        let exporter = engines::exporter(&plan, &policy, dir.path()).unwrap();
        let start = dir.path().join("start");
        exporter.launch_folder(&start).unwrap();
        let servers = engines::launch(&plan, &start, &dir.path().join("logs"), |line| println!("{line}")).unwrap();
        let engine = engines::engine(&plan.engine, &plan.engine.launched_urls()[0]).unwrap();
        Started { plan, policy, exporter, engine, _servers: servers, _dir: dir }
    }

    fn manager(&self, pause: PauseMode) -> WeightSyncManager {
        let config = SyncConfig { pause, ..engines::sync_config(&self.plan.engine) };
        WeightSyncManager::new(FleetHandle::new(vec![self.engine.clone()]), config)
    }

    fn weights(&self, seed: u64) -> rollflow::model::FrozenWeights {
        let config = ModelConfig { dtype: Dtype::F32, initializer_range: 0.1, ..self.policy.config().clone() };
        Weights::random(&config, seed).freeze()
    }
}

#[test]
#[ignore = "needs a real server"]
fn every_pause_mode_takes_versions_that_are_verified() {
    let Some(kind) = kind() else { return };
    let started = Started::new(&kind, 22010, &[]);
    engines::runtime().unwrap().block_on(async {
        let modes = started.engine.weights().unwrap().pause_modes();
        for (version, mode) in (1..).zip(modes) {
            let update = started.exporter.export(version, &started.weights(version)).unwrap();
            let report = started.manager(*mode).sync(update).await.unwrap();
            let held = report.engines[0].as_ref().unwrap();
            assert_eq!(held.retries, 0, "{mode:?}");
            println!("{mode:?}: {:?}", held.times);
            assert_eq!(started.engine.weights().unwrap().served().await.unwrap(), Some(version.to_string()));
        }
    });
}

/// The tiny model's head is its embedding. vLLM keeps the old head when it reloads, and says that all went well.
#[test]
#[ignore = "needs a real server"]
fn a_shared_head_is_exact_or_caught_by_name() {
    let Some(kind) = kind() else { return };
    let started = Started::new(&kind, 22011, &["engine.untie=false"]);
    assert!(started.policy.config().tied);
    engines::runtime().unwrap().block_on(async {
        let update = started.exporter.export(1, &started.weights(1)).unwrap();
        match started.manager(PauseMode::Keep).sync(update).await {
            Ok(report) => assert_eq!((kind.as_str(), report.held()), ("sglang", 1)),
            Err(SyncError::NoneHolds { failures, .. }) => {
                println!("{}", failures[0]);
                assert_eq!(kind, "vllm");
                let old_head = |error: &StepError| matches!(error, StepError::Wrong(wrong) if matches!(**wrong, WrongWeights::OldHead { .. }));
                assert!(old_head(&failures[0].error), "{}", failures[0]);
            }
            Err(error) => panic!("{error}"),
        }
    });
}

/// R267: nothing is left of a server when its owner goes, and one that can't start is told at once with the end of its log.
#[test]
#[ignore = "needs a real server"]
fn a_server_that_cannot_start_is_told_with_its_log() {
    let Some(kind) = kind() else { return };
    let (dir, plan) = (tempfile::tempdir().unwrap(), plan(&kind, 22012, &["engine.flags=[\"--no-such-flag\"]"]));
    let told = format!("{:#}", engines::launch(&plan, dir.path(), &dir.path().join("logs"), |_| {}).err().unwrap());
    assert!(told.contains("ended while it started") && told.contains("no-such-flag"), "{told}");
}

/// The whole loop through the recipe, whose server is killed on the way and comes back.
#[test]
#[ignore = "needs a real server"]
fn a_run_outlives_its_server() {
    let Some(kind) = kind() else { return };
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run");
    let mut run = Command::new(env!("CARGO_BIN_EXE_rollflow"))
        .args(["run", &recipe(&kind), "--out", out.to_str().unwrap()])
        .args(["--set", "train.steps=40", "--set", "observe.progress=false", "--set", "observe.log_every=1"])
        .args(["--set", "engine.port=22013", "--set", "train.target_reward=2.0"])
        .spawn()
        .unwrap();
    let until = Instant::now() + Duration::from_secs(400);
    let steps = || std::fs::read_to_string(out.join("metrics.jsonl")).unwrap_or_default().lines().count();
    while steps() < 10 {
        assert!(Instant::now() < until && run.try_wait().unwrap().is_none(), "it must come to its tenth step");
        std::thread::sleep(Duration::from_millis(50));
    }
    let pid = std::fs::read_to_string(out.join(format!("engine/logs/{kind}-22013.pid"))).unwrap();
    let killed = Command::new("kill").args(["-KILL", "--", &format!("-{}", pid.trim())]).status().unwrap();
    assert!(killed.success());
    while run.try_wait().unwrap().is_none() {
        assert!(Instant::now() < until, "it must go on once its server is back");
        std::thread::sleep(Duration::from_millis(100));
    }
    assert!(run.wait().unwrap().success());
    assert_eq!(steps(), 40);
    let report = std::fs::read_to_string(out.join("report.md")).unwrap();
    for ledger in ["token ledger", "prompt ledger"] {
        let line = report.lines().find(|line| line.contains(ledger)).unwrap();
        println!("{line}");
        let (sum, parts) = line.split_once('=').unwrap();
        let numbers = |text: &str| -> f64 { text.split_whitespace().filter_map(|word| word.parse::<f64>().ok()).sum() };
        assert_eq!(numbers(sum), numbers(parts), "{line}");
    }
    assert!(!out.join(format!("engine/logs/{kind}-22013.pid")).exists(), "its server is gone");
}
