//! Laws C1 and C2: whatever kills the process, whenever, `resume` goes on; no prompt is lost, none is trained twice, and a synchronous run
//! ends byte for byte as if nothing had happened.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rollflow::stages::train::Resumed;
use rollflow::train::checkpoint;

use crate::running::{GRPO, Running, finished, read, rollflow, rollouts, rows, run_args};

/// A rule that skips, repeats, retires and forgets within some dozens of steps.
const CURRICULUM: &str = "curriculum={replay=0.2, retire_after=1, forget_after=20}";

/// A number below `below`, drawn by `key`.
fn draw(key: u64, below: u64) -> u64 {
    (key.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0x5DEE_CE66).wrapping_mul(0xD6E8_FEB8_6659_FD93).rotate_right(29) % below
}

pub fn lines(run: &Path) -> u64 {
    read(&run.join("metrics.jsonl")).lines().count() as u64
}

pub fn resume(run: &Path) -> [&str; 2] {
    ["resume", run.to_str().unwrap()]
}

/// Runs to the end, killed `kills` times on the way (less often only if it is through before) at moments drawn by `seed`: within steps,
/// between them and within checkpoints. Gives how often.
pub fn run_killed(run: &Path, sets: &[&str], kills: u64, seed: u64) -> u64 {
    run_killed_and_seen(run, sets, (kills, seed), || ())
}

/// The same, with a look at what each kill left.
pub fn run_killed_and_seen(run: &Path, sets: &[&str], often: (u64, u64), see: impl FnMut()) -> u64 {
    killed(run, &run_args(GRPO, run, sets), often, see)
}

/// The same of a run that `first` begins.
pub fn killed(run: &Path, first: &[&str], (kills, seed): (u64, u64), mut see: impl FnMut()) -> u64 {
    let mut killed = 0;
    for kill in 0..kills {
        let args = if run.join("recipe.toml").exists() { resume(run).to_vec() } else { first.to_vec() };
        // Of both parts of a run that has two.
        let taken = || lines(run) + lines(&run.join("sft"));
        let (mut running, before) = (Running::start(&args), taken());
        let steps = draw(seed + 2 * kill, 4);
        while steps > 0 && taken() < before + steps && !running.has_ended() {
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_micros(draw(seed + 2 * kill + 1, 20_000)));
        killed += u64::from(!running.has_ended());
        drop(running);
        see();
    }
    rollflow(&resume(run)).ok();
    killed
}

#[test]
fn a_synchronous_run_that_was_killed_dozens_of_times_is_the_run_that_was_not() {
    let folder = tempfile::tempdir().unwrap();
    let (whole, killed) = (folder.path().join("whole"), folder.path().join("killed"));
    // The shipped filter drops groups, so that rounds are uneven. The curriculum's choices follow from all before.
    let sets = [
        "train.steps=100",
        "checkpoint.every=1",
        "observe.rollouts_every=1",
        "train.lr=3e-4",
        "filter=[{kind=\"nonzero_std\"}]",
        CURRICULUM,
    ];
    rollflow(&run_args(GRPO, &whole, &sets)).ok();
    assert!(run_killed(&killed, &sets, 24, 1) >= 20);
    for file in
        ["metrics.jsonl", "rollouts.jsonl", "checkpoints/step_000100/model.safetensors", "checkpoints/step_000100/progress.json"]
    {
        same_bytes(&whole.join(file), &killed.join(file));
    }
}

/// Laws C2 and V1. A checkpoint between two versions would name two sets of weights by one version.
#[test]
fn a_run_with_several_steps_a_version_saves_with_its_versions_and_resumes_as_if_it_had_not_been_killed() {
    let folder = tempfile::tempdir().unwrap();
    let (whole, cut) = (folder.path().join("whole"), folder.path().join("cut"));
    let sets = ["train.steps=8", "sync.every=2", "checkpoint.every=3", "checkpoint.keep=9", "train.lr=3e-4"];
    for run in [&whole, &cut] {
        finished(run, &sets);
        assert_eq!(steps_saved(run), [4, 6, 8]);
    }
    for step in [6, 8] {
        fs::remove_dir_all(cut.join(format!("checkpoints/step_{step:06}"))).unwrap();
    }
    rollflow(&resume(&cut)).ok();
    for file in ["metrics.jsonl", "checkpoints/step_000008/model.safetensors"] {
        same_bytes(&whole.join(file), &cut.join(file));
    }
}

/// The same with a critic, whose folder is part of every checkpoint, and minibatches that are drawn.
#[test]
fn a_run_with_a_critic_that_was_killed_is_the_run_that_was_not() {
    let folder = tempfile::tempdir().unwrap();
    let (whole, killed) = (folder.path().join("whole"), folder.path().join("killed"));
    let critic = "critic={lr=1e-3,warmup_steps=2,lambda=0.9}";
    let sets = ["train.steps=30", "checkpoint.every=1", "train.ppo_epochs=2", "train.minibatches=2", critic];
    rollflow(&run_args(GRPO, &whole, &sets)).ok();
    assert!(run_killed(&killed, &sets, 6, 3) >= 4);
    let checkpoint = "checkpoints/step_000030";
    for file in ["model.safetensors", "critic/model.safetensors", "critic/optimizer.safetensors", "progress.json"] {
        same_bytes(&whole.join(checkpoint).join(file), &killed.join(checkpoint).join(file));
    }
    same_bytes(&whole.join("metrics.jsonl"), &killed.join("metrics.jsonl"));
}

/// What a run is held to goes on too: a moving average, a copy, or the policy that only the warm-up made, and what distance from it costs.
#[test]
fn a_run_that_was_killed_is_held_to_the_reference_of_the_run_that_was_not() {
    let folder = tempfile::tempdir().unwrap();
    let cost = "train.kl_reward={beta=0.1,target=0.01,horizon=100}";
    for reference in ["{kind=\"ema\",decay=0.8}", "{kind=\"periodic\",every=7}", "{kind=\"frozen\"}"] {
        let (whole, killed) = (folder.path().join("whole"), folder.path().join("killed"));
        let reference = format!("reference={reference}");
        let sets = ["train.steps=30", "checkpoint.every=1", "train.lr=1e-2", "train.kl_loss={beta=0.1}", cost, &reference];
        rollflow(&run_args(GRPO, &whole, &sets)).ok();
        assert!(run_killed(&killed, &sets, 5, 5) >= 3);
        let last = checkpoint::read_metadata(&whole.join("checkpoints/step_000030")).unwrap();
        assert_eq!(last.files.contains_key("reference.safetensors"), !reference.contains("frozen"));
        for file in last.files.keys().map(|name| format!("checkpoints/step_000030/{name}")).chain(["metrics.jsonl".to_owned()]) {
            same_bytes(&whole.join(&file), &killed.join(&file));
        }
        let row = read(&whole.join("metrics.jsonl")).lines().next_back().unwrap().to_owned();
        let row: serde_json::Value = serde_json::from_str(&row).unwrap();
        assert!(row["kl_loss_mean_nats"].as_f64().unwrap() != 0.0 && row["kl_loss_coefficient"] == 0.1, "{row}");
        assert!(row["kl_reward_mean_nats"].is_number() && row["kl_reward_coefficient"] != 0.1, "{row}");
        [whole, killed].iter().for_each(|run| fs::remove_dir_all(run).unwrap());
    }
}

pub fn same_bytes(whole: &Path, killed: &Path) {
    let (expected, found) = (fs::read(whole).unwrap(), fs::read(killed).unwrap());
    let mut lines = expected.split(|byte| *byte == b'\n').zip(found.split(|byte| *byte == b'\n')).enumerate();
    if let Some((line, (expected, found))) = lines.find(|(_, (expected, found))| expected != found) {
        let [expected, found] = [expected, found].map(String::from_utf8_lossy);
        panic!("law C2: line {} of {} differs:\n{expected:.1000}\n{found:.1000}", line + 1, killed.display());
    }
    assert_eq!(expected.len(), found.len(), "law C2: {} is the same", killed.display());
}

#[test]
fn an_asynchronous_run_that_was_killed_dozens_of_times_loses_no_prompt_and_trains_none_twice() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let sets = ["train.steps=120", "checkpoint.every=1", "observe.rollouts_every=1", "flow.max_staleness=3", CURRICULUM];
    assert!(run_killed(&run, &sets, 24, 7) >= 20);

    nothing_lost(&run, 120);
}

/// Laws D2 and D4: a run of so many steps of 4 groups of 4 trained every sample once, and its ledger balances.
pub fn nothing_lost(run: &Path, steps: u64) {
    let rollouts = rollouts(run);
    let samples: BTreeSet<(u64, u32)> = rollouts.iter().map(|rollout| (rollout.group, rollout.index)).collect();
    assert_eq!((rollouts.len() as u64, samples.len() as u64), (steps * 4 * 4, steps * 4 * 4), "none twice");
    assert!(samples.iter().map(|(group, _)| *group).eq((0..steps * 4).flat_map(|group| [group; 4])), "none left out");
    let taken: Vec<u64> = rows(run).iter().map(|row| row["step"].as_u64().unwrap()).collect();
    assert_eq!(taken, (1..=steps).collect::<Vec<_>>());
    let last = run.join(format!("checkpoints/step_{steps:06}"));
    let totals = Resumed::read(&last).unwrap().progress.ledger.totals();
    assert_eq!(totals.imbalance(), (0, 0), "law D4: {totals:?}");
}

/// A run of four steps with a checkpoint at each of the last three.
pub fn four_steps(run: &Path) {
    finished(run, &["train.steps=4", "checkpoint.every=1"]);
}

pub fn steps_saved(run: &Path) -> Vec<u64> {
    checkpoint::list(&run.join("checkpoints")).unwrap().into_iter().map(|(step, _)| step).collect()
}

#[test]
fn a_flipped_byte_or_a_missing_file_is_named_and_the_checkpoint_before_is_used() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    four_steps(&run);
    let model = run.join("checkpoints/step_000004/model.safetensors");
    let mut bytes = fs::read(&model).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&model, bytes).unwrap();
    let ended = rollflow(&resume(&run)).ok();
    for said in ["step_000004/model.safetensors: its checksum is", "going on after step 3"] {
        assert!(ended.err.contains(said), "{}", ended.err);
    }
    fs::remove_file(run.join("checkpoints/step_000004/optimizer.safetensors")).unwrap();
    let ended = rollflow(&resume(&run)).ok();
    for said in ["step_000004/optimizer.safetensors: No such file", "going on after step 3"] {
        assert!(ended.err.contains(said), "{}", ended.err);
    }
    assert_eq!(steps_saved(&run), [2, 3, 4]);
}

#[test]
fn a_run_goes_on_for_as_many_steps_more_as_it_is_given() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    four_steps(&run);
    let more = ["resume", run.to_str().unwrap(), "--set", "train.steps=6"];
    let ended = rollflow(&more).ok();
    assert_eq!((lines(&run), steps_saved(&run)), (6, vec![4, 5, 6]));
    assert!(ended.err.contains("step 6/6"), "the progress line counts the run's steps: {}", ended.err);
    assert!(read(&run.join("report.html")).contains("finished after 6 steps"));
    assert!(read(&run.join("recipe.toml")).contains("steps = 6"));
}

/// Laws C1 and C2. A run that was stopped may lack the rows of its last steps.
#[test]
fn a_resume_of_an_asynchronous_run_takes_a_checkpoint_without_its_row_and_others_make_the_row_again() {
    let folder = tempfile::tempdir().unwrap();
    for (staleness, rows, said) in [(1, 5, "the rows between them are missing"), (0, 6, "going on after step 3")] {
        let run = folder.path().join(staleness.to_string());
        let overlaps = format!("flow.max_staleness={staleness}");
        finished(&run, &["train.steps=4", "checkpoint.every=1", &overlaps]);
        let metrics = run.join("metrics.jsonl");
        let kept: Vec<String> = read(&metrics).lines().take(3).map(|row| format!("{row}\n")).collect();
        fs::write(&metrics, kept.concat()).unwrap();
        let ended = rollflow(&["resume", run.to_str().unwrap(), "--set", "train.steps=6"]).ok();
        assert!(ended.err.contains(said), "{}", ended.err);
        assert_eq!((lines(&run), steps_saved(&run)), (rows, vec![4, 5, 6]));
    }
}

/// Every file below the folder, with its content.
fn contents(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { found.extend(contents(&path)) } else { drop(found.insert(path.clone(), fs::read(path).unwrap())) }
    }
    found
}

/// Resumes with `key=steps` and checks that it is refused with both numbers, and that nothing in the run's folder changed.
pub fn refuses_fewer_steps(run: &Path, key: &str, steps: u64, taken: u64) {
    let parts = [format!("`{key}` = {steps}"), format!("taken {taken} steps"), format!("raise `{key}` above {taken}")];
    refuses_to_resume(run, &format!("{key}={steps}"), &parts);
}

fn refuses_to_resume(run: &Path, set: &str, parts: &[String]) {
    let before = contents(run);
    let ended = rollflow(&["resume", run.to_str().unwrap(), "--set", set]);
    assert_eq!(ended.code, Some(2), "{}", ended.err);
    for part in parts {
        assert!(ended.err.contains(part), "{part} is missing: {}", ended.err);
    }
    assert!(contents(run) == before, "nothing is written or undone");
}

/// Law F7.
#[test]
fn a_resume_with_fewer_steps_than_were_taken_ends_and_says_why() {
    let folder = tempfile::tempdir().unwrap();
    let (grpo, both) = (folder.path().join("grpo"), folder.path().join("both"));
    four_steps(&grpo);
    refuses_fewer_steps(&grpo, "train.steps", 3, 4);
    let ended = rollflow(&run_args(GRPO, &both, &["pipeline=\"sft_then_grpo\"", "sft.steps=5", "train.steps=2"])).ok();
    assert!(ended.err.contains("step 5/5") && ended.err.contains("step 2/2"), "each part counts its own steps: {}", ended.err);
    refuses_fewer_steps(&both, "train.steps", 1, 2);
    refuses_to_resume(
        &both,
        "sft.steps=4",
        &["`sft.steps` is 5 in the run, and 4 now, and the supervised part has ended".to_owned()],
    );
}

#[test]
fn a_resume_of_a_complete_run_says_so_and_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    four_steps(&run);
    let before = contents(&run);
    let ended = rollflow(&resume(&run)).ok();
    assert!(ended.out.contains("is complete: it has taken all of its 4 steps"), "{}", ended.out);
    assert!(contents(&run) == before);
}

#[test]
fn a_checkpoint_that_cannot_be_written_ends_the_run_with_the_path_and_leaves_the_old_ones() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    four_steps(&run);
    // No file can be renamed over a folder.
    fs::remove_file(run.join("checkpoints/latest")).unwrap();
    fs::create_dir(run.join("checkpoints/latest")).unwrap();
    let ended = rollflow(&["resume", run.to_str().unwrap(), "--set", "train.steps=6"]);
    assert_eq!(ended.code, Some(1));
    assert!(ended.err.contains("checkpoints/latest: "), "{}", ended.err);
    assert!(steps_saved(&run).starts_with(&[2, 3, 4]), "{:?}", steps_saved(&run));
}

#[test]
fn two_processes_never_work_on_one_run() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let mut running = Running::start(&run_args(GRPO, &run, &["train.steps=1000000", "train.target_reward=9"]));
    running.until("it trained", |_| lines(&run) > 0);
    let refused = rollflow(&resume(&run));
    assert_eq!(refused.code, Some(1));
    assert!(refused.err.contains("another process works on the run"), "{}", refused.err);
}

#[test]
fn a_lock_that_is_a_symbolic_link_is_refused_and_what_it_points_to_stays() {
    let folder = tempfile::tempdir().unwrap();
    let (run, other) = (folder.path().join("run"), folder.path().join("other"));
    four_steps(&run);
    fs::write(&other, "kept").unwrap();
    fs::remove_file(run.join(".lock")).unwrap();
    std::os::unix::fs::symlink(&other, run.join(".lock")).unwrap();
    let refused = rollflow(&[&resume(&run)[..], &["--set", "train.steps=6"]].concat());
    assert_eq!((refused.code, read(&other).as_str()), (Some(1), "kept"), "{}", refused.err);
    assert!(refused.err.contains(".lock") && refused.err.contains("symbolic link"), "{}", refused.err);
}

#[test]
fn a_folder_with_files_of_a_run_whose_recipe_is_gone_is_refused_and_left_as_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    four_steps(&run);
    fs::remove_file(run.join("recipe.toml")).unwrap();
    let rows = read(&run.join("metrics.jsonl"));
    let refused = rollflow(&run_args(GRPO, &run, &["train.steps=4"]));
    assert_eq!(refused.code, Some(2), "{}", refused.err);
    for said in ["holds files of another run", "metrics.jsonl", "checkpoints", "--out"] {
        assert!(refused.err.contains(said), "{said}: {}", refused.err);
    }
    assert_eq!((rows, run.join("recipe.toml").exists()), (read(&run.join("metrics.jsonl")), false));
}

#[test]
fn a_folder_without_a_run_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let refused = rollflow(&resume(folder.path()));
    assert_eq!(refused.code, Some(2));
    assert!(refused.err.contains("recipe.toml") && refused.err.contains("cannot read"), "{}", refused.err);
}
