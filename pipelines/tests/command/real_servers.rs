//! Real servers on this machine, started, given weights, killed and ended as a run does it. Laws C1, D3, D4, V4; R261, R266 to R268.
//!
//! Most run where `ROLLFLOW_ENGINE` says `vllm` or `sglang` and scripts/engines.sh has installed it: `make test-engines`.

use std::collections::HashSet;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rollflow::engine::remote::sync::{Carry, SyncConfig, WeightSyncManager};
use rollflow::engine::remote::{EngineMemory, Fleet, FleetConfig, FleetHandle, InferenceEngine, PauseMode};
use rollflow::engine::settings::Launch;
use rollflow::engine::{EngineError, TokenEngine};
use rollflow::model::{Dtype, ModelConfig, Weights};
use rollflow::net::Client;
use rollflow::prelude::*;
use rollflow::recipe::Plan;
use rollflow::rollout::complete;
use rollflow_pipelines::assemble::engines;
use rollflow_pipelines::assemble::policy;
use rollflow_pipelines::assemble::servers::{ServerCommand, Servers, Startup};
use serde_json::Value;

/// Longest wait for an answer.
const LIMIT: Duration = Duration::from_secs(60);

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
        let policy = policy::policy(&plan).unwrap();
        let exporter = engines::exporter(&plan, &policy, dir.path()).unwrap();
        let startup = Startup { report: &|line| println!("{line}"), interrupted: &|| false };
        let servers = engines::launch(&plan, &exporter, dir.path(), startup).unwrap().unwrap();
        let engine = engines::engine(&plan.engine, &plan.net, &plan.engine.launched_urls()[0]).unwrap();
        Started { plan, policy, exporter, engine, _servers: servers, _dir: dir }
    }

    fn manager(&self, pause: PauseMode) -> WeightSyncManager {
        let config = SyncConfig { pause, ..self.plan.engine.sync.clone() };
        WeightSyncManager { fleet: FleetHandle::new(vec![self.engine.clone()]), config, max_lag: 0 }
    }

    fn weights(&self, seed: u64) -> rollflow::model::FrozenWeights {
        let config = ModelConfig { dtype: Dtype::F32, initializer_range: 0.1, ..self.policy.config().clone() };
        Weights::random(&config, seed).freeze()
    }

    /// The policy's weights under adapters that have learned something.
    fn adapted(&self, seed: u64) -> rollflow::model::FrozenWeights {
        let mut weights = self.policy.weights();
        tch::manual_seed(seed as i64);
        let flat = weights.trained_mut();
        *flat = &*flat + tch::Tensor::randn(flat.size(), (tch::Kind::Float, tch::Device::Cpu)) * 0.05;
        weights.freeze()
    }
}

/// Whether each phase ran once.
fn never_retried(times: &[(&'static str, Duration)]) -> bool {
    times.iter().map(|(phase, _)| phase).collect::<HashSet<_>>().len() == times.len()
}

#[test]
#[ignore = "needs a real server"]
fn every_pause_mode_takes_versions_that_are_verified() {
    let Some(kind) = kind() else { return };
    let started = Started::new(&kind, 22010, &[]);
    engines::tasks().unwrap().block_on(async {
        let own = if kind == "vllm" { PauseMode::Finish } else { PauseMode::Recompute };
        for (version, mode) in (1..).zip([own, PauseMode::Keep, PauseMode::Abort]) {
            let update = started.exporter.export(version, &started.weights(version)).unwrap();
            let report = started.manager(mode).sync(update).await.unwrap();
            let times = report.engines[0].as_ref().unwrap();
            println!("{mode:?}: {times:?}");
            assert!(never_retried(times), "{mode:?}");
            assert_eq!(started.engine.weights().unwrap().served().await.unwrap(), Some(version.to_string()));
        }
    });
}

/// SGLang is in a group with the trainer, over Gloo. Its second version uses the group of the first, and a group that
/// one side has lost is made again.
#[test]
#[ignore = "needs a real server"]
fn tensors_are_broadcast_into_a_server_and_verified() {
    let Some(kind) = kind().filter(|kind| kind == "sglang") else { return };
    let started = Started::new(&kind, 22018, &["engine.carry=\"broadcast\""]);
    engines::tasks().unwrap().block_on(async {
        let manager = started.manager(PauseMode::Keep);
        for version in 1..=4 {
            let update = started.exporter.export(version, &started.weights(version)).unwrap();
            assert!(update.tensors.is_some() && update.changed == (version > 1), "version {version}");
            if version == 3 {
                update.tensors.as_ref().unwrap().close(&started.plan.engine.launched_urls()[0]);
            }
            let report = manager.sync(update).await.unwrap();
            let times = report.engines[0].as_ref().unwrap();
            println!("version {version}: {times:?}");
            assert!(never_retried(times), "version {version}");
            assert_eq!(started.engine.weights().unwrap().served().await.unwrap(), Some(version.to_string()));
        }
    });
}

/// The trainer is on the stand-in GPU, for whose memory and groups `engines/stand_in_gpu` replaces functions of CUDA in the server; the rest of its weight
/// transfer is vLLM's own. Runs under the stand-in: `scripts/test_engines.sh vllm`.
#[test]
#[ignore = "needs a real server"]
fn vllm_takes_tensors_out_of_a_gpus_memory_and_is_verified() {
    let library = std::env::var("LD_PRELOAD").unwrap_or_default();
    let Some(kind) = kind().filter(|kind| kind == "vllm" && library.contains("stand_in_gpu")) else { return };
    let path = format!("PYTHONPATH={}/../scripts/engines/stand_in_gpu", env!("CARGO_MANIFEST_DIR"));
    let env = format!("engine.env=[\"VLLM_CPU_KVCACHE_SPACE=1\",\"LD_PRELOAD=\",{path:?}]");
    for (port, carry) in [(22019, Carry::Ipc), (22020, Carry::Broadcast)] {
        let by = format!("engine.carry={:?}", carry.word());
        let started = Started::new(&kind, port, &["model.device=cuda", "model.dtype=f32", "engine.gpu_memory=0.5", &env, &by]);
        engines::tasks().unwrap().block_on(async {
            assert_eq!(started.engine.probe().await.unwrap().transfers, [carry]);
            let manager = started.manager(PauseMode::Keep);
            for version in 1..=4 {
                let update = started.exporter.export(version, &started.weights(version)).unwrap();
                let url = &started.plan.engine.launched_urls()[0];
                match version {
                    3 => update.tensors.as_ref().unwrap().close(url),
                    // As an update that broke off leaves it.
                    4 => {
                        let client = Client::new("vLLM", url.as_str()).unwrap();
                        client.post("/start_weight_update", &Value::Null, LIMIT).await.unwrap();
                    }
                    _ => {}
                }
                let report = manager.sync(update).await.unwrap();
                let times = report.engines[0].as_ref().unwrap();
                println!("{carry:?}, version {version}: {times:?}");
                // After its error vLLM closes connections.
                assert!(version == 4 || never_retried(times), "version {version}");
                assert_eq!(started.engine.weights().unwrap().served().await.unwrap(), Some(version.to_string()));
            }
        });
    }
}

/// On a CPU the servers keep their memory, and do the rest.
#[test]
#[ignore = "needs a real server"]
fn a_server_sleeps_between_versions_and_wakes_with_the_next() {
    let Some(kind) = kind() else { return };
    let started = Started::new(&kind, 22017, &[]);
    let mut manager = started.manager(PauseMode::Keep);
    manager.config.sleep = true;
    engines::tasks().unwrap().block_on(async {
        for version in 1..=3 {
            let update = started.exporter.export(version, &started.weights(version)).unwrap();
            let report = manager.sync(update).await.unwrap();
            let times = report.engines[0].as_ref().unwrap();
            println!("version {version}: {times:?}");
            assert_eq!(times.iter().filter(|(phase, _)| *phase == "wake").count(), 2);
            assert_eq!(started.engine.weights().unwrap().served().await.unwrap(), Some(version.to_string()));
            manager.sleep().await;
            assert!(manager.catch_up().await.is_none(), "what sleeps is left alone");
        }
        assert!(!started.engine.probe().await.unwrap().sleeps, "it says so: a run with engine.sleep is refused");
        // The next run after one that was killed, which the server's label tells that it sleeps.
        let next = engines::engine(&started.plan.engine, &started.plan.net, &started.plan.engine.launched_urls()[0]).unwrap();
        let control = next.weights().unwrap();
        if kind == "sglang" {
            let client = Client::new("SGLang", started.plan.engine.launched_urls()[0].as_str()).unwrap();
            assert_eq!(client.get("/model_info", LIMIT).await.unwrap()["weight_version"], "3 (asleep)");
        }
        assert_eq!(control.served().await.unwrap().as_deref(), Some("3"), "it has not restarted");
        for _ in 0..2 {
            control.wake(EngineMemory::Weights).await.unwrap();
            control.wake(EngineMemory::Cache).await.unwrap();
            assert_eq!(control.served().await.unwrap().as_deref(), Some("3"));
        }
        manager.sleep().await;
        // As at the end of a run, for others to use; twice is once.
        manager.wake().await;
        manager.wake().await;
        assert_eq!(started.engine.score(&[5, 6, 7], None).await.unwrap().len(), 2);
    });
}

/// The tiny model's head is its embedding. vLLM keeps the old head when it reloads, and says that all went well.
#[test]
#[ignore = "needs a real server"]
fn a_shared_head_is_exact_or_caught_by_name() {
    let Some(kind) = kind() else { return };
    let started = Started::new(&kind, 22011, &["engine.untie=false"]);
    assert!(started.policy.config().tied);
    engines::tasks().unwrap().block_on(async {
        let update = started.exporter.export(1, &started.weights(1)).unwrap();
        match started.manager(PauseMode::Keep).sync(update).await {
            Ok(report) => assert_eq!((kind.as_str(), report.held()), ("sglang", 1)),
            Err(EngineError::NoneHolds { failures, .. }) => {
                println!("{}", failures[0]);
                assert_eq!(kind, "vllm");
                assert!(failures[0].to_string().contains("under the output head that it was started with"), "{}", failures[0]);
            }
            Err(error) => panic!("{error}"),
        }
    });
}

/// Beside each other, each found right by the probe that whole weights are held to; the server answers by name as this process does. SGLang 0.5.23
/// can't start so without a GPU: it pins memory for its adapters.
#[test]
#[ignore = "needs a real server"]
fn adapters_are_given_as_adapters_and_answer_by_name() {
    let Some(kind) = kind().filter(|kind| kind == "vllm") else { return };
    let started = Started::new(&kind, 22014, &["lora.rank=8", "lora.sync=adapter"]);
    let (runtime, manager) = (engines::tasks().unwrap(), started.manager(PauseMode::Keep));
    let control = started.engine.weights().unwrap();
    for version in 1..=4 {
        let update = started.exporter.export(version, &started.adapted(version)).unwrap();
        let report = runtime.block_on(manager.sync(update)).unwrap();
        let times = report.engines[0].as_ref().unwrap();
        println!("adapter {version}: {times:?}");
        assert!(never_retried(times) && manager.fleet.served(0).unwrap().version == version);
    }
    let until = Instant::now() + Duration::from_secs(60);
    while runtime.block_on(control.adapters()).unwrap() != ["adapter-4"] {
        assert!(Instant::now() < until, "{:?}: those that nobody names are forgotten", runtime.block_on(control.adapters()));
        std::thread::sleep(Duration::from_millis(50));
    }
    let params = SamplingParams { temperature: 0.0, max_new_tokens: 16, ignore_eos: true, ..SamplingParams::default() };
    let prompts = || (0..8).map(|ordinal| Prompt { ordinal, ..Prompt::from(format!("{ordinal}+{}=", 9 - ordinal)) }).collect();
    let config = FleetConfig { vocabulary: 64, ..FleetConfig::default() };
    let mut there = Fleet::new(&manager.fleet, config, started.policy.tokenizer(), 16, 7);
    let mut here = started.policy.with_weights(Arc::new(started.adapted(4))).engine(16, 7);
    there.set_weights(0, &());
    let tokenizer = started.policy.tokenizer();
    let there = complete(&mut there, tokenizer, prompts(), 1, &params).unwrap();
    let here = complete(&mut here, tokenizer, prompts(), 1, &params).unwrap();
    for (there, here) in there.iter().zip(&here) {
        let (there, here) = (&there.samples[0], &here.samples[0]);
        assert_eq!((&there.tokens, there.versions.oldest(), there.generated()), (&here.tokens, Some(4), 16));
        assert!(there.log_probs.iter().zip(&here.log_probs).all(|(there, here)| (there - here).abs() < 1e-4));
    }
}

/// A run that waits for its server, which never comes up and needs nothing installed.
struct Waiting {
    run: std::process::Child,
    /// Holds the number of the server's process group.
    told: std::path::PathBuf,
    group: String,
    _dir: tempfile::TempDir,
}

impl Waiting {
    fn new() -> Self {
        use std::os::unix::fs::PermissionsExt;
        let (dir, port) =
            (tempfile::tempdir().unwrap(), std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port());
        let (program, out) = (dir.path().join("serve"), dir.path().join("run"));
        std::fs::write(&program, "#!/bin/sh\nsleep 600 &\nexec sleep 600\n").unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        let mut run = Command::new(env!("CARGO_BIN_EXE_rollflow"))
            .args([
                "run",
                &recipe("vllm"),
                "--out",
                out.to_str().unwrap(),
                "--set",
                "sft.steps=1",
                "--set",
                "observe.progress=false",
            ])
            .args(["--set", &format!("engine.program={}", program.display()), "--set", &format!("engine.port={port}")])
            .spawn()
            .unwrap();
        let (told, until) = (out.join(format!("engine/logs/vllm-{port}.pid")), Instant::now() + Duration::from_secs(120));
        let group = loop {
            assert!(Instant::now() < until && run.try_wait().unwrap().is_none(), "it must come to start its server");
            match std::fs::read_to_string(&told) {
                Ok(group) if group.ends_with('\n') => break group.trim().to_owned(),
                _ => std::thread::sleep(Duration::from_millis(20)),
            }
        };
        Waiting { run, told, group, _dir: dir }
    }

    fn hears(&self, signal: &str) {
        assert!(Command::new("kill").args([signal, &self.run.id().to_string()]).status().unwrap().success());
    }

    /// Nothing is left of its server but what nobody has buried, soon.
    fn loses_its_server(&self) {
        let alive = |stat: String| {
            let (_, fields) = stat.rsplit_once(") ")?;
            let mut fields = fields.split(' ');
            Some(fields.next()? != "Z" && fields.nth(1)? == self.group)
        };
        let until = Instant::now() + Duration::from_secs(60);
        loop {
            let processes = std::fs::read_dir("/proc").unwrap().filter_map(|entry| Some(entry.ok()?.path().join("stat")));
            if !processes.filter_map(|stat| alive(std::fs::read_to_string(stat).ok()?)).any(|alive| alive) {
                return;
            }
            assert!(Instant::now() < until, "the server must end");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// What is pressed while a server starts is heard then: the run ends, and the server with it.
#[test]
fn an_interrupt_while_a_server_starts_ends_both() {
    let mut waiting = Waiting::new();
    waiting.hears("-INT");
    assert!(waiting.run.wait().unwrap().success(), "an interrupted run is no failed one");
    assert!(!waiting.told.exists());
    waiting.loses_its_server();
}

/// A run that is killed can end nothing any more, and leaves no server behind all the same.
#[test]
fn the_server_of_a_run_that_is_killed_ends_too() {
    let mut waiting = Waiting::new();
    waiting.hears("-KILL");
    waiting.run.wait().unwrap();
    waiting.loses_its_server();
}

/// Tools find a server by the number in its file.
#[test]
fn a_server_that_restarted_has_its_number_in_its_file() {
    let folder = tempfile::tempdir().unwrap();
    let port = 22014;
    let words = ["sleep", "600"].map(str::to_owned).to_vec();
    let command = ServerCommand { kind: Launch::Vllm, words, env: Vec::new(), port };
    let limit = Duration::from_secs(60);
    let servers = Servers::start(&[command], folder.path(), limit, 1, |_| true, || false).unwrap().unwrap();
    let number = || std::fs::read_to_string(folder.path().join(format!("vllm-{port}.pid"))).unwrap_or_default();
    let until = Instant::now() + limit;
    let wait = || {
        assert!(Instant::now() < until, "it must restart once and then end");
        std::thread::sleep(Duration::from_millis(20));
    };
    let ends = |number: &str| assert!(Command::new("kill").args(["-KILL", number.trim()]).status().unwrap().success());
    let first = number();
    ends(&first);
    while [first.as_str(), ""].contains(&number().as_str()) {
        wait();
    }
    let second = number();
    ends(&second);
    while servers.ended().is_none() {
        wait();
    }
    assert_eq!(number(), second);
}

/// R267: nothing is left of a server when its owner goes, and one that can't start is told at once with the end of its log.
#[test]
#[ignore = "needs a real server"]
fn a_server_that_cannot_start_is_told_with_its_log() {
    let Some(kind) = kind() else { return };
    let (dir, plan) = (tempfile::tempdir().unwrap(), plan(&kind, 22012, &["engine.flags=[\"--no-such-flag\"]"]));
    let policy = policy::policy(&plan).unwrap();
    let exporter = engines::exporter(&plan, &policy, dir.path()).unwrap();
    let startup = Startup { report: &|_| {}, interrupted: &|| false };
    let told = format!("{:#}", engines::launch(&plan, &exporter, dir.path(), startup).err().unwrap());
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
    let record = std::fs::read_to_string(out.join("run.json")).unwrap();
    let record: serde_json::Value = serde_json::from_str(&record).unwrap();
    let summary = record["drawn"]["summary"].as_array().unwrap();
    for ledger in ["token ledger", "prompt ledger"] {
        let line = summary.iter().find(|row| row[0] == ledger).unwrap()[1].as_str().unwrap();
        println!("{line}");
        let (sum, parts) = line.split_once('=').unwrap();
        let numbers = |text: &str| -> f64 { text.split_whitespace().filter_map(|word| word.parse::<f64>().ok()).sum() };
        assert_eq!(numbers(sum), numbers(parts), "{line}");
    }
    assert!(!out.join(format!("engine/logs/{kind}-22013.pid")).exists(), "its server is gone");
}
