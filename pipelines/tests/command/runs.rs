//! `run`: what it leaves behind, that it can be repeated, and how it ends.

use std::fs;
use std::path::Path;

use rollflow::data::Status;
use rollflow::observe::Metric;
use rollflow::observe::logs::Rollout;
use rollflow::prelude::*;
use rollflow::train::checkpoint;
use serde_json::Value;

use crate::running::{GRPO, Running, SFT, TINY_MODEL, plain_run_args, read, rollflow, rollouts, rows, run_args};

fn checkpoints(run: &Path) -> Vec<u64> {
    checkpoint::list(&run.join("checkpoints")).unwrap().into_iter().map(|(step, _)| step).collect()
}

/// Whether a checkpoint is an optimizer step's and loads as a policy.
fn assert_loads(run: &Path, step: u64) {
    let folder = run.join(format!("checkpoints/step_{step:06}"));
    assert_eq!(checkpoint::read_metadata(&folder).unwrap().step, step);
    let policy = Policy::load(&folder).unwrap();
    assert_eq!(policy.tokenizer().decode(&policy.tokenizer().encode("3+4=").unwrap()).unwrap(), "3+4=");
}

#[test]
fn a_run_leaves_its_recipe_metrics_rollouts_page_and_checkpoints() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("new/run");
    let sets = ["train.steps=5", "checkpoint.every=1", "checkpoint.keep=2", "observe.rollouts_every=2"];
    let ended = rollflow(&run_args(GRPO, &run, &sets)).ok();
    assert!(ended.out.contains("bottleneck:") && ended.out.contains("report.html"), "{}", ended.out);

    let rows = rows(&run);
    assert_eq!(rows.iter().map(|row| row["step"].as_u64().unwrap()).collect::<Vec<_>>(), [1, 2, 3, 4, 5]);
    for metric in [Metric::Loss, Metric::GradNorm, Metric::LearningRate, Metric::RewardMean, Metric::RewardMin, Metric::RewardMax]
    {
        assert!(rows.iter().all(|row| row[metric.key()].is_number()), "{} is in every row", metric.key());
    }
    let rollouts = rollouts(&run);
    assert_eq!(rollouts.len(), 3 * 4 * 4, "steps 1, 2 and 4, of 4 groups of 4");
    assert!(rollouts.iter().all(|rollout| rollout.reward.is_some() && rollout.metadata.contains_key("answer")));

    assert_eq!(checkpoints(&run), [4, 5], "the newest two are kept");
    assert_loads(&run, 5);
    let page = read(&run.join("report.html"));
    assert!(page.contains("finished after 5 steps") && page.contains("checkpoints/step_000005"), "{page}");
    rollflow(&["check", run.join("recipe.toml").to_str().unwrap()]).ok();
}

#[test]
fn recorded_rollouts_are_shown_checked_and_written_as_a_data_set() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let (run, samples, train) = (path("run"), path("all/samples.jsonl"), path("new/best/train.jsonl"));
    rollflow(&run_args(GRPO, &run, &["train.steps=2", "observe.rollouts_every=1"])).ok();
    let rollouts = |source: &Path, args: &[&str]| rollflow(&[&["rollouts", source.to_str().unwrap()], args].concat());

    let listed = rollouts(&run, &["--where", "step == 2", "--limit", "3"]).out;
    assert_eq!(listed.lines().count(), 1 + 3, "{listed}");
    assert!(
        listed.starts_with("step  group  sample  reward  tokens  prompt") && listed.lines().skip(1).all(|l| l.starts_with("2 "))
    );
    let chat = rollouts(&run, &["--limit", "1", "--show", "chat"]).out;
    assert!(chat.starts_with("## step 2, group ") && chat.contains("### user") && chat.contains("### assistant"), "{chat}");
    let nothing = rollouts(&run, &["--where", "reward >= 7"]);
    assert!(nothing.code == Some(1) && nothing.err.contains("no rollout fits"), "{}", nothing.err);
    assert_eq!(rollouts(&folder.path().join("none"), &[]).code, Some(2));

    let written = rollouts(&run, &["--samples", samples.to_str().unwrap()]);
    assert!(written.out.starts_with("32 samples: "), "{}{}", written.out, written.err);
    let tokens = rollouts(&samples, &["--limit", "1", "--show", "tokens"]).out;
    assert!(tokens.contains("place    token  weight  log-prob  version"), "{tokens}");

    let written = rollouts(&run, &["--where", "reward <= 1", "--conversations", train.to_str().unwrap()]);
    assert!(written.out.starts_with("32 conversations: "), "{}{}", written.out, written.err);
    assert_eq!(read(&train).lines().count(), 32);
    let nowhere = train.join("samples.jsonl").display().to_string();
    let refused = rollouts(&run, &["--samples", &nowhere]);
    assert_eq!(refused.code, Some(1));
    assert!(refused.err.contains(&format!("making the folder of {nowhere}: ")), "{}", refused.err);

    let lines = read(&run.join("rollouts.jsonl"));
    fs::write(run.join("rollouts.jsonl"), format!("{lines}{{\"step\":2,")).unwrap();
    assert_eq!(rollouts(&run, &["--check"]).out, "0 issues in 32 rollouts\n", "a killed run leaves half a line");
    let again = path("again.jsonl").display().to_string();
    assert!(rollouts(&run, &["--samples", &again]).out.starts_with("32 samples: "));
    assert_eq!(rollouts(&run, &["--check", "--samples", samples.to_str().unwrap()]).code, Some(2), "it would write nothing");
    let first = lines.lines().next().unwrap();
    fs::write(run.join("rollouts.jsonl"), format!("{first}\n{lines}")).unwrap();
    let checked = rollouts(&run, &["--check"]);
    assert_eq!(checked.code, Some(1));
    assert!(
        checked.out.starts_with("step 1: sample 0 of group ") && checked.out.contains("it is there twice"),
        "{}",
        checked.out
    );
}

#[test]
fn rollouts_are_written_over_no_file_and_as_nothing_but_json_lines() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    rollflow(&run_args(GRPO, &run, &["train.steps=1", "observe.rollouts_every=1"])).ok();
    let own = run.join("rollouts.jsonl");
    let lines = read(&own);
    let [source, own_name] = [&run, &own].map(|path| path.to_str().unwrap());
    let path = |name: &str| folder.path().join(name).display().to_string();
    let same = path("same.jsonl");
    for (args, why) in [
        (&["--samples", own_name][..], "nothing is overwritten"),
        (&["--conversations", own_name], "nothing is overwritten"),
        (&["--samples", &same, "--conversations", &same], "name the same file"),
        (&["--samples", &path("all.parquet")], "JSON lines"),
        (&["--conversations", &path("all.jsonl.gz")], "JSON lines"),
    ] {
        let refused = rollflow(&[&["rollouts", source], args].concat());
        assert!(refused.code == Some(2) && refused.err.contains(why), "{args:?}: {}", refused.err);
    }
    assert_eq!(read(&own), lines);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "nothing else was written");
    let twice = ["rollouts", source, "--samples", &same, "--conversations", &path("run/../same.jsonl")];
    assert!(rollflow(&twice).err.contains("nothing is overwritten"));
    assert!(read(&folder.path().join("same.jsonl")).contains("\"tokens\""), "the samples are there");
}

#[test]
fn written_samples_have_every_column_of_their_rollouts() {
    let folder = tempfile::tempdir().unwrap();
    let (run, samples) = (folder.path().join("run"), folder.path().join("samples.jsonl"));
    rollflow(&run_args(GRPO, &run, &["train.steps=1", "observe.rollouts_every=1"])).ok();
    rollflow(&["rollouts", run.to_str().unwrap(), "--samples", samples.to_str().unwrap()]).ok();
    let lines = |path: &Path| -> Vec<Value> { read(path).lines().map(|line| serde_json::from_str(line).unwrap()).collect() };
    let (recorded, written) = (lines(&run.join("rollouts.jsonl")), lines(&samples));
    assert_eq!(recorded.len(), written.len());
    assert!(recorded.iter().any(|of| of["trainer_log_probs"].is_array() && of["entropies"].is_array()), "{}", recorded[0]);
    for (recorded, written) in recorded.iter().zip(&written) {
        for (column, value) in recorded.as_object().unwrap() {
            let column = match column.as_str() {
                "group" => "group_index",
                column => column,
            };
            assert_eq!(&written[column], value, "{column}");
        }
    }
}

/// Rows are in `metrics.jsonl` and nowhere else; the report reads them there.
#[cfg(target_os = "linux")]
#[test]
fn a_run_does_not_grow_with_the_rows_it_has_logged() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    // Wide rows, so that a short run logs much.
    let parts: Vec<String> =
        (0..400).map(|at| format!("{{name=\"part_{at:03}\",kind=\"regex\",pattern=\"zzzzzzzzz\"}}")).collect();
    let reward = format!("reward={{kind=\"parts\",part=[{}]}}", parts.join(","));
    let steps =
        ["train.steps=1000000", "train.target_reward=9", "checkpoint.every=20", "batch.groups=1", "generate.group_size=2"];
    let sets = [&steps[..], &["observe.rollouts_every=0", &reward]].concat();
    let mut running = Running::start(&run_args(GRPO, &run, &sets));
    let logged = || fs::metadata(run.join("metrics.jsonl")).map_or(0, |file| file.len());
    running.until("it has warmed up", |_| logged() > 4 << 20);
    let before = (running.resident(), logged());
    running.until("it logged 16 MiB more", |_| logged() > before.1 + (16 << 20));
    let grown = running.resident().saturating_sub(before.0);
    let logged = logged() - before.1;
    assert!(grown < logged / 2, "{grown} bytes of memory for {logged} bytes of rows");
}

/// Only groups that earn different rewards are trained: the others take no pass, and nothing is measured on them.
const VARIED: &str = "filter=[{kind=\"nonzero_std\"}]";

/// Law N3, and that a correction named on the command line is the one that is computed.
#[test]
fn a_run_measures_its_gap_and_corrects_for_it_as_told() {
    let folder = tempfile::tempdir().unwrap();
    let run = |name: &str, sets: &[&str]| {
        let run = folder.path().join(name);
        rollflow(&run_args(GRPO, &run, &[&["train.lr=1e-2", "flow.max_staleness=1", VARIED], sets].concat())).ok();
        rows(&run)
    };
    let plain = run("plain", &[]);
    let first = &plain[0];
    assert!(first["log_prob_gap_mean_nats"].as_f64().unwrap() < 1e-4, "one model, one precision: {first}");
    assert!((first["importance_effective_sample_ratio"].as_f64().unwrap() - 1.0).abs() < 1e-4, "{first}");
    assert!((first["importance_ratio_lag_0"].as_f64().unwrap() - 1.0).abs() < 1e-4, "{first}");
    assert!(plain.iter().all(|row| row.get(Metric::CorrectionWeight.key()).is_none()));

    for kind in ["truncated_is", "masked_is", "icepop"] {
        let set = format!("train.correction.kind={kind}");
        let rows = run(kind, &[&set]);
        assert!((rows[0][Metric::CorrectionWeight.key()].as_f64().unwrap() - 1.0).abs() < 1e-4, "{kind}: {}", rows[0]);
        assert!(rows.iter().all(|row| row[Metric::CorrectionDropped.key()].is_number()), "{kind}");
    }
    // Sampled from 20 tokens, each is about one nat likelier than under the trainer: no ratio is in bounds, and nothing is learned from.
    let narrow = "train.correction={kind=\"masked_is\",min=0.99,max=1.01}";
    let cut = ["generate.top_k=20", "train.probe=false"];
    let nothing = run("nothing", &[&[narrow, "flow.max_staleness=0", "train.ppo_epochs=2"], &cut[..]].concat());
    assert!(nothing.iter().all(|row| row[Metric::CorrectionDropped.key()] == 1.0 && row["grad_norm"] == 0.0), "{nothing:?}");
    let rejected = run("rejected", &["train.reject=[{divergence=\"k3\",over=\"mean\",max=1e-30}]", "train.proximal=loglinear"]);
    assert!(rejected.iter().any(|row| row[Metric::CorrectionSequences.key()].as_f64().unwrap() > 0.0), "{rejected:?}");
}

#[test]
fn a_run_whose_generator_means_something_else_by_a_log_probability_does_not_start() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("run");
    let refused = rollflow(&run_args(GRPO, &out, &["generate.top_k=2"]));
    assert_eq!(refused.code, Some(1));
    for part in ["disagree about what a log-probability is", "nats on average", "top_p, top_k or min_p", "train.probe"] {
        assert!(refused.err.contains(part), "{part} is missing: {}", refused.err);
    }
    assert!(rows(&out).is_empty(), "nothing was trained");
    // The gap is measured all the same, and ends the run where it says so.
    let sets = ["generate.top_k=20", VARIED, "train.probe=false", "train.gap_warn=0.1", "train.gap_halt=0.2"];
    let halted = rollflow(&run_args(GRPO, &folder.path().join("halted"), &sets));
    assert_eq!(halted.code, Some(1));
    assert!(
        halted.err.contains("step 1: generator and trainer disagree") && halted.err.contains("limit of 0.2"),
        "{}",
        halted.err
    );
}

#[test]
fn supervised_training_leaves_the_same_kind_of_folder() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("sft");
    let sets = [TINY_MODEL, &["sft.steps=4", "sft.batch=4", "sft.schedule.warmup=1"]].concat();
    rollflow(&plain_run_args(SFT, &run, &sets)).ok();
    assert!(rows(&run).len() == 4 && rows(&run).iter().all(|row| row["loss"].is_number() && row.get("reward_mean").is_none()));
    assert_loads(&run, 4);
    assert!(read(&run.join("report.html")).contains("finished after 4 steps"));
}

#[test]
fn a_folder_that_holds_a_run_or_cannot_be_made_is_refused_and_named() {
    let folder = tempfile::tempdir().unwrap();
    let (run, file) = (folder.path().join("run"), folder.path().join("file"));
    fs::create_dir(&run).unwrap();
    fs::write(run.join("recipe.toml"), "precious").unwrap();
    fs::write(&file, "").unwrap();
    for (out, code, why) in [(&run, 2, "already holds a run"), (&file.join("below"), 1, "making the run's folder")] {
        let refused = rollflow(&run_args(GRPO, out, &[]));
        assert_eq!(refused.code, Some(code));
        assert!(refused.err.contains(why) && refused.err.contains(out.to_str().unwrap()), "{}", refused.err);
    }
    assert_eq!(read(&run.join("recipe.toml")), "precious");
}

#[test]
fn ctrl_c_drains_to_a_checkpoint_and_exits_with_0() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let mut running =
        Running::start(&run_args(GRPO, &run, &["train.steps=1000000", "train.target_reward=9", "checkpoint.every=0"]));
    let metrics = run.join("metrics.jsonl");
    running.until("it trained", |_| read(&metrics).lines().count() >= 2);
    running.interrupt();
    assert_eq!(running.end(), Some(0));
    let last = rows(&run).last().unwrap()["step"].as_u64().unwrap();
    assert_eq!(checkpoints(&run), [last], "law C1: the last step, and it is in the metrics");
    assert_loads(&run, last);
    assert!(read(&run.join("report.html")).contains(&format!("was interrupted after {last} steps")));
}

/// Laws F5 and C2. The same command each time, as a scheduler gives it.
#[test]
fn one_command_starts_a_run_resumes_it_after_an_interruption_and_leaves_a_complete_one_alone() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let job = |steps| [run_args(GRPO, &run, &[]), vec!["--resume", "--set", steps]].concat();
    let metrics = run.join("metrics.jsonl");
    let mut running = Running::start(&job("train.steps=1000000"));
    running.until("it trained", |_| read(&metrics).lines().count() >= 2);
    running.interrupt();
    assert_eq!(running.end(), Some(75), "there is more to do");
    let taken = rows(&run).last().unwrap()["step"].as_u64().unwrap();
    let steps = format!("train.steps={}", taken + 3);
    let ended = rollflow(&job(&steps)).ok();
    assert!(ended.err.contains(&format!("going on after step {taken}")), "{}", ended.err);
    assert_eq!(rows(&run).len() as u64, taken + 3, "no step was lost or taken twice");
    let again = rollflow(&job(&steps));
    assert!(again.code == Some(0) && again.out.contains("is complete"), "{again:?}");
}

#[test]
fn ctrl_c_during_the_warm_up_ends_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let mut running = Running::start(&run_args(GRPO, &run, &["sft.steps=1000000"]));
    // What a stage says, it says after the signal is listened for.
    running.line(|line| line.starts_with("Starting SFT training").then_some(()));
    running.interrupt();
    assert_eq!(running.end(), Some(0));
    assert!(rows(&run).is_empty() && checkpoints(&run).is_empty(), "the policy that was asked for was never begun");
}

/// Law F5. What an environment searches comes from a pipe that nobody has written to, so that between the warm-up and reinforcement there is all
/// the time in the world.
#[test]
fn ctrl_c_between_the_warm_up_and_reinforcement_ends_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let (run, corpus) = (folder.path().join("run"), folder.path().join("texts.txt"));
    assert!(std::process::Command::new("mkfifo").arg(&corpus).status().unwrap().success());
    let environment = format!("environment={{kind=\"search\",corpus={corpus:?}}}");
    let mut running = Running::start(&run_args(
        GRPO,
        &run,
        &[&environment, "train.steps=1000000", "train.target_reward=9", "train.probe=false"],
    ));
    running.line(|line| (line == "Training complete!").then_some(()));
    running.interrupt();
    running.line(|line| line.contains("interrupted: finishing").then_some(()));
    fs::write(&corpus, "1+1 is 2\n").unwrap();
    assert_eq!(running.end(), Some(0));
    assert!(rows(&run).is_empty() && checkpoints(&run).is_empty(), "reinforcement ended before it began");
}

/// Settings with which generation is far ahead of the trainer, which therefore always works.
const NEVER_IDLE: [&str; 5] = [
    "train.steps=1000000",
    "train.target_reward=9",
    "flow.max_staleness=1000000",
    "flow.edge_items=100000",
    "flow.edge_tokens=1000000000",
];

/// Law F5. So many prompts are under way that finishing them would take minutes.
#[test]
fn ctrl_c_twice_stops_with_the_last_step_saved_and_exits_with_1() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let sets = [&NEVER_IDLE[..], &["checkpoint.every=0"]].concat();
    let mut running = Running::start(&run_args(GRPO, &run, &sets));
    let metrics = run.join("metrics.jsonl");
    running.until("it trained", |_| read(&metrics).lines().count() >= 2);
    running.interrupt();
    running.line(|line| line.contains("interrupted: finishing").then_some(()));
    running.interrupt();
    running.line(|line| line.contains("interrupted again: stopping").then_some(()));
    assert_eq!(running.end(), Some(1));
    assert_eq!(checkpoints(&run).len(), 1, "law C1");
    assert!(read(&run.join("report.html")).contains("was stopped after"));
}

/// Law C1. The log waits for a reader of the console, so the rows of the trainer's last steps are lost when the
/// reward fails.
#[test]
fn a_run_that_another_stage_ends_keeps_the_last_step_of_its_trainer() {
    let folder = tempfile::tempdir().unwrap();
    let (run, file, now) = (folder.path().join("run"), folder.path().join("my_reward.py"), folder.path().join("now"));
    fs::write(&file, format!("import os\n\ndef reward(completion):\n    return 1 / (not os.path.exists({now:?}))\n")).unwrap();
    let reward = format!("reward={{kind=\"python\",file={file:?},retries=0,on_failure=\"fail\"}}");
    let sets = [&NEVER_IDLE[..], &["checkpoint.every=0", "filter=[]", "observe.log_every=1", &reward]].concat();
    let mut running = Running::start_unread(&run_args(GRPO, &run, &sets), 8 << 10);
    // The trainer takes many steps in the two seconds in which no row comes.
    let (mut logged, mut polls) = (0, 0);
    running.until("its log waits", |_| {
        let before = std::mem::replace(&mut logged, rows(&run).len());
        polls = if logged > before { 0 } else { polls + 1 };
        logged > 9 && polls > 100
    });
    fs::write(&now, "").unwrap();
    running.until("its trainer stopped", |_| fs::read_dir(run.join("checkpoints")).is_ok_and(|mut saved| saved.next().is_some()));
    assert!(checkpoints(&run).is_empty(), "its rows are missing");
    running.read_on();
    running.line(|line| line.contains("ZeroDivisionError").then_some(()));
    assert_eq!(running.end(), Some(1));
    let (logged, saved) = (rows(&run).len() as u64, checkpoints(&run));
    assert!(saved.len() == 1 && saved[0] > logged, "{saved:?} after row {logged}");
}

#[test]
fn truncated_completions_are_not_trained_if_the_recipe_says_so_and_a_group_of_them_alone_is_dropped() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let sets = ["train.mask_truncated=true", "generate.max_new_tokens=2", "observe.rollouts_every=1"];
    rollflow(&run_args(GRPO, &run, &sets)).ok();
    let rollouts = rollouts(&run);
    let trains = |rollout: &Rollout| rollout.loss_mask.as_ref().is_none_or(|mask| mask.iter().any(|weight| *weight > 0.0));
    assert!(rollouts.iter().all(|rollout| trains(rollout) == (rollout.status == Status::Completed)));
    let (complete, truncated): (Vec<_>, Vec<_>) = rollouts.iter().partition(|rollout| trains(rollout));
    assert!(!truncated.is_empty() && truncated.iter().all(|rollout| complete.iter().any(|of| of.group == rollout.group)));
}

#[test]
fn parts_of_a_reward_are_logged_apart() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let parts = r#"reward={kind="parts",part=[{name="right",kind="math"},{name="brief",kind="length",max=9,weight=0.5}]}"#;
    rollflow(&run_args(GRPO, &run, &[parts, "observe.rollouts_every=1", "filter=[]"])).ok();
    for row in rows(&run) {
        let of = |key: &str| row[key].as_f64().unwrap();
        assert!((of("reward_mean") - of("reward_part_right") - 0.5 * of("reward_part_brief")).abs() < 1e-9, "{row}");
    }
    let rollouts = rollouts(&run);
    assert!(rollouts.iter().all(|rollout| {
        let expected = rollout.reward_parts["right"] + 0.5 * rollout.reward_parts["brief"];
        rollout.reward == Some(expected)
    }));
    assert!(rollouts.iter().all(|rollout| rollout.reward_parts["brief"] == 1.0), "no answer is longer than 4 tokens");
}

#[test]
fn a_constant_baseline_is_what_rewards_are_compared_with() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let advantage = ["train.advantage.kind=constant", "train.advantage.baseline=0.25"];
    let sets = [&advantage[..], &["generate.group_size=1", "observe.rollouts_every=1"]].concat();
    rollflow(&run_args(GRPO, &run, &sets)).ok();
    let rollouts = rollouts(&run);
    assert_eq!(rollouts.len(), 3 * 4, "three steps of four lone samples");
    assert!(rollouts.iter().all(|rollout| rollout.advantage == rollout.reward.map(|reward| reward - 0.25)), "R014");
    assert!(rows(&run).iter().all(|row| row["grad_norm"].as_f64().unwrap() > 0.0), "a lone sample teaches something");
}

#[test]
fn rewards_are_compared_as_the_recipe_says() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let sets = ["train.advantage.kind=leave_one_out", "filter=[]", "train.steps=1", "observe.rollouts_every=1"];
    rollflow(&run_args(GRPO, &run, &sets)).ok();
    let rollouts = rollouts(&run);
    assert!(rollouts.iter().any(|rollout| rollout.advantage != Some(0.0)), "some earn more than others");
    for rollout in &rollouts {
        let group: Vec<f64> =
            rollouts.iter().filter(|other| other.group == rollout.group).map(|other| other.reward.unwrap()).collect();
        let (own, others) = (rollout.reward.unwrap(), (group.len() - 1) as f64);
        assert!(others >= 1.0, "a group has siblings");
        let expected = own - (group.iter().sum::<f64>() - own) / others;
        assert!((rollout.advantage.unwrap() - expected).abs() < 1e-12, "{rollout:?}");
    }
}
