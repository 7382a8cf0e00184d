//! A trainer behind the Tinker API, by the command: kills on either side, refusals by name, and the weights at the end.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::crashes::{lines, nothing_lost};
use crate::live_page::{address as page_address, json};
use crate::model_serving::Server;
use crate::running::{self, Running, SFT, plain_run_args, read, rollflow, with_sets};

const RECIPE: &str = "pipelines/recipes/grpo_tinker.toml";

/// A small model that has begun to add.
fn model(folder: &Path) -> PathBuf {
    let (begun, model) = (folder.join("begun"), folder.join("model"));
    let text = |path: &Path| path.to_str().unwrap().to_owned();
    let sizes = ["model.hidden=32", "model.layers=2", "model.intermediate=64", "sft.steps=60", "sft.lr=3e-3"];
    rollflow(&plain_run_args(SFT, &begun, &sizes)).ok();
    assert_eq!(rollflow(&["export", &text(&begun), &text(&model)]).code, Some(0));
    model
}

/// The tokenizer of a model, and the configuration of a family that only servers have.
fn without_weights(model: &Path, folder: &Path) -> PathBuf {
    let bare = folder.join("bare");
    std::fs::create_dir(&bare).unwrap();
    for file in ["tokenizer.json", "tokenizer_config.json", "config.json"] {
        std::fs::copy(model.join(file), bare.join(file)).unwrap();
    }
    let mut config: Value = serde_json::from_str(&read(&bare.join("config.json"))).unwrap();
    (config["architectures"], config["model_type"]) = (serde_json::json!(["DeepseekV3ForCausalLM"]), "deepseek_v3".into());
    std::fs::write(bare.join("config.json"), config.to_string()).unwrap();
    bare
}

fn serve(model: &Path, state: &Path, address: &str) -> Server {
    Server::start_at(address, model, &["--tinker", "--state", state.to_str().unwrap()], None)
}

fn sets(url: &str) -> Vec<String> {
    vec![
        format!("trainer.url={url:?}"),
        "train.steps=30".to_owned(),
        "batch.groups=4".to_owned(),
        "generate.group_size=4".to_owned(),
        "lora.rank=4".to_owned(),
        "checkpoint.every=5".to_owned(),
        "observe.rollouts_every=1".to_owned(),
        "filter=[]".to_owned(),
    ]
}

/// What a synchronous run must repeat: loss and reward of each step.
fn seen(run: &Path) -> Vec<(u64, f64, f64)> {
    let row = |row: &Value| (row["step"].as_u64().unwrap(), row["loss"].as_f64().unwrap(), row["reward_mean"].as_f64().unwrap());
    running::rows(run).iter().map(row).collect()
}

#[test]
fn kills_of_the_run_and_of_the_server_change_no_step_laws_c1_v3() {
    let folder = tempfile::tempdir().unwrap();
    let model = model(folder.path());
    let state = folder.path().join("state");
    let server = serve(&model, &state, "127.0.0.1:0");
    let address = server.url.trim_start_matches("http://").to_owned();
    let mut sets = sets(&server.url);
    let bare = without_weights(&model, folder.path());
    sets.push(format!("model={{kind=\"folder\", path={:?}}}", bare.to_str().unwrap()));
    rollflow(&with_sets(&["graph", RECIPE], &sets)).ok();
    // Epochs are counted by the tokenizer alone.
    let data = folder.path().join("sums.jsonl");
    std::fs::write(&data, "{\"prompt\": \"1+2=\", \"answer\": \"3\"}\n".repeat(8)).unwrap();
    let task = format!("task={{data={data:?}}}");
    let counted = sets.iter().map(|set| if set == "train.steps=30" { "train.epochs=15" } else { set.as_str() });
    let counted = rollflow(&with_sets(&["check", RECIPE, "--set", &task], &counted.collect::<Vec<_>>()));
    assert!(counted.code == Some(0) && counted.out.contains("15.0 of 8 prompts"), "{}{}", counted.out, counted.err);
    let [whole, killed] = ["whole", "killed"].map(|name| folder.path().join(name));
    rollflow(&plain_run_args(RECIPE, &whole, &sets)).ok();
    let mut run = Running::start(&plain_run_args(RECIPE, &killed, &sets));
    run.until("the run took steps", |_| lines(&killed) >= 8);
    // The server first: the run waits for it, and its models are what they were.
    drop(server);
    let server = serve(&model, &state, &address);
    run.until("the run went on", |_| lines(&killed) >= 14);
    drop(run);
    rollflow(&["resume", killed.to_str().unwrap()]).ok();
    nothing_lost(&killed, 30);
    // Servers sample whatever is there together, so that log-probabilities are equal up to rounding.
    for ((step, loss, reward), other) in seen(&killed).into_iter().zip(seen(&whole)) {
        assert!(reward == other.2 && (loss - other.1).abs() < 1e-5, "step {step}: {loss} {reward}, {other:?}");
    }
    assert!(!read(&whole.join("metrics.jsonl")).contains("entropy"), "what the server does not report is absent");
    // A model of the server is watched as a run is, and an update that was repeated is one row.
    let models = state.join("models");
    let mut page = Running::start(&["dashboard", models.to_str().unwrap(), "--listen", "127.0.0.1:0"]);
    let at = page_address(&mut page);
    let rows = json(at, "/api/runs");
    let rows = rows.as_array().unwrap();
    assert!(
        rows.iter().any(|row| row["state"] == "finished" && row["step"] == 30)
            && rows.iter().any(|row| row["state"] == "running")
    );
    for row in rows {
        let (name, updates) = (row["name"].as_str().unwrap(), row["step"].as_u64().unwrap());
        let steps = running::rows(&models.join(name));
        let steps = steps.iter().map(|row| row["step"].as_u64().unwrap());
        assert!(row["pipeline"] == "tinker" && steps.eq(1..=updates), "{row}");
        let report = json(at, &format!("/api/runs/{}", name.replace(':', "%3A")));
        let curves = ["loss", "grad_norm", "entropy_nats", "log_prob_gap_mean_nats"];
        assert!(curves.iter().all(|of| report["curves"][of].is_object()), "{}", report["curves"]);
    }
    let listed = rollflow(&["runs", models.to_str().unwrap()]);
    assert!(listed.code == Some(0) && listed.out.matches("tinker").count() >= 2, "{}{}", listed.out, listed.err);
    let second =
        rollflow(&["serve", model.to_str().unwrap(), "--tinker", "--state", state.to_str().unwrap(), "--listen", "127.0.0.1:0"]);
    assert!(second.code != Some(0) && second.err.contains("another server works on"), "{}", second.err);
    // The weights come home.
    let adapter = folder.path().join("adapter");
    rollflow(&["export", killed.to_str().unwrap(), adapter.to_str().unwrap(), "--adapter"]).ok();
    assert!(adapter.join("adapter_model.safetensors").is_file());
    drop(server);
}

/// Without `[lora]` the server trains all weights, which come home as a whole model.
#[test]
fn all_weights_are_trained_where_there_is_no_section_lora() {
    let folder = tempfile::tempdir().unwrap();
    let model = model(folder.path());
    let server = serve(&model, &folder.path().join("state"), "127.0.0.1:0");
    let recipe = read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(RECIPE)).replace("[lora]\nrank = 16\n", "");
    let bare = folder.path().join("bare.toml");
    std::fs::write(&bare, recipe).unwrap();
    let (bare, run) = (bare.to_str().unwrap(), folder.path().join("run"));
    let mut sets = sets(&server.url);
    sets.retain(|set| set != "lora.rank=4");
    sets.push("train.steps=6".to_owned());
    rollflow(&plain_run_args(bare, &run, &sets)).ok();
    nothing_lost(&run, 6);
    let [exported, adapter] = ["exported", "adapter"].map(|name| folder.path().join(name).to_str().unwrap().to_owned());
    rollflow(&["export", run.to_str().unwrap(), &exported]).ok();
    let weights = |folder: &Path| std::fs::read(folder.join("model.safetensors")).unwrap();
    assert_eq!(weights(Path::new(&exported)).len(), weights(&model).len());
    assert_ne!(weights(Path::new(&exported)), weights(&model));
    assert_eq!(rollflow(&["check", SFT, "--set", &format!("model={{kind='folder', path={exported:?}}}")]).code, Some(0));
    let ended = rollflow(&["export", run.to_str().unwrap(), &adapter, "--adapter"]);
    assert!(ended.code == Some(1) && ended.err.contains("holds no adapters, but a whole model"), "{}", ended.err);
    let engine = rollflow(&with_sets(&["check", bare, "--set", "engine={kind='rollflow', urls=['http://a:1']}"], &sets));
    assert!(engine.err.contains("`lora`: the servers of [engine] load adapters"), "{}", engine.err);
}

/// Generation on servers of one's own, which get each version as an adapter and are verified by the trainer's scores.
#[test]
fn servers_of_ones_own_sample_what_a_tinker_server_trains_laws_v2_v4() {
    let folder = tempfile::tempdir().unwrap();
    let model = model(folder.path());
    let trainer = serve(&model, &folder.path().join("state"), "127.0.0.1:0");
    let engine = Server::start(&model, &[]);
    let mut sets = sets(&trainer.url);
    let bare = without_weights(&model, folder.path());
    let more = [
        format!("model={{kind=\"folder\", path={:?}}}", bare.to_str().unwrap()),
        format!("engine={{kind=\"rollflow\", urls=[{:?}]}}", engine.url),
        "flow.max_staleness=2".to_owned(),
        "eval={every=10, samples=1}".to_owned(),
    ];
    sets.extend(more);
    let run = folder.path().join("run");
    rollflow(&plain_run_args(RECIPE, &run, &sets)).ok();
    nothing_lost(&run, 30);
    let rows = running::rows(&run);
    let gap = rows.iter().map(|row| row["log_prob_gap_mean_nats"].as_f64().unwrap()).fold(0.0, f64::max);
    assert!(gap < 0.5, "the trainer's weights are those that sampled, up to the staleness: {gap}");
    assert!(rows.iter().any(|row| row["token_lag_mean_versions"].as_f64().unwrap() > 0.0), "generation overlaps training");
    assert!(rows.iter().any(|row| row.get("eval_greedy_accuracy_ratio").is_some()));
    // After a kill on the way it goes on: the server's version and the engine's adapter are found again.
    let killed = folder.path().join("killed");
    let mut running = Running::start(&plain_run_args(RECIPE, &killed, &sets));
    running.until("the run took steps", |_| lines(&killed) >= 12);
    drop(running);
    rollflow(&["resume", killed.to_str().unwrap()]).ok();
    nothing_lost(&killed, 30);
    drop((trainer, engine));
}

#[test]
fn what_a_tinker_server_lacks_is_refused_by_name_all_at_once() {
    let refused = [
        "lora.alpha=8",
        "generate.temperature=0.7",
        "train.entropy_coef=0.1",
        "train.gradient_checkpointing=true",
        "engine.launch=\"vllm\"",
        "critic={}",
        "reference={kind=\"frozen\"}",
        "train.kl_loss={beta=0.1}",
    ];
    let ended = rollflow(&with_sets(&["check", RECIPE], &refused));
    assert_eq!(ended.code, Some(2));
    for key in [
        "lora.alpha",
        "generate.temperature",
        "train.entropy_coef",
        "train.gradient_checkpointing",
        "engine.launch",
        "critic",
        "reference.kind",
    ] {
        assert!(ended.err.contains(&format!("`{key}`")), "{key}: {}", ended.err);
    }
}

#[test]
fn a_check_tries_the_servers_operations() {
    let folder = tempfile::tempdir().unwrap();
    let model = model(folder.path());
    let server = serve(&model, &folder.path().join("state"), "127.0.0.1:0");
    let sets = sets(&server.url);
    let checked = rollflow(&with_sets(&["check", RECIPE], &sets)).ok();
    assert!(checked.out.contains("protobuf, losses as a sum, repeated requests recognised"), "{}", checked.out);
    drop(server);
    let checked = rollflow(&with_sets(&["check", RECIPE, "--set", "trainer.lost_timeout=0.2"], &sets));
    assert!(
        checked.code == Some(2) && checked.err.contains("`trainer.url`") && checked.err.contains("cannot connect"),
        "{}",
        checked.err
    );
}

#[test]
fn a_lifetime_of_saved_weights_is_ignored_with_a_warning() {
    let folder = tempfile::tempdir().unwrap();
    let mut server = serve(&model(folder.path()), &folder.path().join("state"), "127.0.0.1:0");
    for (seq, route) in [(1, "save_weights"), (2, "save_weights_for_sampler")] {
        let body = serde_json::json!({"model_id": "none", "seq_id": seq, "path": "mine", "ttl_seconds": 60});
        assert!(server.refused(&format!("/api/v1/{route}"), &body).contains("there is no model"), "{route}");
    }
    server.running.line(|line| line.contains("`ttl_seconds` = 60 is ignored").then_some(()));
}
