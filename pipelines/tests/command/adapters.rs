//! `[lora]`: runs that train adapters alone, what they leave, and `export`.

use std::fs;
use std::path::Path;

use rollflow::model::{Compute, Weights, load_hf};
use rollflow::prelude::*;
use rollflow::train::Scorer;
use serde_json::Value;

use crate::crashes::{run_killed, same_bytes};
use crate::running::{GRPO, TINY, plain_run_args, rollflow, run_args, with_sets};

const LORA: &str = "lora={rank=2,alpha=4}";

fn run(run: &Path, sets: &[&str]) {
    rollflow(&run_args(GRPO, run, sets)).ok();
}

fn export(args: &[&str], code: i32) -> String {
    let ended = rollflow(&[&["export"], args].concat());
    assert_eq!(ended.code, Some(code), "{}", ended.err);
    ended.err
}

/// The weights of a folder, and what they are without adapters.
fn weights(folder: &Path) -> (Weights, Vec<f32>) {
    let (_, weights) = load_hf(folder).unwrap();
    let merged = Vec::try_from(weights.merged().flat).unwrap();
    (weights, merged)
}

/// Laws C1 and C2, with adapters over whole weights and over such in 4 bits, however they reach the generator, held to the policy that only the warm-up made.
#[test]
fn a_run_of_adapters_that_was_killed_is_the_run_that_was_not() {
    let folder = tempfile::tempdir().unwrap();
    for (sync, base) in [("merged", "stored"), ("adapter", "stored"), ("adapter", "nf4")] {
        let (whole, killed) = (folder.path().join("whole"), folder.path().join("killed"));
        let (sync, base) = (format!("lora.sync={sync}"), format!("lora.base={base}"));
        let held = ["reference={kind=\"frozen\"}", "train.kl_loss={beta=0.1}"];
        let sets = [&[LORA, &sync, &base, "train.steps=40", "checkpoint.every=1", "train.lr=1e-2"][..], &held].concat();
        run(&whole, &sets);
        assert!(run_killed(&killed, &sets, 6, 11) >= 4);
        for file in ["adapter_model.safetensors", "optimizer.safetensors", "progress.json"] {
            let file = format!("checkpoints/step_000040/{file}");
            same_bytes(&whole.join(&file), &killed.join(&file));
        }
        same_bytes(&whole.join("metrics.jsonl"), &killed.join("metrics.jsonl"));
        [whole, killed].iter().for_each(|run| fs::remove_dir_all(run).unwrap());
    }
}

/// The base that was trained over is another model than the folder's.
#[test]
fn a_run_over_4_bits_is_scored_over_them() {
    let folder = tempfile::tempdir().unwrap();
    let (trained, lines) = (folder.path().join("run"), folder.path().join("lines.jsonl"));
    run(&trained, &[LORA, "lora.base=nf4", "train.lr=1e-2"]);
    fs::write(&lines, "{\"text\":\"3+4=7\"}\n").unwrap();
    let checkpoint = trained.join("checkpoints/step_000003");
    let scored = |model: &Path| {
        let ended = rollflow(&["score", model.to_str().unwrap(), lines.to_str().unwrap()]).ok();
        serde_json::from_str::<Value>(&ended.out).unwrap()["sum"].as_f64().unwrap()
    };
    let tokenizer = Tokenizer::from_dir(&trained.join("base")).unwrap();
    let policy = Policy::load_in_4_bits(&checkpoint, tokenizer, Compute::default()).unwrap();
    let tokens = policy.tokenizer().encode("3+4=7").unwrap();
    let mut samples = vec![Sample::supervised(&tokens[..1], &tokens[1..])];
    let config = LocalConfig::new(CrossEntropy, Schedule::constant(0.0));
    Scorer::new(config, policy.config().clone()).annotate(&policy.frozen(), &mut samples, Default::default()).unwrap();
    let asked = samples[0].ref_log_probs.iter().zip(&samples[0].loss_mask).filter(|(_, weight)| **weight > 0.0);
    let expected: f64 = asked.map(|(log_prob, _)| f64::from(*log_prob)).sum();
    let (of_run, whole) = (scored(&trained), scored(&checkpoint));
    assert!((of_run - expected).abs() < 1e-6 && (whole - expected).abs() > 1e-5, "{of_run} {whole} {expected}");
}

#[test]
fn a_critic_learns_beside_adapters_and_what_it_leaves_is_a_policy() {
    let folder = tempfile::tempdir().unwrap();
    let trained = folder.path().join("run");
    run(&trained, &[LORA, "critic={lr=1e-3}", "train.lr=1e-2", "lora.targets=[\"q_proj\",\"down_proj\"]"]);
    let checkpoint = trained.join("checkpoints/step_000003");
    assert!(checkpoint.join("critic/model.safetensors").exists(), "a critic is whole");
    assert!(checkpoint.join("adapter_model.safetensors").exists() && !checkpoint.join("model.safetensors").exists());
    let policy = Policy::load(&checkpoint).unwrap();
    let base = Policy::load(trained.join("base")).unwrap();
    assert!(policy.weights().flat == base.weights().flat, "the base stays as it was");
    assert!(policy.merged().weights().flat != base.weights().flat);
    assert_eq!(policy.tokenizer().encode("3+4=").unwrap(), base.tokenizer().encode("3+4=").unwrap());
}

#[test]
fn an_unknown_target_is_refused_with_what_there_is() {
    let folder = tempfile::tempdir().unwrap();
    let refused = rollflow(&run_args(GRPO, &folder.path().join("run"), &["lora={targets=[\"query\"]}"]));
    assert_eq!(refused.code, Some(2));
    assert!(["query", "all-linear", "q_proj", "down_proj"].iter().all(|name| refused.err.contains(name)), "{}", refused.err);
}

/// It keeps whole weights, and would go on from its checkpoint with other roundings.
#[test]
fn adapters_by_themselves_are_no_reference_that_follows() {
    let check = |kind: &str| {
        let reference = format!("reference.kind={kind}");
        let sets = ["lora.sync=adapter", "train.kl_loss={beta=0.1}", reference.as_str()];
        rollflow(&with_sets(&["check", GRPO], &sets))
    };
    let refused = check("ema");
    assert!(refused.code == Some(2) && refused.err.contains("`lora.sync` is \"adapter\""), "{}", refused.err);
    assert_eq!(check("frozen").code, Some(0));
}

#[test]
fn adapters_are_exported_merged_and_by_themselves_and_nothing_is_overwritten() {
    let folder = tempfile::tempdir().unwrap();
    let trained = folder.path().join("run");
    run(&trained, &[LORA, "train.lr=1e-2", "checkpoint.every=1"]);
    let path = |name: &str| folder.path().join(name);
    let paths = [trained.clone(), path("whole"), path("apart"), path("half")];
    let [from, whole, apart, half] = paths.each_ref().map(|path| path.to_str().unwrap());
    let (adapted, merged) = weights(&trained.join("checkpoints/step_000003"));

    export(&[from, whole], 0);
    let (exported, flat) = weights(&path("whole"));
    assert!(exported.adapter.is_none() && flat == merged);
    for file in ["config.json", "generation_config.json", "tokenizer.json", "model.safetensors"] {
        assert!(path("whole").join(file).is_file(), "{file}");
    }
    export(&[from, apart, "--adapter"], 0);
    let (exported, flat) = weights(&path("apart"));
    assert!(exported.adapter.unwrap().flat == adapted.adapter.unwrap().flat && flat == merged);

    export(&[from, half, "--dtype", "bf16", "--max-shard-size", "4KB"], 0);
    let (_, rounded) = weights(&path("half"));
    let far = |(a, b): (&f32, &f32)| (a - b).abs() > 0.004 * b.abs();
    assert!(rounded != merged && !rounded.iter().zip(&merged).any(far));
    assert!(path("half").join("model.safetensors.index.json").is_file() && !path("half").join("model.safetensors").exists());

    assert!(export(&[from, whole], 2).contains("nothing is overwritten"));
    assert!(export(&[whole, path("other").to_str().unwrap(), "--adapter"], 1).contains("no adapters"));
    assert!(export(&[folder.path().to_str().unwrap(), path("other").to_str().unwrap()], 1).contains("no complete checkpoint"));
    let leftover = |entry: std::io::Result<fs::DirEntry>| entry.unwrap().file_name().to_string_lossy().ends_with(".writing");
    assert!(!fs::read_dir(folder.path()).unwrap().any(leftover));

    // A run goes on with adapters of the kind that it finds, and refuses others; without [lora] they are merged and everything is trained.
    let model = format!("model={{kind=\"folder\",path={from:?}}}");
    let from_run = |name: &str, sets: &[&str]| rollflow(&plain_run_args(GRPO, &path(name), &[&TINY[5..], sets].concat()));
    from_run("on", &[&model, LORA]).ok();
    let other = from_run("refused", &[&model, "lora={rank=3}"]);
    assert!(other.code == Some(1) && other.err.contains("rank 2") && other.err.contains("rank 3"), "{}", other.err);
    from_run("full", &[&model]).ok();

    // One that was damaged since is passed over, as by a resume.
    let newest = trained.join("checkpoints/step_000003/adapter_model.safetensors");
    let mut bytes = fs::read(&newest).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&newest, bytes).unwrap();
    export(&[from, path("older").to_str().unwrap()], 0);
    assert!(weights(&path("older")).1 == weights(&trained.join("checkpoints/step_000002")).1);
    assert!(path("full/checkpoints/step_000003/model.safetensors").is_file());
}

/// Its adapters name the model under them by the path that it had.
#[test]
fn a_run_of_adapters_that_was_moved_is_exported_and_one_that_lost_its_base_is_over_another_copy() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let text = |name: &str| path(name).display().to_string();
    run(&path("run"), &[LORA, "train.steps=1", "train.lr=1e-2"]);
    fs::rename(path("run"), path("moved")).unwrap();
    export(&[&text("moved"), &text("whole")], 0);
    let (_, merged) = weights(&path("whole"));
    // The adapters of the supervised part of a run are one folder deeper.
    fs::create_dir(path("moved/sft")).unwrap();
    fs::rename(path("moved/checkpoints"), path("moved/sft/checkpoints")).unwrap();
    export(&[&text("moved/sft"), &text("supervised")], 0);
    assert!(weights(&path("supervised")).1 == merged);
    fs::rename(path("moved/sft/checkpoints"), path("moved/checkpoints")).unwrap();
    fs::rename(path("moved/base"), path("copy")).unwrap();
    let lost = export(&[&text("moved"), &text("lost")], 1);
    assert!(lost.contains("--base FOLDER") && !lost.contains("paths are relative"), "{lost}");
    export(&[&text("moved"), &text("over"), "--base", &text("copy")], 0);
    export(&[&text("moved"), &text("apart"), "--base", &text("copy"), "--adapter"], 0);
    assert!(weights(&path("over")).1 == merged && weights(&path("apart")).1 == merged, "the adapters name the copy");
    assert!(export(&[&text("copy"), &text("other"), "--base", &text("copy")], 2).contains("holds no adapters"));
    assert!(export(&[&text("moved"), &text("other"), "--base", &text("apart")], 2).contains("holds adapters"));
}

/// A sentencepiece model, which converters to other formats read.
#[test]
fn a_checkpoint_and_an_export_have_the_tokenizer_model_of_the_base() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    run(&path("run"), &[LORA, "train.steps=1"]);
    fs::write(path("run/base/tokenizer.model"), b"\x00pieces").unwrap();
    let model = format!("model={{kind=\"folder\",path={:?}}}", path("run/base"));
    rollflow(&plain_run_args(GRPO, &path("on"), &[&TINY[5..], &[model.as_str()]].concat())).ok();
    export(&[path("on").to_str().unwrap(), path("out").to_str().unwrap()], 0);
    for of in [path("on/checkpoints/step_000003"), path("out")] {
        assert_eq!(fs::read(of.join("tokenizer.model")).unwrap(), b"\x00pieces", "{}", of.display());
    }
}

/// Rendered by them, prompts would be others than in training.
#[test]
fn an_export_of_adapters_that_have_a_tokenizer_has_no_template_of_the_base() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    run(&path("run"), &[LORA, "train.steps=1"]);
    let more = path("run/base/additional_chat_templates");
    fs::create_dir_all(&more).unwrap();
    for file in [path("run/base/chat_template.jinja"), more.join("tool_use.jinja")] {
        fs::write(file, "of the base").unwrap();
    }
    for (to, flags) in [("whole", &[][..]), ("apart", &["--adapter"])] {
        let paths = [path("run"), path(to)];
        let paths = paths.each_ref().map(|path| path.to_str().unwrap());
        export(&[&paths[..], flags].concat(), 0);
        assert!(path(to).join("tokenizer.json").is_file());
        assert!(!path(to).join("additional_chat_templates").exists(), "{to}");
        assert_ne!(fs::read_to_string(path(to).join("chat_template.jinja")).unwrap(), "of the base", "{to}");
    }
    // Those without one have the base's.
    let checkpoint = path("run/checkpoints/step_000001");
    fs::remove_file(checkpoint.join("tokenizer.json")).unwrap();
    export(&[checkpoint.to_str().unwrap(), path("of_base").to_str().unwrap()], 0);
    assert!(path("of_base/tokenizer.json").is_file() && path("of_base/additional_chat_templates/tool_use.jinja").is_file());
}
