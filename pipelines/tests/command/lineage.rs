//! `sft_then_grpo`, runs that begin from other runs, and supervised steps beside reinforced ones.

use std::fs;
use std::net::TcpListener;
use std::path::Path;

use rollflow_pipelines::assemble::models::Lineage;
use serde_json::Value;

use crate::crashes::{run_killed, same_bytes};
use crate::running::{GRPO, Running, TINY, plain_run_args, read, rollflow, rows, run_args, with_sets};

const BOTH: &str = "pipeline=\"sft_then_grpo\"";

fn run(run: &Path, sets: &[&str]) {
    rollflow(&run_args(GRPO, run, sets)).ok();
}

#[test]
fn r108_reinforcement_begins_from_the_newest_checkpoint_of_the_supervised_part() {
    let folder = tempfile::tempdir().unwrap();
    let both = folder.path().join("run");
    // A rate that changes nothing shows what reinforcement began with.
    run(&both, &[BOTH, "sft.steps=5", "checkpoint.every=2", "train.steps=1", "train.lr=1e-30"]);
    let learned = both.join("sft/checkpoints/step_000005");
    for file in ["model.safetensors", "tokenizer.json"] {
        same_bytes(&learned.join(file), &both.join("checkpoints/step_000001").join(file));
    }
    let lineage = Lineage::read(&both).unwrap().unwrap();
    assert_eq!((lineage.checkpoint.to_str().unwrap(), lineage.step), ("sft/checkpoints/step_000005", 5));
    assert!(read(&both.join("sft/report.html")).contains("finished after 5 steps"));
    assert_eq!(read(&both.join("sft/metrics.jsonl")).lines().count(), 5);

    // The parts share counters, and each has its own numbers.
    let record: Value = serde_json::from_str(&read(&both.join("run.json"))).unwrap();
    let drawn = |list: &str, name: &str| {
        let rows = record["drawn"][list].as_array().unwrap();
        rows.iter().find(|row| row[0] == name).unwrap_or_else(|| panic!("{name} in {record}"))[1].clone()
    };
    let trained = drawn("tokens", "trained").as_f64().unwrap();
    assert!(drawn("summary", "tokens trained").as_str().unwrap().starts_with(&format!("{trained} (")), "{record}");
    let timings: Value = serde_json::from_str(&read(&both.join("timings.jsonl"))).unwrap();
    assert_eq!(timings["trained_tokens"].as_f64(), Some(trained));
}

/// Law C2, in either part, with all weights and with adapters.
#[test]
fn a_run_of_both_parts_that_was_killed_is_the_run_that_was_not() {
    let folder = tempfile::tempdir().unwrap();
    for (lora, weights) in [("lora.rank=2", "adapter_model.safetensors"), ("seed=3", "model.safetensors")] {
        let (whole, killed) = (folder.path().join("whole"), folder.path().join("killed"));
        let held = ["reference={kind=\"frozen\"}", "train.kl_loss={beta=0.1}"];
        let sets = [&[BOTH, lora, "sft.steps=12", "train.steps=16", "checkpoint.every=1", "train.lr=1e-2"][..], &held].concat();
        run(&whole, &sets);
        assert!(run_killed(&killed, &sets, 8, 21) >= 5);
        for file in [
            &format!("sft/checkpoints/step_000012/{weights}"),
            &format!("checkpoints/step_000016/{weights}"),
            "metrics.jsonl",
            "sft/metrics.jsonl",
        ] {
            same_bytes(&whole.join(file), &killed.join(file));
        }
        [whole, killed].iter().for_each(|run| fs::remove_dir_all(run).unwrap());
    }
}

/// Also of adapters, of a policy that is held to what the supervised part made, and of a critic and a moving
/// reference, whose files have tensors of the policy's names.
#[test]
fn a_run_of_both_parts_resumes_from_its_store_on_another_machine() {
    let folder = tempfile::tempdir().unwrap();
    let (frozen, moving) = ("reference={kind=\"frozen\"}", "reference={kind=\"ema\",decay=0.8}");
    for (with, reference) in [("lora.rank=2", frozen), ("seed=3", frozen), ("critic={lr=1e-3}", moving)] {
        let [store, begun, moved] = ["store", "begun", "moved"].map(|name| folder.path().join(name));
        let address = format!("file://{}", store.to_str().unwrap());
        let (kept, held) = (format!("store={{url={address:?}}}"), [reference, "train.kl_loss={beta=0.1}"]);
        run(&begun, &[&[BOTH, with, &kept, "sft.steps=3", "train.steps=2", "checkpoint.every=1"][..], &held].concat());
        let learned = fs::read(begun.join("lineage.json")).unwrap();
        fs::remove_dir_all(&begun).unwrap();
        let ended = rollflow(&["resume", &address, "--out", moved.to_str().unwrap(), "--set", "train.steps=4"]);
        assert_eq!(ended.code, Some(0), "{}{}", ended.out, ended.err);
        assert_eq!(read(&moved.join("metrics.jsonl")).lines().count(), 4);
        assert_eq!(fs::read(moved.join("lineage.json")).unwrap(), learned);
        [store, moved].iter().for_each(|path| fs::remove_dir_all(path).unwrap());
    }
}

/// Rank 0 fetches it for all.
#[test]
fn ranks_resume_a_run_from_its_store_together() {
    let folder = tempfile::tempdir().unwrap();
    let [store, begun, moved] = ["store", "begun", "moved"].map(|name| folder.path().join(name));
    let address = format!("file://{}", store.to_str().unwrap());
    run(&begun, &[&format!("store={{url={address:?}}}"), "train.steps=2", "checkpoint.every=1"]);
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
    let args = ["resume", &address, "--out", moved.to_str().unwrap(), "--set", "train.steps=4"];
    let start = |rank: &str| {
        let place = [("RANK", rank), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &port)];
        Running::start_with(&args, &place)
    };
    let mut other = start("1");
    other.line(|line| line.contains("rank 0 fetches it from the store").then_some(()));
    assert_eq!([start("0"), other].map(Running::end), [Some(0); 2]);
    assert_eq!(read(&moved.join("metrics.jsonl")).lines().count(), 4);
}

/// Its checkpoints are uploaded, too; and a resume uploads none a second time.
#[test]
fn a_supervised_part_resumes_from_the_store_of_its_run() {
    let folder = tempfile::tempdir().unwrap();
    let [store, begun, moved] = ["store", "begun", "moved"].map(|name| folder.path().join(name));
    let address = format!("file://{}", store.to_str().unwrap());
    let kept = format!("store={{url={address:?}}}");
    let mut running = Running::start(&run_args(GRPO, &begun, &[BOTH, &kept, "sft.steps=1000000", "checkpoint.every=1"]));
    running.until("a checkpoint is in the store", |_| read(&begun.join(".uploaded")).contains("sft/checkpoints"));
    running.interrupt();
    assert_eq!(running.end(), Some(0));
    let taken = read(&begun.join("sft/metrics.jsonl")).lines().count();
    fs::remove_dir_all(&begun).unwrap();
    let steps = format!("sft.steps={}", taken + 2);
    let ended = rollflow(&["resume", &address, "--out", moved.to_str().unwrap(), "--set", &steps, "--set", "train.steps=2"]);
    assert_eq!(ended.code, Some(0), "{}{}", ended.out, ended.err);
    assert_eq!(read(&moved.join("sft/metrics.jsonl")).lines().count(), taken + 2);
    assert_eq!(read(&moved.join("metrics.jsonl")).lines().count(), 2);
    let uploads = || fs::read_dir(store.join("checkpoints/manifests")).unwrap().map(|entry| entry.unwrap().file_name()).max();
    let newest = uploads();
    // With another key, a run that has taken all its steps starts again and ends.
    let again = rollflow(&["resume", moved.to_str().unwrap(), "--set", "observe.log_every=7"]);
    assert!(again.code == Some(0) && again.out.contains("report: "), "{}{}", again.out, again.err);
    assert_eq!(uploads(), newest);
}

/// Nothing that a second attempt would meet.
#[test]
fn a_run_whose_store_can_not_be_opened_leaves_no_folder() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("run");
    let ended = rollflow(&run_args(GRPO, &out, &["store={url=\"az://container/run\"}"]));
    assert!(ended.code == Some(1) && ended.err.to_lowercase().contains("account"), "{}", ended.err);
    assert!(!out.exists());
}

/// A key that nothing reads any more is an error, and not ignored.
#[test]
fn supervised_steps_can_be_raised_until_the_supervised_part_has_ended() {
    let folder = tempfile::tempdir().unwrap();
    for (pipeline, name) in [(BOTH, "both"), ("pipeline=\"grpo\"", "grpo")] {
        let out = folder.path().join(name);
        run(&out, &[pipeline, "sft.steps=3", "train.steps=2", "checkpoint.every=1"]);
        let resume = |sets: &[&str]| rollflow(&with_sets(&["resume", out.to_str().unwrap()], sets));
        for (key, now) in [("sft.steps", "9"), ("sft.lr", "0.5")] {
            let refused = resume(&[&format!("{key}={now}"), "train.steps=3"]);
            assert_eq!(refused.code, Some(2), "{}{}", refused.out, refused.err);
            let told = format!("`{key}` is ");
            assert!(refused.err.contains(&told) && refused.err.contains("the supervised part has ended"), "{}", refused.err);
        }
        assert_eq!(resume(&["train.steps=3"]).code, Some(0));
        assert_eq!(read(&out.join("metrics.jsonl")).lines().count(), 3);
    }
    // As a run is left that is interrupted before its supervised part has ended.
    let both = folder.path().join("both");
    fs::remove_file(both.join("lineage.json")).unwrap();
    fs::remove_dir_all(both.join("checkpoints")).unwrap();
    rollflow(&["resume", both.to_str().unwrap(), "--set", "sft.steps=5"]).ok();
    assert_eq!(Lineage::read(&both).unwrap().unwrap().step, 5);
}

#[test]
fn r108_a_resume_with_a_model_of_another_shape_is_refused_by_its_key() {
    let folder = tempfile::tempdir().unwrap();
    let both = folder.path().join("run");
    run(&both, &[BOTH]);
    let refused = rollflow(&["resume", both.to_str().unwrap(), "--set", "model.intermediate=64"]);
    assert_eq!(refused.code, Some(2));
    assert!(refused.err.contains("`model.intermediate` is 32 in the run, and 64 now"), "{}", refused.err);
}

#[test]
fn r108_a_run_is_a_model_by_its_newest_complete_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let first = folder.path().join("first");
    run(&first, &["train.steps=12", "checkpoint.every=1"]);
    fs::create_dir(first.join("checkpoints/step_999")).unwrap();
    let begun = |name: &str| {
        let model = format!("model={{kind=\"folder\",path={:?}}}", first.to_str().unwrap());
        let out = folder.path().join(name);
        let sets = [&["sft={steps=1,lr=1e-30}"], &TINY[6..], &[&*model, "train.lr=1e-30"]].concat();
        rollflow(&plain_run_args(GRPO, &out, &sets)).ok();
        out
    };
    let second = begun("second");
    let lineage = Lineage::read(&second).unwrap().unwrap();
    assert_eq!((lineage.checkpoint, lineage.step), (first.join("checkpoints/step_000012"), 12), "12 is more than 9");
    same_bytes(
        &first.join("checkpoints/step_000012/model.safetensors"),
        &second.join("checkpoints/step_000003/model.safetensors"),
    );
    // What other trainers leave at their end.
    fs::rename(first.join("checkpoints/step_000011"), first.join("checkpoints/sft_final")).unwrap();
    assert_eq!(Lineage::read(&begun("third")).unwrap().unwrap().checkpoint, first.join("checkpoints/sft_final"));
}

#[test]
fn r143_supervised_samples_are_mixed_into_every_so_many_steps_and_are_learned() {
    let folder = tempfile::tempdir().unwrap();
    let mixed = |name: &str, sets: &[&str]| -> Vec<Option<f64>> {
        let out = folder.path().join(name);
        run(&out, &[&["train.steps=60", "train.target_reward=9", "train.lr=1e-2", "batch.groups=2"], sets].concat());
        rows(&out).iter().map(|row| row["mixed_loss"].as_f64()).collect()
    };
    let mean = |losses: &[Option<f64>]| losses.iter().flatten().sum::<f64>() / losses.iter().flatten().count() as f64;
    let strong = mixed("strong", &["mix={weight=1.0,every=2,batch=32}"]);
    assert!(strong.iter().enumerate().all(|(at, loss)| loss.is_some() == (at % 2 == 1)), "{strong:?}");
    assert!(mean(&strong[50..]) < 0.7 * mean(&strong[..6]), "{strong:?}");
    let parts = mixed("parts", &["mix={weight=1.0,batch=32}", "flow.max_staleness=1", "train.minibatches=2"]);
    assert!(mean(&parts[50..]) < 0.7 * mean(&parts[..6]), "{parts:?}");
    let recipe = folder.path().join("recipe.toml");
    fs::write(&recipe, "pipeline = \"grpo\"\nmodel = { kind = \"tiny\" }\ntask = { kind = \"arithmetic\" }\nmix = {}\n").unwrap();
    let refused = rollflow(&["check", recipe.to_str().unwrap()]);
    assert!(refused.code == Some(2) && refused.err.contains("[mix] goes on with the pairs of [sft]"), "{}", refused.err);
}
