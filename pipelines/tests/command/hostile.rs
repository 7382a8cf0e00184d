//! Hostile recipes, folders and data: each is named in an error before anything large is allocated, and none of it commands a terminal.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use crate::fork_server::output;
use crate::running::{GRPO, command, finished, rollflow, rollflow_after, with_sets};
use crate::terminal::written_on_terminal;

/// More address space than `check` takes, and far less than the sizes below would.
const SMALL: &str = "ulimit -v 8000000";

#[test]
fn sizes_that_no_machine_has_are_errors_of_check() {
    for (set, named) in [
        ("model.vocab=0", "`model.vocab` is 0"),
        ("model.layers=9223372036854775807", "`model.layers` is 9223372036854775807"),
        ("model.layers=4294967296", "`model.layers` is 4294967296"),
        ("model.layers=1000000", "`model.layers` is 1000000"),
        ("model.hidden=4294967296", "`model.hidden` is 4294967296"),
        ("generate.max_num_seqs=9223372036854775807", "`generate.max_num_seqs` is 9223372036854775807"),
        ("generate.group_size=9223372036854775807", "`generate.group_size` is 9223372036854775807"),
        ("generate.max_new_tokens=9223372036854775807", "`generate.max_new_tokens` is 9223372036854775807"),
        ("train.micro_batch_tokens=9223372036854775807", "`train.micro_batch_tokens` is 9223372036854775807"),
        ("lora={rank=9223372036854775807}", "`lora.rank` is 9223372036854775807"),
    ] {
        let ended = rollflow_after(SMALL, &["check", GRPO, "--set", set]);
        assert_eq!(ended.code, Some(2), "{set}: {}", ended.err);
        assert!(ended.err.contains(named), "{set}: {}", ended.err);
    }
}

fn fifo(path: &Path) {
    rustix::fs::mknodat(rustix::fs::CWD, path, rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR, 0).unwrap();
}

#[test]
fn what_is_no_model_and_what_is_no_file_is_named_and_never_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |args: &[&str], named: &[&str]| {
        let ended = rollflow(args);
        assert_eq!(ended.code, Some(2), "{args:?}: {}", ended.err);
        assert!(named.iter().all(|part| ended.err.contains(part)), "{args:?}: {}", ended.err);
    };
    let folder_model = |path: &Path| format!("model={{kind=\"folder\",path={:?}}}", path.display().to_string());
    refused(&["check", GRPO, "--set", &folder_model(Path::new("/etc"))], &["`model.path`", "no config.json"]);
    refused(&["check", GRPO, "--set", &folder_model(Path::new("/dev/null"))], &["`model.path`"]);

    let recipe = folder.path().join("recipe.toml");
    fifo(&recipe);
    refused(&["check", recipe.to_str().unwrap()], &["it is a FIFO"]);
    let data = folder.path().join("train.jsonl");
    fifo(&data);
    let task = format!("task={{kind=\"data\",data={:?}}}", folder.path().display().to_string());
    refused(&["check", GRPO, "--set", &task, "--set", "reward={kind=\"exact\"}"], &["train.jsonl", "it is a FIFO"]);
    let model = folder.path().join("model");
    fs::create_dir(&model).unwrap();
    for name in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
        fs::copy(Path::new("../tests/golden/models/qwen2_tied").join(name), model.join(name)).unwrap();
    }
    fifo(&model.join("model.safetensors"));
    refused(&["check", GRPO, "--set", &folder_model(&model)], &["model.safetensors", "it is a FIFO"]);
}

#[test]
fn check_reads_the_data_and_names_each_bad_line() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("sums.jsonl");
    let line = |n: usize| format!("{{\"question\": \"{n}+1=\", \"answer\": {}}}\n", n + 1);
    let task = format!("task={{kind=\"data\",data={:?}}}", data.display().to_string());
    let check = || rollflow(&["check", GRPO, "--set", &task, "--set", "reward={kind=\"exact\"}", "--set", "batch.groups=4"]);

    fs::write(&data, (0..30).map(line).collect::<String>() + "{\"other\": 1}\n").unwrap();
    let good = check().ok();
    let said = "task.data: sums, 30 records in 1 file; skipped: 1 of no known shape; 7.5 steps per epoch";
    assert!(good.out.contains(said), "{}", good.out);

    fs::write(&data, (0..30).map(line).collect::<String>() + "{\"question\": \"1+\n").unwrap();
    let bad = check();
    assert_eq!(bad.code, Some(2), "{}", bad.out);
    assert!(bad.err.contains("sums.jsonl:31: not JSON"), "{}", bad.err);

    fs::write(&data, "{\"question\": \"1+1=\"}\n").unwrap();
    let unanswered = check();
    assert!(unanswered.err.contains("skipped: 1 without a reference answer"), "{}", unanswered.err);

    // Larger than what is read whole: the count is an estimate, and the far end is looked at as well.
    let many: String = (1_000_000..2_300_000).map(line).collect();
    fs::write(&data, &many).unwrap();
    let large = check().ok();
    assert!(
        large.out.contains("task.data: sums, about 1300000 records") && large.out.contains("estimated from"),
        "{}",
        large.out
    );
    fs::write(&data, many + "nonsense\n").unwrap();
    let bad = check();
    assert!(bad.err.contains("sums.jsonl:1300001: not JSON"), "{}", bad.err);
}

#[test]
fn a_variable_that_is_not_utf_8_is_named() {
    let output = output(command(&["check", GRPO]).env("ROLLFLOW__TRAIN__LR", OsStr::from_bytes(b"1e-4\xff")));
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("$ROLLFLOW__TRAIN__LR: the environment variable is not UTF-8"), "{said}");
}

#[test]
fn a_resume_with_other_draws_or_groups_is_refused_and_leaves_the_run_as_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    finished(&run, &["train.steps=1"]);
    let before = fs::read(run.join("recipe.toml")).unwrap();
    let path = run.to_str().unwrap();
    let refused = rollflow(&["resume", path, "--set", "seed=9", "--set", "generate.group_size=2", "--set", "train.steps=2"]);
    assert_eq!(refused.code, Some(2), "{}", refused.err);
    for part in ["`generate.group_size` is 4 in the run, and 2 now", "`seed` is 0 in the run, and 9 now"] {
        assert!(refused.err.contains(part), "{}", refused.err);
    }
    let adapted = rollflow(&["resume", path, "--set", "lora={rank=4}", "--set", "train.lr=1e-4", "--set", "observe.log_every=3"]);
    assert!(adapted.err.contains("`lora.rank` is absent in the run, and 4 now"), "{}", adapted.err);
    assert!(!adapted.err.contains("train.lr") && !adapted.err.contains("log_every"), "{}", adapted.err);
    assert_eq!(fs::read(run.join("recipe.toml")).unwrap(), before);
    // An edit of the run's recipe is no way around it.
    fs::write(run.join("recipe.toml"), String::from_utf8(before).unwrap().replace("seed = 0", "seed = 9")).unwrap();
    let refused = rollflow(&["resume", path]);
    assert!(refused.err.contains("`seed` is 0 in the run, and 9 now"), "{}", refused.err);
    rollflow(&["resume", path, "--set", "seed=0", "--set", "train.steps=2"]).ok();
}

#[test]
fn a_resume_with_a_setting_that_the_run_left_out_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    finished(&run, &["train.steps=1"]);
    let resume = |sets: &[&str]| rollflow(&with_sets(&["resume", run.to_str().unwrap()], sets));
    for (set, named) in [
        ("chat.system=\"Be brief.\"", "`chat.system` is absent in the run, and \"Be brief.\" now"),
        ("train.off_policy_threshold=0.5", "`train.off_policy_threshold` is absent in the run, and 0.5 now"),
        ("filter=[{kind=\"any_success\"}]", "`filter[0].kind` is absent in the run, and \"any_success\" now"),
        ("model.dtype=bf16", "`model.dtype` is \"f32\" in the run, and \"bf16\" now"),
    ] {
        let refused = resume(&[set, "train.steps=2"]);
        assert!(refused.code == Some(2) && refused.err.contains(named), "{set}: {}{}", refused.out, refused.err);
    }
    // A run of an earlier version, which did not know a key.
    let older = |text: &str| text.replace("ignore_eos = false\n", "");
    let recipe = fs::read_to_string(run.join("recipe.toml")).unwrap();
    assert_ne!(older(&recipe), recipe);
    fs::write(run.join("recipe.toml"), older(&recipe)).unwrap();
    let mut record: serde_json::Value = serde_json::from_slice(&fs::read(run.join("run.json")).unwrap()).unwrap();
    record["recipe"] = older(record["recipe"].as_str().unwrap()).into();
    fs::write(run.join("run.json"), record.to_string()).unwrap();
    let refused = resume(&["generate.ignore_eos=true", "train.steps=2"]);
    assert!(refused.err.contains("`generate.ignore_eos` is false in the run, and true now"), "{}", refused.err);
    resume(&["model.dtype=f32", "train.steps=2"]).ok();
}

#[test]
fn a_range_that_the_run_would_refuse_is_refused_by_check() {
    for (set, named) in [
        ("filter=[{kind=\"diversity\",min_unique_ratio=0.0}]", "`filter[0].min_unique_ratio` is 0"),
        ("generate.stop=[\"\"]", "[generate]"),
        ("generate.temperature=1e300", "[generate]"),
    ] {
        let ended = rollflow(&["check", GRPO, "--set", set]);
        assert_eq!(ended.code, Some(2), "{set}: {}", ended.out);
        assert!(ended.err.contains(named), "{set}: {}", ended.err);
    }
}

/// Clears the screen, sets the title, writes over lines.
const COMMANDS: &str = "\u{1b}[2J\u{1b}]0;gotcha\u{7}\u{9b}1A";

#[test]
fn nothing_of_foreign_origin_commands_a_terminal() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("sums.jsonl");
    let record = serde_json::json!({ COMMANDS: 1 });
    fs::write(&data, format!("{record}\n")).unwrap();
    let task = format!("task={{kind=\"data\",data={:?}}}", data.display().to_string());
    let model =
        format!("model={{kind=\"folder\",path=\"/tmp/{COMMANDS}\"}}").replace('\u{1b}', "\\u001b").replace('\u{7}', "\\u0007");
    let name = "name=\"\\u001b[2Jx\"";
    for args in [
        vec!["check", GRPO, "--set", task.as_str(), "--set", "reward={kind=\"exact\"}"],
        vec!["check", GRPO, "--set", model.as_str()],
        vec!["check", GRPO, "--set", name],
    ] {
        let (_, written) = written_on_terminal(&args, &[]);
        assert!(written.contains("\\u{1b}[2J"), "{args:?}: {written:?}");
        // Only colours are of the command itself.
        let foreign = ["\u{1b}[2J", "\u{1b}]", "\u{7}", "\u{9b}"].map(|of| written.contains(of));
        assert_eq!(foreign, [false; 4], "{args:?}: {written:?}");
        let plain = rollflow(&args);
        assert!(!plain.err.contains('\u{1b}'), "{args:?}: {:?}", plain.err);
    }
}
