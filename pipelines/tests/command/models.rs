//! `rollflow models`, models that are found by their id in the hub's cache, and contexts of models.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use crate::crashes::{killed, same_bytes};
use crate::fork_server::{BINARY, output};
use crate::model_serving::Server;
use crate::running;

/// A cache that holds the golden model `of` as `id`.
fn cache_with(id: &str, of: &str) -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    let home = root.path().join(format!("models--{}", id.replace('/', "--")));
    let folder = home.join("snapshots/0123456789abcdef");
    fs::create_dir_all(&folder).unwrap();
    fs::create_dir_all(home.join("refs")).unwrap();
    fs::write(home.join("refs/main"), "0123456789abcdef").unwrap();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/models").join(of);
    for file in fs::read_dir(golden).unwrap().map(|entry| entry.unwrap().path()).filter(|path| path.is_file()) {
        fs::copy(&file, folder.join(file.file_name().unwrap())).unwrap();
    }
    root
}

fn rollflow(cache: &Path, args: &[&str]) -> Output {
    output(Command::new(BINARY).env("HF_HUB_CACHE", cache).env("HF_HUB_OFFLINE", "1").args(args))
}

/// R309: presets with their rates, and what of them is on this machine.
#[test]
fn models_lists_presets_and_what_the_cache_holds() {
    let cache = cache_with("Qwen/Qwen2.5-0.5B-Instruct", "qwen2_tied");
    fs::create_dir_all(cache.path().join("models--someone--broken/snapshots/abc")).unwrap();
    let text = String::from_utf8(rollflow(cache.path(), &["models"]).stdout).unwrap();
    let line = |word: &str| text.lines().find(|line| line.contains(word)).unwrap_or_else(|| panic!("{word} in\n{text}"));
    assert!(line("qwen2.5-0.5b").ends_with("yes") && line("qwen2.5-0.5b").contains("0.49B"), "{text}");
    assert!(line("llama-3.2-1b").ends_with("no"), "{text}");
    assert!(line("someone/broken").contains("config.json is missing"), "{text}");

    let json = rollflow(cache.path(), &["models", "--json"]).stdout;
    let json: serde_json::Value = serde_json::from_slice(&json).unwrap();
    assert_eq!(json["presets"][0]["preset"], "qwen2.5-0.5b");
    assert!(json["presets"][0]["folder"].as_str().unwrap().ends_with("snapshots/0123456789abcdef"));
    assert_eq!(json["presets"][0]["lr"]["rl"], 1e-6);
    assert_eq!(json["others"][0]["id"], "someone/broken");
}

/// R309, R097: a recipe's model by preset or id; a miss says what was looked for and how to fetch it.
#[test]
fn a_recipe_finds_its_model_in_the_cache_and_never_downloads() {
    let cache = cache_with("Qwen/Qwen2.5-0.5B-Instruct", "qwen2_tied");
    let folder = tempfile::tempdir().unwrap();
    let recipe = folder.path().join("run.toml");
    let written = |model: &str| {
        let rest = "[task]\nkind = 'arithmetic'\n[generate]\nmax_new_tokens = 4";
        fs::write(&recipe, format!("pipeline = 'grpo'\n[model]\n{model}\n{rest}\n")).unwrap();
        let output = rollflow(cache.path(), &["check", recipe.to_str().unwrap()]);
        (output.status.code(), String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap())
    };
    for model in ["preset = 'qwen2.5-0.5b'", "kind = 'folder'\npath = 'Qwen/Qwen2.5-0.5B-Instruct'"] {
        let (code, text, error) = written(model);
        assert!(code == Some(0) && text.contains("Qwen/Qwen2.5-0.5B-Instruct"), "{text}{error}");
    }
    for (model, said) in [
        ("preset = 'qwen2.5-7b'", "hf download Qwen/Qwen2.5-7B-Instruct"),
        ("kind = 'folder'\npath = 'Qwen/Qwen9'", "hf download Qwen/Qwen9"),
        ("kind = 'folder'\npath = 'no/such/folder'", "relative to the folder"),
        ("preset = 'qwen2.5-0.5'", "did you mean \"qwen2.5-0.5b\"?"),
        ("kind = 'folder'", "`model.path` is missing"),
    ] {
        let (code, _, error) = written(model);
        assert!(code == Some(2) && error.contains(said), "{model}: {error}");
    }
}

/// R112, R099: what isn't there is refused before anything starts, with what there is.
#[test]
fn devices_and_shardings_that_are_not_there_are_refused_at_check() {
    let recipe = Path::new(env!("CARGO_MANIFEST_DIR")).join("recipes/grpo.toml");
    let cache = tempfile::tempdir().unwrap();
    let check = |set: &str| {
        let output = rollflow(cache.path(), &["check", recipe.to_str().unwrap(), "--set", set]);
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    for (set, said) in [
        ("model.device=cuda:99", "cuda:99 is not there"),
        ("model.device=mps", "GPUs of NVIDIA's only"),
        ("model.device=gpu", "\"cuda:1\""),
        ("model.dtype=fp8", "it is one of \"f32\", \"bf16\", \"f16\""),
        ("train.fsdp=full_shard", "`ranks.shard`"),
        ("train.sharding_strategy=full_shard", "`ranks.shard`"),
    ] {
        let (code, error) = check(set);
        assert!(code == Some(2) && error.contains(said), "{set}: {error}");
    }
    assert_eq!(check("model.dtype=bf16").0, Some(0));
}

/// Where there are experts, a run trains with their loss and tells it; a model without any is refused at check.
#[test]
fn a_recipe_trains_a_mixture_with_the_loss_of_its_experts_and_only_a_mixture() {
    let folder = tempfile::tempdir().unwrap();
    let (recipe, data, run) = (folder.path().join("sft.toml"), folder.path().join("sums.jsonl"), folder.path().join("run"));
    let sum = |of: usize| format!("{{\"prompt\": \"{of}+2=\", \"completion\": \"{}\"}}\n", of + 2);
    fs::write(&data, (0..8).map(sum).collect::<String>()).unwrap();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/models");
    let with = |model: &str, command: &[&str]| {
        let text = format!(
            "pipeline = 'sft'\n[model]\npath = '{}'\n[task]\ndata = '{}'\n[sft]\nsteps = 2\nbatch = 4\nrouter_aux_loss = 0.1\n",
            golden.join(model).display(),
            data.display()
        );
        fs::write(&recipe, text).unwrap();
        let output = rollflow(folder.path(), &[&[command[0], recipe.to_str().unwrap()], &command[1..]].concat());
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let (code, error) = with("qwen2_tied", &["check"]);
    assert!(code == Some(2) && error.contains("`sft.router_aux_loss`: the model is no mixture of experts"), "{error}");
    let (code, error) = with("olmoe", &["run", "--out", run.to_str().unwrap()]);
    assert_eq!(code, Some(0), "{error}");
    let rows = running::rows(&run);
    let losses: Vec<f64> = rows.iter().filter_map(|row| row["router_loss"].as_f64()).collect();
    // At its least, where all experts get as much, it is the weight times the experts of a token.
    assert!(losses.len() == 2 && losses.iter().all(|loss| *loss > 0.1), "{rows:?}");
}

/// Laws C1 and C2, of a mixture whose trainer follows the experts of its generator: under the same weights it would choose them itself,
/// under older ones it would not.
#[test]
fn a_trainer_that_follows_the_experts_of_its_generator_resumes_as_if_it_had_not_been_killed() {
    let folder = tempfile::tempdir().unwrap();
    let (recipe, golden) =
        (folder.path().join("mixture.toml"), Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/models"));
    let written = |model: &str, staleness: u64| {
        let text = format!(
            "pipeline = 'grpo'\n[model]\npath = '{}'\n[task]\nkind = 'arithmetic'\n[reward]\nkind = 'regex'\npattern = '[a-e]'\nrequire_end_of_text = false\n\
             [generate]\ngroup_size = 4\nmax_new_tokens = 8\nmax_num_seqs = 8\n[batch]\ngroups = 4\n[checkpoint]\nevery = 1\n\
             [flow]\nmax_staleness = {staleness}\n[train]\nsteps = 12\nlr = 1e-3\nrouter_replay = 'follow'\n",
            golden.join(model).display(),
        );
        fs::write(&recipe, text).unwrap();
    };
    let run = |name: &str| folder.path().join(name);
    let args = |out: &Path| ["run", recipe.to_str().unwrap(), "--out", out.to_str().unwrap()].map(str::to_owned);
    let ended = |out: &Path| {
        let args = args(out);
        running::rollflow(&args.each_ref().map(String::as_str)).ok();
        running::rows(out).iter().filter_map(|row| row["router_mismatch_ratio"].as_f64()).collect::<Vec<f64>>()
    };
    written("qwen3_moe", 0);
    let shares = ended(&run("whole"));
    assert!(shares.len() > 6 && shares.iter().all(|share| *share < 1e-3), "{shares:?}");
    let first = args(&run("killed"));
    assert!(killed(&run("killed"), &first.each_ref().map(String::as_str), (4, 7), || ()) >= 2);
    for file in ["metrics.jsonl", "checkpoints/step_000012/model.safetensors", "checkpoints/step_000012/progress.json"] {
        same_bytes(&run("whole").join(file), &run("killed").join(file));
    }
    written("qwen3_moe", 2);
    let shares = ended(&run("stale"));
    assert!(shares.iter().any(|share| *share > 1e-3), "{shares:?}");
    // Those that a server returns are the same.
    written("qwen3_moe", 0);
    let server = Server::start(&golden.join("qwen3_moe"), &[]);
    let append = |engine: &str| fs::write(&recipe, fs::read_to_string(&recipe).unwrap() + engine).unwrap();
    append(&format!("[engine]\nkind = 'rollflow'\nurls = ['{}']\n", server.url));
    let shares = ended(&run("served"));
    assert!(shares.len() > 6 && shares.iter().all(|share| *share < 1e-3), "{shares:?}");
    written("qwen3_moe", 0);
    append("[engine]\nkind = 'openai'\nurls = ['http://127.0.0.1:9']\n");
    let refused = running::rollflow(&["check", recipe.to_str().unwrap()]);
    let why = "needs the experts of each token, which are not read from \"openai\" servers";
    assert!(refused.code == Some(2) && refused.err.contains(why), "{}", refused.err);
    written("qwen2_tied", 0);
    let refused = running::rollflow(&["check", recipe.to_str().unwrap()]);
    assert!(refused.code == Some(2) && refused.err.contains("`train.router_replay`: the model is no mixture"), "{}", refused.err);
}

/// What a run takes is printed part by part; one that can't fit is refused with what would help, unless it is told to try.
#[test]
fn a_run_that_cannot_fit_is_refused_with_what_would_help() {
    let recipe = Path::new(env!("CARGO_MANIFEST_DIR")).join("recipes/grpo.toml");
    let cache = tempfile::tempdir().unwrap();
    let check = |sets: &[&str]| rollflow(cache.path(), &running::with_sets(&["check", recipe.to_str().unwrap()], sets));
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    let small = text(check(&[]).stdout);
    for part in ["memory on cpu", "weights", "gradients", "optimizer", "activations", "kv cache", "published"] {
        assert!(small.contains(part), "{part} in {small}");
    }
    let served = text(check(&["engine={kind=\"vllm\",urls=[\"http://127.0.0.1:1\"]}", "flow.max_staleness=1"]).stdout);
    assert!(served.contains("memory on cpu") && !served.contains("kv cache"), "servers have memory of their own: {served}");
    let large = ["batch.groups=1000000", "generate.max_new_tokens=2000", "train.micro_batch_tokens=1000000000"];
    let refused = check(&large);
    let error = text(refused.stderr);
    assert_eq!(refused.status.code(), Some(2), "{error}");
    for part in ["most of it is activations", "train.micro_batch_tokens = 250000000", "train.gradient_checkpointing = true"] {
        assert!(error.contains(part), "{part} in {error}");
    }
    assert_eq!(check(&[&large[..], &["model.check_memory=false"]].concat()).status.code(), Some(0));
}

/// Four positions in pre-training, and 256 with LongRoPE's factors for long contexts.
#[test]
fn a_model_with_longrope_reads_more_than_in_pre_training_if_the_recipe_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let (recipe, out) = (folder.path().join("long.toml"), folder.path().join("run"));
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/models/phi3_stretched");
    let text = format!(
        "pipeline = \"grpo\"\nmodel.path = {model:?}\ntask.kind = \"arithmetic\"\nfilter = []\nbatch.groups = 2\ntrain.steps = 2\n\
         generate = {{ group_size = 2, max_new_tokens = 24 }}\ncheckpoint.every = 1\n"
    );
    std::fs::write(&recipe, text).unwrap();
    let (recipe, out) = (recipe.to_str().unwrap(), out.to_str().unwrap());
    let refused = |sets: &[&str]| {
        let checked = running::rollflow(&[&["check", recipe], sets].concat());
        assert_eq!(checked.code, Some(2), "{}", checked.out);
        checked.err
    };
    let short = refused(&[]);
    assert!(short.contains("reads 4 tokens") && short.contains("set model.context, up to 256"), "{short}");
    let beyond = refused(&["--set", "model.context=257"]);
    assert!(beyond.contains("the model's is from 1 to 256") && beyond.contains("1 problem"), "{beyond}");

    running::rollflow(&["run", recipe, "--out", out, "--set", "model.context=64"]).ok();
    let metrics = std::fs::read_to_string(format!("{out}/metrics.jsonl")).unwrap();
    let last: serde_json::Value = serde_json::from_str(metrics.lines().last().unwrap()).unwrap();
    let gap = last["log_prob_gap_max_nats"].as_f64().unwrap();
    assert!(gap.abs() < 1e-4, "the trainer rotates as the generator does: {gap}");

    let asked =
        |model: &str, more: &[&str]| running::rollflow(&[&["generate", model, "1+2=", "--max-tokens", "9"], more].concat());
    let saved = format!("{out}/checkpoints/step_000002");
    assert!(asked(&saved, &[]).err.contains("give --context, up to 256"));
    assert_eq!(asked(&saved, &["--context", "64"]).code, Some(0));
    assert_eq!(asked(out, &[]).code, Some(0), "the run's recipe has its context");
}
