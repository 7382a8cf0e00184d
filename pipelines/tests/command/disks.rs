//! Law C1 on disks that take no more: the error names the file, the checkpoint before stays whole, and `resume` goes on from it.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use crate::crashes::{four_steps, lines, resume, steps_saved};
use crate::running::{Ended, GRPO, read, rollflow, rollflow_after, rows, run_args};

/// No file grows beyond so many blocks of 512 bytes (in some shells 1024): to whoever writes, a disk that is full.
fn full_after(blocks: u32) -> String {
    format!("trap '' XFSZ; ulimit -f {blocks}")
}

/// Root is above permissions, but for this. Others need nothing.
const HELD_TO_PERMISSIONS: &str =
    r#"[ "$(id -u)" != 0 ] || exec setpriv --bounding-set=-dac_override,-dac_read_search -- "$0" "$@""#;

fn permit(folder: &Path, mode: u32) {
    fs::set_permissions(folder, Permissions::from_mode(mode)).unwrap();
}

/// Whether `folder`, which is read-only, is so for whom the tests run as; else says why a test is left out.
fn is_read_only(folder: &Path) -> bool {
    let script = format!("{HELD_TO_PERMISSIONS}; exec \"$0\" \"$@\"");
    let touched = Command::new("sh").args(["-c", &script, "touch"]).arg(folder.join("probe")).output().unwrap();
    let refused = String::from_utf8_lossy(&touched.stderr).contains("Permission denied");
    if !refused {
        println!("left out: permissions don't hold here: {touched:?}");
    }
    refused
}

fn failed(ended: &Ended, said: &[&str]) {
    assert_eq!(ended.code, Some(1), "{}", ended.err);
    let error = ended.err.split_once("error: ").map(|(_, error)| error).unwrap_or_default();
    for said in said {
        assert!(error.contains(said), "{said} is not in: {}", ended.err);
    }
}

fn goes_on(run: &Path, after: u64, to: u64) {
    let steps = format!("train.steps={to}");
    let ended = rollflow(&["resume", run.to_str().unwrap(), "--set", &steps]).ok();
    assert!(ended.err.contains(&format!("going on after step {after}")), "{}", ended.err);
    assert_eq!((lines(run), steps_saved(run)), (to, vec![to - 2, to - 1, to]));
}

#[test]
fn a_disk_that_fills_up_under_a_checkpoint_ends_the_run_with_the_file_and_leaves_the_checkpoint_before() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let large = ["model.hidden=128", "model.intermediate=512", "train.steps=4", "checkpoint.every=1"];
    assert_eq!(rollflow(&run_args(GRPO, &run, &large)).code, Some(0));
    // Nor is there a place for the page, and that is not what the run died of.
    fs::remove_file(run.join("report.html")).unwrap();
    fs::create_dir(run.join("report.html")).unwrap();
    let ended = rollflow_after(&full_after(256), &["resume", run.to_str().unwrap(), "--set", "train.steps=6"]);
    failed(&ended, &["/checkpoints/.step_000005.", ".writing/model.safetensors: File too large"]);
    assert_eq!(steps_saved(&run), [2, 3, 4]);
    fs::remove_dir(run.join("report.html")).unwrap();
    goes_on(&run, 4, 6);
    let names = fs::read_dir(run.join("checkpoints")).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    assert!(names.into_iter().all(|name| !name.starts_with('.')), "what was half written is gone");
}

#[test]
fn a_disk_that_fills_up_under_a_log_ends_the_run_with_the_file_and_no_row_is_lost_or_cut() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    four_steps(&run);
    let written = read(&run.join("metrics.jsonl"));
    // The record of the run, which has the whole recipe, still has room.
    let room = written.len().max(read(&run.join("run.json")).len() + 4096);
    let full = full_after(u32::try_from(room / 512 + 1).unwrap());
    let sets = ["--set", "train.steps=80", "--set", "observe.rollouts_every=0", "--set", "checkpoint.every=0"];
    let more = [&resume(&run)[..], &sets].concat();
    let ended = rollflow_after(&full, &more);
    failed(&ended, &["stage \"log\" failed", "metrics.jsonl: File too large"]);
    assert!(lines(&run) < 80);
    rollflow(&more).ok();
    let steps: Vec<u64> = rows(&run).iter().map(|row| row["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, (1..=80).collect::<Vec<_>>());
}

#[test]
fn a_folder_that_nobody_may_write_into_is_named_and_what_is_in_it_stays() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    four_steps(&run);
    let checkpoints = run.join("checkpoints");
    permit(&checkpoints, 0o555);
    if is_read_only(&checkpoints) {
        let ended = rollflow_after(HELD_TO_PERMISSIONS, &["resume", run.to_str().unwrap(), "--set", "train.steps=6"]);
        failed(&ended, &["checkpoints/latest", "Permission denied"]);
        permit(&run, 0o555);
        let ended = rollflow_after(HELD_TO_PERMISSIONS, &[&resume(&run)[..], &["--set", "train.steps=6"]].concat());
        failed(&ended, &[run.to_str().unwrap(), "Permission denied"]);
        let ended = rollflow_after(HELD_TO_PERMISSIONS, &run_args(GRPO, &run.join("another"), &[]));
        failed(&ended, &["making the run's folder", run.join("another").to_str().unwrap(), "Permission denied"]);
        assert_eq!(steps_saved(&run), [2, 3, 4]);
    }
    permit(&run, 0o755);
    permit(&checkpoints, 0o755);
    goes_on(&run, 4, 6);
}
