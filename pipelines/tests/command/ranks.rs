//! Runs of several processes: `rollflow launch`, launchers' variables, and what happens when a rank is gone.

use std::path::Path;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::crashes::{lines, nothing_lost, same_bytes};
use crate::running::{GRPO, Running, finished, read, rollflow, rollflow_with, rows, run_args};

/// `launch --ranks RANKS RECIPE --out OUT` with the tiny values and `sets` after them.
fn launch_args<'a>(ranks: &'a str, out: &'a Path, sets: &'a [&'a str]) -> Vec<&'a str> {
    ["launch", "--ranks", ranks].into_iter().chain(run_args(GRPO, out, sets).into_iter().skip(1)).collect()
}

fn signal(process: u32, signal: Signal) {
    kill_process(Pid::from_raw(process as i32).unwrap(), signal).unwrap();
}

/// The steps of a run: loss, gradient norm, reward.
fn steps(run: &Path) -> Vec<[f64; 3]> {
    let row = |row: &Value| ["loss", "grad_norm", "reward_mean"].map(|key| row[key].as_f64().unwrap());
    rows(run).iter().map(row).collect()
}

/// With everything that a rank must be able to make by itself: a critic, adapters over 4 bits, samples mixed in, and a loss that changes.
#[test]
fn n1_a_run_of_several_ranks_is_the_run_of_one_and_repeats_to_the_bit() {
    let folder = tempfile::tempdir().unwrap();
    let run = |name: &str| folder.path().join(name);
    let sets = [
        "train.steps=6",
        "train.ppo_epochs=2",
        "train.micro_batch_tokens=64",
        "train.threads=1",
        "critic={lr=1e-3,lambda=0.9}",
        "lora={rank=2,base='nf4',sync='adapter'}",
        "mix={batch=2,every=2}",
        "change=[{at=4,set=['train.loss={kind=\"dapo\"}']}]",
    ];
    rollflow(&run_args(GRPO, &run("alone"), &sets)).ok();
    let runs = [
        ("2", "two", "nothing", "1"),
        ("3", "three", "optimizer", "1"),
        ("4", "two copies", "gradients", "2"),
        ("2", "two again", "nothing", "1"),
    ];
    for (ranks, name, shard, copies) in runs {
        let [shard, copies] = [format!("ranks.shard=\"{shard}\""), format!("ranks.replicas={copies}")];
        let ended = rollflow(&launch_args(ranks, &run(name), &[&sets[..], &[&shard, &copies]].concat())).ok();
        assert!(ended.out.contains("[rank 0] "), "{}", ended.out);
        for (at, (found, expected)) in steps(&run(name)).iter().zip(&steps(&run("alone"))).enumerate() {
            let near = |at: usize| (found[at] - expected[at]).abs() <= 1e-3 * expected[at].abs().max(1e-2);
            assert!((0..3).all(near), "{name}, step {}: {found:?}, alone {expected:?}", at + 1);
        }
    }
    for file in ["metrics.jsonl", "checkpoints/step_000006/adapter_model.safetensors"] {
        same_bytes(&run("two").join(file), &run("two again").join(file));
    }
}

#[test]
fn c1_whichever_rank_is_killed_all_end_with_its_name_and_fewer_ranks_go_on_without_a_loss() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let sets = ["train.steps=30", "checkpoint.every=1", "observe.rollouts_every=1", "flow.max_staleness=3", "train.threads=1"];
    let args = |ranks, shard| {
        let own = launch_args(ranks, &run, &sets).into_iter();
        own.chain(["--set", shard, "--resume"]).collect::<Vec<_>>()
    };
    for (victim, shard) in
        ["ranks.shard=\"nothing\"", "ranks.shard=\"optimizer\"", "ranks.shard=\"parameters\""].iter().enumerate()
    {
        let mut running = Running::start(&args("3", shard));
        let before = lines(&run);
        running.until("three steps are taken", |_| lines(&run) >= before + 3);
        let ranks = running.children();
        assert_eq!(ranks.len(), 3, "{ranks:?}");
        signal(ranks[victim], Signal::KILL);
        let ended = format!("rank {victim} ended: signal: 9");
        // Both others say it.
        for _ in 0..2 {
            running.line(|line| (line.contains("] error: ") && line.contains(&ended)).then_some(()));
        }
        assert_eq!(running.end(), Some(137));
        assert!(ranks.iter().all(|id| !Path::new(&format!("/proc/{id}")).exists()), "a rank is left: {ranks:?}");
    }
    rollflow(&args("2", "ranks.shard=\"parameters\"")).ok();
    nothing_lost(&run, 30);
}

#[test]
fn f5_an_interrupt_of_the_launcher_drains_the_run_on_all_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let sets = ["train.steps=100000", "observe.log_every=1"];
    for (options, code) in [(&[][..], 0), (&["--resume"][..], 75)] {
        let run = folder.path().join(code.to_string());
        let mut running = Running::start(&[&launch_args("2", &run, &sets), options].concat());
        running.until("a step is taken", |_| lines(&run) > 0);
        running.interrupt();
        running.line(|line| line.contains("[rank 0] warning: interrupted: finishing what is in flight").then_some(()));
        running.line(|line| {
            assert!(!line.contains("failed"), "{line}");
            line.contains("[rank 0] report: ").then_some(())
        });
        assert_eq!(running.end(), Some(code));
    }
}

/// As an init system signals them, which ends all processes of a service.
#[test]
fn f5_a_sigterm_of_the_launcher_and_of_its_ranks_counts_once() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let args = [&launch_args("2", &run, &["train.steps=100000", "observe.log_every=1"])[..], &["--resume"]].concat();
    let mut running = Running::start(&args);
    running.until("a step is taken", |_| lines(&run) > 0);
    let ranks = running.children();
    assert_eq!(ranks.len(), 2, "{ranks:?}");
    running.terminate();
    for rank in ranks {
        signal(rank, Signal::TERM);
    }
    running.line(|line| {
        assert!(!line.contains("interrupted again"), "{line}");
        line.contains("[rank 0] report: ").then_some(())
    });
    assert_eq!(running.end(), Some(75));
}

/// In a job of Slurm, whose variables are part of the keys in the ranks' store.
#[test]
fn a_sigterm_of_the_launcher_before_the_ranks_have_met_ends_all_with_the_reason_and_code_143() {
    let folder = tempfile::tempdir().unwrap();
    let job = [("SLURM_JOB_ID", "7"), ("SLURM_STEP_ID", "0"), ("TORCHELASTIC_RESTART_COUNT", "1")];
    let mut running = Running::start_with(&launch_args("2", &folder.path().join("run"), &[]), &job);
    let mut second = None;
    running.until("rank 1 is started", |running| {
        let is_second = |id: &u32| read(Path::new(&format!("/proc/{id}/environ"))).contains("\0RANK=1\0");
        second = running.children().into_iter().find(is_second);
        second.is_some()
    });
    // Rank 0 waits for it.
    signal(second.unwrap(), Signal::STOP);
    running.terminate();
    running.line(|line| (line == "rank 0 ended: signal: 15 (SIGTERM)").then_some(()));
    signal(second.unwrap(), Signal::CONT);
    running.line(|line| (line == "[rank 1] error: rank 0 ended: signal: 15 (SIGTERM)").then_some(()));
    assert_eq!(running.end(), Some(143));
}

#[test]
fn a_launch_that_resumes_a_run_reads_the_recipe_of_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    finished(&run, &[]);
    let args = ["launch", "--ranks", "2", "gone.toml", "--out", run.to_str().unwrap(), "--resume"];
    let ended = rollflow(&args).ok();
    assert!(ended.out.contains("is complete: it has taken all of its 3 steps"), "{}", ended.out);
}

/// Ranks 0 and 1 of a run, as processes without a launcher.
fn two_ranks(run: &Path, sets: &[&str]) -> [Running; 2] {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
    let args = [&run_args(GRPO, run, sets)[..], &["--resume"]].concat();
    ["0", "1"].map(|rank| {
        let own = [("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2")];
        Running::start_with(&args, &[&own[..], &[("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &port)]].concat())
    })
}

#[test]
fn f5_a_sigterm_of_any_rank_drains_the_run_and_all_ranks_say_to_start_again() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let [mut first, second] = two_ranks(&run, &["train.steps=100000"]);
    first.until("a step is taken", |_| lines(&run) > 0);
    second.terminate();
    assert_eq!([first.end(), second.end()], [Some(75); 2]);
    let newest = rollflow::train::checkpoint::latest(&run.join("checkpoints")).unwrap();
    assert!(newest.is_some(), "a drained run has saved");
}

#[test]
fn a_rank_0_that_is_stopped_with_the_store_that_it_serves_ends_the_others_with_its_name() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let [mut first, mut second] = two_ranks(&run, &["train.steps=100000", "ranks.lost_timeout=10.0"]);
    second.until("a step is taken", |_| lines(&run) > 0);
    first.stand_still(true);
    second.line(|line| (line.contains("error: ") && line.contains("rank 0 on ")).then_some(()));
    assert_eq!(second.end(), Some(69));
    first.stand_still(false);
    first.line(|line| (line.contains("error: rank 0 on ") && line.contains(" was stopped for ")).then_some(()));
    assert_eq!(first.end(), Some(1), "the rank that was stopped counts for all");
}

#[test]
fn ranks_that_cannot_run_together_are_refused_with_the_reason_before_anything_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("run");
    let run = |sets: &[&str], variables: &[(&str, &str)]| rollflow_with(&run_args(GRPO, &out, sets), variables);
    let refused = |ended: crate::running::Ended, reasons: &[&str]| {
        assert!(ended.code != Some(0), "{}", ended.out);
        for reason in reasons {
            assert!(ended.err.contains(reason), "{reason} is missing: {}", ended.err);
        }
    };
    refused(run(&[], &[("RANK", "2"), ("WORLD_SIZE", "2")]), &["RANK is 2", "numbered from 0", "MASTER_ADDR is not set"]);
    let taken = std::net::TcpListener::bind("0.0.0.0:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let first = [("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &port)];
    refused(run(&[], &first), &[&format!("port {port}"), "MASTER_PORT"]);
    refused(run(&["train.replica_devices=[\"cpu\"]"], &first), &["train.replica_devices", "leave the key out"]);
    drop(taken);
    let uneven = launch_args("3", &out, &["ranks.replicas=2", "ranks.shard=\"optimizer\""]);
    refused(rollflow(&uneven), &["ranks.replicas is 2", "there are 3 ranks"]);
    std::thread::scope(|scope| {
        let ranks = [("0", "train.lr=1e-3"), ("1", "train.lr=2e-3")].map(|(rank, lr)| {
            let (run, mut variables) = (&run, first);
            variables[0].1 = rank;
            scope.spawn(move || run(&[lr], &variables))
        });
        for (rank, code) in ranks.into_iter().zip([1, 69]) {
            let ended = rank.join().unwrap();
            assert_eq!(ended.code, Some(code), "rank 0 counts for all: {}", ended.err);
            refused(ended, &["rank 1 on ", "[train] lr = 0.002; rank 0 has [train] lr = 0.001"]);
        }
    });
    assert!(!out.exists());
}
