//! `check`: everything that is wrong, together.

use std::io::Write;
use std::path::Path;
use std::process::Stdio;

use serde_json::Value;

use crate::fork_server::output;
use crate::running::{GRPO, SFT, TINY_MODEL, command, plain_run_args, rollflow, rollflow_with, with_sets};

#[test]
fn a_good_recipe_checks_and_shows_what_follows_from_it() {
    for (recipe, shown) in [(GRPO, "admission window"), (SFT, "one epoch")] {
        let checked = rollflow(&["check", recipe]);
        assert_eq!((checked.code, checked.err.as_str()), (Some(0), ""));
        assert!(checked.out.contains(shown), "{}", checked.out);
    }
    let overridden = rollflow(&["check", GRPO, "--set", "batch.groups=5", "--set", "generate.group_size=3"]);
    assert!(overridden.out.contains("15 (5 groups of 3)"), "{}", overridden.out);
}

#[test]
fn scripts_and_editors_get_what_check_finds_as_json() {
    let good: Value = serde_json::from_str(&rollflow(&["check", GRPO, "--json"]).out).unwrap();
    assert_eq!((&good["ok"], &good["facts"]["steps"]), (&Value::Bool(true), &Value::from("1000")));
    let folder = tempfile::tempdir().unwrap();
    let recipe = folder.path().join("bad.toml");
    std::fs::write(&recipe, "pipeline = \"grpo\"\n[model]\nkind = \"tiny\"\nhiden = 64\n[task]\nkind = \"arithmetic\"\n")
        .unwrap();
    let refused = rollflow(&["check", recipe.to_str().unwrap(), "--json"]);
    assert_eq!((refused.code, refused.err.as_str()), (Some(2), ""));
    let errors: Value = serde_json::from_str(&refused.out).unwrap();
    assert_eq!((&errors["errors"][0]["line"], &errors["errors"][0]["key"]), (&Value::from(4), &Value::from("model.hiden")));
}

#[test]
fn a_bad_recipe_exits_with_2_and_tells_all_that_is_wrong_where_it_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = folder.path().join("bad.toml");
    let text = "pipeline = \"grpo\"\n[model]\nkind = \"tiny\"\nhiden = 64\n[task]\nkind = \"arithmetic\"\n[train]\nsteps = 10\nlr = -1.0\n";
    std::fs::write(&recipe, text).unwrap();
    let recipe = recipe.to_str().unwrap();
    for command in [&["check", recipe][..], &["graph", recipe], &["run", recipe]] {
        let refused = rollflow(&[command, &["--set", "batch.grups=4"]].concat());
        assert_eq!((refused.code, refused.out.as_str()), (Some(2), ""));
        for part in [
            &format!("{recipe}:4:1"),
            "did you mean `hidden`",
            &format!("{recipe}:9:6"),
            "--set batch.grups",
            "did you mean `groups`",
        ] {
            assert!(refused.err.contains(part), "{part} is missing:\n{}", refused.err);
        }
    }
}

/// A recipe's text, behind that of the recipes which it includes.
fn text_of(file: &Path) -> String {
    let text = std::fs::read_to_string(file).unwrap();
    let included = text.lines().find_map(|line| line.strip_prefix("include = \"")?.strip_suffix('"'));
    included.map_or_else(String::new, |base| text_of(&file.with_file_name(base))) + &text
}

/// What makes any shipped recipe one of a few steps of a debug build; keys that a pipeline has no section for are left out.
fn small(text: &str) -> Vec<String> {
    let all = [
        ("[model]", "model={kind=\"tiny\",hidden=16,layers=1,heads=2,kv_heads=1,intermediate=32}"),
        ("[sft]", "sft.steps=2"),
        ("[sft]", "sft.batch=4"),
        ("[sft]", "sft.schedule={kind=\"constant\"}"),
        ("[reward_model]", "reward_model.steps=2"),
        ("[reward_model]", "reward_model.batch=4"),
        ("[reward_model]", "reward_model.schedule={kind=\"constant\"}"),
        ("[train]", "train.steps=3"),
        ("[train]", "train.schedule={kind=\"constant\"}"),
        ("[train]", "reward={kind=\"regex\",pattern=\"[0-9]\",require_end_of_text=false}"),
        ("[train]", "batch.groups=4"),
        ("[train]", "generate.group_size=4"),
        ("[train]", "generate.max_num_seqs=8"),
        ("[critic]", "critic.warmup_steps=1"),
        ("max_new_tokens = 256", "generate.max_new_tokens=4"),
        // A tiny model has no chat template.
        ("[chat]", "chat.template=plain"),
        ("[eval]", "eval.limit=2"),
        ("path = \"runs/gsm8k/", "task.path=pipelines/data/rollouts_addition.jsonl"),
    ];
    // What was recorded has its rewards.
    let recorded = text.contains("pipeline = \"grpo_offline\"");
    // Code is run as it is.
    let code = text.contains("kind = \"code\"");
    // Pairs are compared, and nothing is sampled.
    let pairs = text.contains("pipeline = \"dpo\"");
    let means = |set: &str| {
        let samples = set.starts_with("reward=") || set.starts_with("generate.");
        !((recorded || pairs) && samples) && !(code && set.starts_with("reward="))
    };
    let sets = all.iter().filter(|(found, set)| text.contains(found) && means(set)).map(|(_, set)| (*set).to_owned());
    // None of what a random model writes passes a test, and all groups would be dropped.
    sets.chain(code.then(|| "filter=[]".to_owned())).collect()
}

/// A cache of the hub with what the shipped recipes name by id: a golden model with a chat template, and word problems in GSM8K's form.
fn hub_cache(home: &Path) {
    let commit = "snapshots/0123456789abcdef0123456789abcdef01234567";
    let golden = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/models/qwen2_tied"));
    let model = home.join("hub/models--Qwen--Qwen2.5-0.5B-Instruct").join(commit);
    std::fs::create_dir_all(&model).unwrap();
    for file in ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(golden.join(file), model.join(file)).unwrap();
    }
    let change = |file: &str, key: &str, value: Value| {
        let mut json: Value = serde_json::from_slice(&std::fs::read(model.join(file)).unwrap()).unwrap();
        json[key] = value;
        std::fs::write(model.join(file), json.to_string()).unwrap();
    };
    change("config.json", "max_position_embeddings", 32_768.into());
    let turns = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}";
    change("tokenizer_config.json", "chat_template", turns.into());
    let data = home.join("hub/datasets--openai--gsm8k").join(commit).join("main");
    std::fs::create_dir_all(&data).unwrap();
    for split in ["train", "test"] {
        let problems = concat!(env!("CARGO_MANIFEST_DIR"), "/data/word_problems.jsonl");
        std::fs::copy(problems, data.join(format!("{split}-00000-of-00001.jsonl"))).unwrap();
    }
}

/// No recipe in this repository is one that does not run.
#[test]
fn every_shipped_recipe_checks_and_runs_a_few_steps() {
    let folder = tempfile::tempdir().unwrap();
    let home = folder.path().join("hf");
    hub_cache(&home);
    let rollflow = |args: &[&str]| rollflow_with(args, &[("HF_HOME", home.to_str().unwrap())]);
    let recipes = concat!(env!("CARGO_MANIFEST_DIR"), "/recipes");
    let mut ran = 0;
    for entry in std::fs::read_dir(recipes).unwrap() {
        let path = entry.unwrap().path();
        let name = path.to_str().unwrap();
        let text = text_of(&path);
        // Its server and its model are made in tinker.rs.
        if text.contains("backend = \"tinker\"") {
            continue;
        }
        let mut sets = small(&text);
        if text.contains("path = \"runs/teacher\"") {
            let out = folder.path().join("teacher");
            let tiny = [&["sft.schedule={}"], TINY_MODEL, &["sft.steps=2"]].concat();
            rollflow(&plain_run_args(SFT, &out, &tiny)).ok();
            sets.push(format!("teacher.path={:?}", out.to_str().unwrap()));
        }
        // A folder of a run that is nowhere near.
        let elsewhere = sets.iter().filter(|set| set.starts_with("task.path=") || set.starts_with("teacher.path="));
        let checked = rollflow(&with_sets(&["check", name], &elsewhere.collect::<Vec<_>>()));
        assert_eq!((checked.code, checked.err.as_str()), (Some(0), ""), "{name}");
        // Those that start a server run where there is one: `make test-engines`.
        if text.contains("[engine]") {
            continue;
        }
        let out = folder.path().join(path.file_stem().unwrap());
        let ended = rollflow(&plain_run_args(name, &out, &sets));
        assert_eq!(ended.code, Some(0), "{name}: {}", ended.err);
        let rows = std::fs::read_to_string(out.join("metrics.jsonl")).unwrap();
        assert!(rows.lines().count() >= 2, "{name} took steps");
        ran += 1;
    }
    assert!(ran >= 15, "{ran} recipes");
}

/// Each value from where it was written last, and each error from where it is.
#[test]
fn values_come_from_bases_the_recipe_the_environment_and_arguments_in_this_order() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    write(
        "base.toml",
        "pipeline = \"grpo\"\n[model]\nkind = \"tiny\"\nhidden = 64\n[task]\nkind = \"arithmetic\"\n[train]\nsteps = 11\nlr = 1e-3\n[batch]\ngroups = 3\n",
    );
    write("mine.toml", "include = \"base.toml\"\n[train]\nsteps = 12\n[generate]\ngroup_size = 2\n");
    let mine = folder.path().join("mine.toml");
    let mine = mine.to_str().unwrap();
    let checked = |sets: &[&str], variable: (&str, &str)| {
        let output = output(command(&[&["check", mine][..], sets].concat()).env(variable.0, variable.1));
        (output.status.code(), String::from_utf8(output.stdout).unwrap() + &String::from_utf8(output.stderr).unwrap())
    };
    let none = ("ROLLFLOW_NOTHING", "");
    let of = |text: &str, name: &str| text.lines().find(|line| line.trim().starts_with(name)).unwrap().to_owned();
    let (code, text) = checked(&[], none);
    assert_eq!(code, Some(0), "{text}");
    assert!(of(&text, "steps").ends_with("12") && of(&text, "samples a step").contains("6 (3 groups of 2)"), "{text}");
    let (_, text) = checked(&[], ("ROLLFLOW__TRAIN__STEPS", "13"));
    assert!(of(&text, "steps").ends_with("13"), "{text}");
    let (_, text) = checked(&["--set", "train.steps=14"], ("ROLLFLOW__TRAIN__STEPS", "13"));
    assert!(of(&text, "steps").ends_with("14"), "{text}");

    write("base.toml", "pipeline = \"grpo\"\n[model]\nkind = \"tiny\"\nhiden = 64\n[task]\nkind = \"arithmetic\"\n");
    let (code, text) = checked(&["--set", "batch.grups=1"], ("ROLLFLOW__TRAIN__LR", "fast"));
    assert_eq!(code, Some(2));
    let base = folder.path().join("base.toml").display().to_string();
    for part in [&format!("{base}:4:1"), "4 | hiden = 64", "  | ^", "$ROLLFLOW__TRAIN__LR", "--set batch.grups"] {
        assert!(text.contains(part), "{part} is missing:\n{text}");
    }
    write("base.toml", "include = [\"mine.toml\"]");
    assert!(checked(&[], none).1.contains("includes itself"));
    write("mine.toml", "include = \"none.toml\"");
    let (code, text) = checked(&[], none);
    assert!(code == Some(2) && text.contains("mine.toml:1:11") && text.contains("none.toml"), "{text}");
    // A section of another kind is not mixed with the base's.
    write("base.toml", "pipeline = \"grpo\"\n[model]\nkind = \"tiny\"\n[task]\nkind = \"arithmetic\"\ndigits = 2\n");
    write("mine.toml", "include = \"base.toml\"\n[task]\nkind = \"data\"\ndata = \"no.jsonl\"\n");
    let (_, text) = checked(&[], none);
    assert!(text.contains("file not found: no.jsonl") && !text.contains("digits"), "{text}");
}

/// What is included, taken from the environment and set becomes one recipe that says all of it (R319).
#[test]
fn the_saved_recipe_of_a_composed_one_repeats_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let (mine, first, again) = (folder.path().join("mine.toml"), folder.path().join("first"), folder.path().join("again"));
    let base = concat!(env!("CARGO_MANIFEST_DIR"), "/recipes/grpo.toml");
    std::fs::write(&mine, format!("include = {base:?}\n[train]\nlr = 3e-3\n")).unwrap();
    let args = crate::running::run_args(mine.to_str().unwrap(), &first, &["seed=4"]);
    assert_eq!(rollflow_with(&args, &[("ROLLFLOW__TRAIN__ENTROPY_COEF", "0.01")]).code, Some(0));
    let recipe = first.join("recipe.toml");
    let text = std::fs::read_to_string(&recipe).unwrap();
    assert!(!text.contains("include") && text.contains("entropy_coef = 0.01") && text.contains("lr = 0.003"), "{text}");
    assert_eq!(rollflow(&["run", recipe.to_str().unwrap(), "--out", again.to_str().unwrap()]).code, Some(0));
    for file in ["metrics.jsonl", "rollouts.jsonl", "recipe.toml", "checkpoints/step_000003/model.safetensors"] {
        assert_eq!(std::fs::read(first.join(file)).unwrap(), std::fs::read(again.join(file)).unwrap(), "{file}");
    }
}

#[test]
fn what_init_writes_is_accepted_with_a_comment_to_every_section() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("data.jsonl");
    std::fs::write(&data, "{\"question\":\"1+1\",\"solution\":\"2\"}\n").unwrap();
    let data = data.to_str().unwrap();
    let file = ["--task", data, "--prompt-key", "question", "--answer-key", "solution"];
    for (at, args) in
        [&[][..], &["--pipeline", "sft"], &file, &file[..2], &[&file[..], &["--pipeline", "sft", "--steps", "7"]].concat()]
            .iter()
            .enumerate()
    {
        let path = folder.path().join(format!("{at}.toml"));
        let path = path.to_str().unwrap();
        let written = rollflow(&[&["init", path, "--yes"][..], args].concat());
        assert_eq!(written.code, Some(0), "{}{}", written.out, written.err);
        let checked = rollflow(&["check", path]);
        assert_eq!((checked.code, checked.err.as_str()), (Some(0), ""));
        let again = rollflow(&["init", path, "--yes"]);
        assert!(again.code == Some(2) && again.err.contains("--force"), "{}", again.err);
    }
    // The file is checked as it is written, whatever the environment says of the next call.
    let path = folder.path().join("alone.toml");
    let written = output(command(&["init", path.to_str().unwrap(), "--yes"]).env("ROLLFLOW__TRAIN__LR", "fast"));
    assert_eq!(written.status.code(), Some(0), "{}", String::from_utf8_lossy(&written.stderr));
    let missing = rollflow(&["init", folder.path().join("m.toml").to_str().unwrap(), "--yes", "--model", "no/such/model"]);
    assert!(missing.code == Some(2) && missing.err.contains("no/such/model"), "{}", missing.err);
}

/// The recipe is in folders that do not exist yet.
#[test]
fn init_reports_data_that_check_refuses_and_writes_no_field_that_the_data_lacks() {
    let folder = tempfile::tempdir().unwrap();
    let (data, recipe) = (folder.path().join("data.jsonl"), folder.path().join("new/deep/mine.toml"));
    std::fs::write(&data, "{\"inst\":\"1+1=\",\"ref\":\"2\"}\n").unwrap();
    let init = ["init", recipe.to_str().unwrap(), "--force", "--yes", "--task", data.to_str().unwrap()];
    for (given, columns) in [(&[][..], None), (&["--prompt-key", "inst"][..], Some("columns = { prompt = \"inst\" }\n"))] {
        let written = rollflow(&[&init[..], given].concat());
        assert_eq!((written.code, written.out.as_str()), (Some(2), ""), "{}", written.err);
        for part in ["which is to be completed:", "all records were skipped: 1 ", "Fields of the first: inst, ref"] {
            assert!(written.err.contains(part), "{part}: {}", written.err);
        }
        let text = std::fs::read_to_string(&recipe).unwrap();
        assert!(columns.map_or(!text.contains("columns = {"), |columns| text.contains(columns)), "{text}");
    }
    let both = ["--prompt-key", "inst", "--answer-key", "ref"];
    rollflow(&[&init[..], &both].concat()).ok();
}

/// A data set as the hub's own tools leave it, with two subsets of which one must be named, and a test split.
#[test]
fn init_asks_for_subset_and_split_and_evaluates_on_the_test_split() {
    let folder = tempfile::tempdir().unwrap();
    let (recipe, snapshot) = (folder.path().join("mine.toml"), folder.path().join("hub/datasets--openai--gsm8k/snapshots/abc"));
    let problems = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/data/word_problems.jsonl")).unwrap();
    for subset in ["main", "socratic"] {
        std::fs::create_dir_all(snapshot.join(subset)).unwrap();
        for split in ["train", "test"] {
            std::fs::write(snapshot.join(subset).join(format!("{split}-00000-of-00001.jsonl")), &problems).unwrap();
        }
    }
    let hub = folder.path().join("hub").display().to_string();
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/models/qwen2_tied");
    let mut child = command(&["init", recipe.to_str().unwrap(), "--model", model, "--task", "openai/gsm8k"])
        .env("HF_HUB_CACHE", &hub)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(b"grpo\nsocratic\n\n\n").unwrap();
    let asked = child.wait_with_output().unwrap();
    let said = String::from_utf8(asked.stderr).unwrap();
    assert_eq!(asked.status.code(), Some(0), "{said}");
    assert!(said.contains("Which subset of openai/gsm8k (main, socratic)? [main] socratic"), "{said}");
    assert!(said.contains("Which split is trained on (test, train)? [train]"), "{said}");
    let text = std::fs::read_to_string(&recipe).unwrap();
    let test = "task = { kind = \"data\", data = \"openai/gsm8k\", subset = \"socratic\", split = \"test\" }";
    assert!(text.contains("subset = \"socratic\"\n") && text.contains(test), "{text}");
    assert!(!text.contains("lr = "), "its rates follow from the model: {text}");

    // What is trained on is not what an evaluation asks for.
    let written = |id: &str, args: &[&str]| {
        let init = ["init", recipe.to_str().unwrap(), "--force", "--yes", "--model", model, "--task", id];
        let written = output(command(&[&init[..], args].concat()).env("HF_HUB_CACHE", &hub));
        assert_eq!(written.status.code(), Some(0), "{}", String::from_utf8_lossy(&written.stderr));
        std::fs::read_to_string(&recipe).unwrap()
    };
    let text = written("openai/gsm8k", &["--subset", "main", "--split", "test"]);
    assert!(text.contains("split = \"test[:90%]\"\n") && text.contains("split = \"test[90%:]\" }"), "{text}");
    let snapshot = folder.path().join("hub/datasets--openai--held/snapshots/abc");
    std::fs::create_dir_all(&snapshot).unwrap();
    std::fs::write(snapshot.join("test.jsonl"), &problems).unwrap();
    let text = written("openai/held", &[]);
    assert!(text.contains("split = \"test[:90%]\"\n"), "its only split: {text}");
}

/// The smallest recipe for a model and a data set: kinds are implied, rates follow, a reward must be named.
#[test]
fn a_recipe_for_data_names_its_reward_and_check_says_why_each_value_is_what_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = folder.path().join("mine.toml");
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/models/qwen2_tied");
    let data = concat!(env!("CARGO_MANIFEST_DIR"), "/data/word_problems.jsonl");
    let text = format!("pipeline = 'grpo'\n[model]\npath = '{model}'\n[task]\ndata = '{data}'\n");
    std::fs::write(&recipe, &text).unwrap();
    let check =
        |sets: &[&str]| rollflow(&with_sets(&["check", recipe.to_str().unwrap(), "--set", "generate.max_new_tokens=40"], sets));
    let refused = check(&[]);
    assert_eq!(refused.code, Some(2));
    for part in ["the recipe has no `reward`", "one of \"exact\", \"numeric\"", "\"math\" compares final answers"] {
        assert!(refused.err.contains(part), "{part}: {}", refused.err);
    }
    let checked = check(&["reward.kind=math", "train.epochs=2"]);
    assert_eq!((checked.code, checked.err.as_str()), (Some(0), ""));
    for part in [
        "train.lr = 1e-6: a Hugging Face model, full fine-tuning\n",
        "train.steps = 13: train.epochs = 2.0 of 200 prompts, 32 a step\n",
        "chat.ask = \"as_written\": the model has no chat template\n",
        "flow.window = 64: (flow.max_staleness + 1) * sync.every * batch.groups\n",
    ] {
        assert!(checked.out.contains(part), "{part}: {}", checked.out);
    }
    let warned = check(&["reward.kind=math", "train.lr=1e-3"]);
    assert!(warned.out.contains("warning: train.lr is 0.001, far from what is common"), "{}", warned.out);
    let adapters = check(&["reward.kind=math", "lora.rank=8", "sft={steps=2}", "critic={}"]);
    for part in ["train.lr = 1e-5: a Hugging Face model, adapters", "sft.lr = 0.0002: ", "critic.lr = 1e-5: "] {
        assert!(adapters.out.contains(part), "{part}: {}", adapters.out);
    }
}

/// Lines from a pipe answer its questions, and what it writes over data whose names say nothing runs.
#[test]
fn init_takes_answers_from_a_pipe_and_what_it_writes_runs() {
    let folder = tempfile::tempdir().unwrap();
    let (data, recipe, out) = (folder.path().join("data.jsonl"), folder.path().join("mine.toml"), folder.path().join("run"));
    let line = |n: usize| format!("{{\"ask\":\"{n}+1=\",\"told\":\"{}\"}}\n", n + 1);
    std::fs::write(&data, (0..60).map(line).collect::<String>()).unwrap();
    let init = |answers: &str| {
        let mut child = command(&["init", recipe.to_str().unwrap(), "--force"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(answers.as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let (code, said) = init(&format!("SFT_then_grpo\n\n{}\nask\ntold\nExact\n3\n", data.display()));
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("Its field with the prompt? [prompt] ask"), "{said}");
    let text = std::fs::read_to_string(&recipe).unwrap();
    for part in [
        "pipeline = \"sft_then_grpo\"",
        "columns = { prompt = \"ask\", answer = \"told\" }",
        "split = \"train[90%:]\"",
        "steps = 3",
    ] {
        assert!(text.contains(part), "{part}:\n{text}");
    }
    let more = [
        "sft.steps=2",
        "sft.batch=4",
        "batch.groups=4",
        "generate.max_num_seqs=8",
        "filter=[]",
        "reward={kind=\"regex\",pattern=\"[0-9]\"}",
        "generate.max_new_tokens=4",
    ];
    rollflow(&plain_run_args(recipe.to_str().unwrap(), &out, &[TINY_MODEL, &more].concat())).ok();
    let (code, said) = init("gpro\n");
    assert!(code == Some(2) && said.contains("none of grpo, sft, sft_then_grpo"), "{said}");
}

/// A model of 256 positions, and a question that is longer than that beside those that aren't.
#[test]
fn what_init_writes_runs_with_a_model_that_reads_little_and_leaves_out_what_does_not_fit() {
    let folder = tempfile::tempdir().unwrap();
    let (data, recipe, out) = (folder.path().join("data.jsonl"), folder.path().join("mine.toml"), folder.path().join("run"));
    let line = |question: &str| format!("{{\"question\":\"{question}\",\"answer\":\"3\"}}\n");
    let questions = (0..9).map(|n| line(&format!("{n}+1="))).chain([line(&"1+".repeat(300))]);
    std::fs::write(&data, questions.collect::<String>()).unwrap();
    let (data, recipe) = (data.to_str().unwrap(), recipe.to_str().unwrap());
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/models/qwen2_tied");
    rollflow(&["init", recipe, "--yes", "--model", model, "--task", data, "--steps", "1"]).ok();
    // A model that was drawn at random earns nothing: any answer does.
    let any = [
        "filter=[]",
        "reward={kind=\"regex\",pattern=\"(?s).*\",require_end_of_text=false}",
        "batch.groups=2",
        "generate.group_size=2",
    ];
    let ended = rollflow(&plain_run_args(recipe, &out, &any)).ok();
    let said = "9 records; skipped: 1 longer than 128 tokens, which are what 128 new ones leave of the 256 that the model reads";
    assert!(ended.out.contains(said), "{}", ended.out);

    let checked = rollflow(&["check", recipe, "--set", "generate.max_new_tokens=256"]);
    assert_eq!(checked.code, Some(2));
    assert!(checked.err.contains("`generate.max_new_tokens` is 256, but the model reads 256 tokens"), "{}", checked.err);
}

#[test]
fn shells_and_man_know_every_subcommand() {
    let help = rollflow(&["--help"]).out;
    let commands: Vec<&str> =
        help.lines().skip_while(|line| *line != "Commands:").skip(1).map_while(|line| line.split_whitespace().next()).collect();
    assert!(commands.len() > 14 && commands.contains(&"compare"), "{commands:?}");
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/reference/command.md")).unwrap();
    let man = rollflow(&["man"]).out;
    let completions = ["bash", "zsh", "fish"].map(|shell| rollflow(&["completions", shell]).out);
    for name in commands.iter().filter(|name| **name != "help") {
        assert!(man.contains(name) && page.contains(&format!("| `{name}")), "{name}");
        assert!(completions.iter().all(|script| script.contains(name)), "{name}");
    }
    assert!(rollflow(&["man", "compare"]).out.contains("metric"), "a page for each");
    assert_eq!(rollflow(&["man", "nothing"]).code, Some(2));
}

#[test]
fn a_recipe_that_is_not_there_is_named() {
    let refused = rollflow(&["run", "no/such.toml"]);
    assert_eq!(refused.code, Some(2));
    assert!(refused.err.contains("no/such.toml"), "{}", refused.err);
}
