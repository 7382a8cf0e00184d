//! `diagnose` on recorded runs: 20 that are sick on purpose, each in one way, and 4 healthy ones.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::offline::OFFLINE;
use crate::running::{Ended, GRPO, Running, SFT, plain_run_args, read, rollflow, run_args};

/// A model that learns addition within 60 steps: the reward rises from 0.3 to 0.5.
// Threads: sums of a step are rounded alike wherever it runs, and the run with them.
const LEARNS: [&str; 15] = [
    "train.threads=1",
    "sft.threads=1",
    "model.hidden=64",
    "model.layers=2",
    "model.intermediate=128",
    "sft.steps=100",
    "sft.batch=32",
    "sft.lr=3e-3",
    "batch.groups=16",
    "generate.group_size=8",
    "generate.max_num_seqs=128",
    "train.target_reward=1.0",
    "train.lr=1e-3",
    "reward={kind=\"exact\",require_end_of_text=true}",
    "observe.rollouts_every=1",
];

/// A smaller model that has seen some sums.
const SMALL: [&str; 8] = [
    "sft.steps=100",
    "sft.batch=32",
    "sft.lr=1e-2",
    "batch.groups=8",
    "generate.group_size=8",
    "generate.max_num_seqs=128",
    "train.target_reward=20.0",
    "observe.rollouts_every=1",
];

const STEADY: &str = "train.schedule={kind=\"constant\"}";
const VARIED: &str = "filter=[{kind=\"nonzero_std\"}]";

fn diagnose(run: &Path, args: &[&str]) -> Ended {
    rollflow(&[&["diagnose", run.to_str().unwrap()], args].concat())
}

/// Records a run with `base` and `sets` in `folder`.
fn recorded(folder: &Path, base: &[&str], sets: &[&str]) -> PathBuf {
    let run = folder.join("run");
    let ended = rollflow(&run_args(GRPO, &run, &[base, sets].concat()));
    assert!(ended.code.is_some_and(|code| code < 2), "{}", ended.err);
    run
}

/// The checks that find something in a run.
fn found(run: &Path) -> Vec<String> {
    let ended = diagnose(run, &["--json"]);
    let json: Value = serde_json::from_str(&ended.out).unwrap_or_else(|_| panic!("{}{}", ended.out, ended.err));
    let findings: Vec<String> =
        json["findings"].as_array().unwrap().iter().map(|of| of["check"].as_str().unwrap().to_owned()).collect();
    assert_eq!(ended.code, Some(i32::from(!findings.is_empty())), "{}", ended.out);
    findings
}

/// Holds a sick run to findings that it must have; what else is found in it follows from the same
/// fault. What a sick run does hangs on rounding, which is the processor's: one of four seeds has to show it.
fn assert_found(expected: &[&str], base: &[&str], sets: &[&str]) {
    let mut all = Vec::new();
    for seed in ["seed=0", "seed=1", "seed=2", "seed=3"] {
        let folder = tempfile::tempdir().unwrap();
        let found = found(&recorded(folder.path(), base, &[sets, &[seed]].concat()));
        if expected.iter().all(|check| found.iter().any(|of| of == check)) {
            return;
        }
        all.push(found);
    }
    panic!("{expected:?} of {all:?} with {sets:?}");
}

#[test]
fn runs_that_learn_have_no_finding() {
    let healthy: [&[&str]; 4] = [
        &["train.steps=60"],
        &["train.steps=60", "flow.max_staleness=1", VARIED],
        &["train.steps=60", "train.loss.kind=dapo", "seed=1"],
        // The task is solved: equal rewards and low entropy are no fault.
        &["train.steps=60", "reward={kind=\"regex\",pattern=\"^1\",require_end_of_text=true}", "train.target_reward=0.99"],
    ];
    for sets in healthy {
        let folder = tempfile::tempdir().unwrap();
        let run = recorded(folder.path(), &LEARNS, sets);
        let ended = diagnose(&run, &[]);
        assert!(ended.code == Some(0) && ended.out.ends_with("\nfindings: none\n"), "{sets:?}: {}", ended.out);
    }
}

/// Recorded completions earn the same at each step, however well the policy learns from them.
#[test]
fn rewards_that_were_recorded_before_the_run_have_no_finding() {
    let folder = tempfile::tempdir().unwrap();
    let row = |step: u32| {
        let entropy = 2.0 * (-0.1 * f64::from(step)).exp();
        format!("{{\"step\":{step},\"reward_min\":0.0,\"reward_max\":1.0,\"reward_mean\":0.5,\"entropy_nats\":{entropy}}}\n")
    };
    fs::write(folder.path().join("metrics.jsonl"), (1..=60).map(row).collect::<String>()).unwrap();
    fs::write(folder.path().join("run.json"), "{\"state\":\"finished\"}").unwrap();
    for (recipe, expected) in [(OFFLINE, &[][..]), (GRPO, &["reward_flat", "entropy_collapse"][..])] {
        let text = read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(recipe));
        fs::write(folder.path().join("recipe.toml"), text).unwrap();
        assert_eq!(found(folder.path()), expected, "{recipe}");
    }
}

/// The same graph in simulated time, on the times that the run recorded itself.
#[test]
fn a_run_is_told_what_other_settings_would_gain_unless_it_cannot_be_simulated() {
    let folder = tempfile::tempdir().unwrap();
    let run = recorded(folder.path(), &LEARNS, &["train.steps=30", "flow.max_staleness=0"]);
    let forecasts = || -> Value { serde_json::from_str::<Value>(&diagnose(&run, &["--json"]).out).unwrap()["forecasts"].take() };
    let told = forecasts();
    let sets: Vec<&str> = told["changed"].as_array().unwrap().iter().map(|of| of["set"].as_str().unwrap()).collect();
    assert_eq!(sets[0], "flow.max_staleness=1");
    assert!(sets.len() >= 4 && sets.contains(&"cluster.engines=2"), "{sets:?}");
    assert!(told["simulated"].as_f64().unwrap() > 0.0 && told["made"].as_f64().unwrap() > 0.0);
    // A synchronous run waits for its weights: overlapping them can only gain.
    let [staler, sooner] =
        [&told["changed"][0], &forecasts()["changed"][0]].map(|of| (of["gain"].as_f64().unwrap(), of["staleness"].clone()));
    assert!(staler.0 > 0.0 && staler.1 == 1, "{told}");
    assert_eq!(staler, sooner, "a forecast is the same each time");
    let page = diagnose(&run, &[]).out;
    assert!(page.contains("\nwhat other settings would gain\n  flow.max_staleness=1 "), "{page}");
    std::fs::remove_file(run.join("profile.json")).unwrap();
    assert!(forecasts().is_null() && diagnose(&run, &[]).out.contains("not known: only runs that sampled in their own process"));
}

#[test]
fn the_page_names_the_limit_the_tokens_and_each_finding_with_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let rare = "reward={kind=\"regex\",pattern=\"^17\"}";
    let run = recorded(folder.path(), &SMALL, &[rare, VARIED, "train.steps=10", "generate.group_size=4", "train.lr=1e-6"]);
    let ended = diagnose(&run, &[]);
    assert_eq!(ended.code, Some(1), "{}", ended.err);
    for part in [
        ": finished, 10 steps\n",
        "\n  stage     busy  starved  blocked  credit  weights\n",
        "\n  bottleneck: ",
        "\nwhere generated tokens went\n  trained ",
        "%  [[filter]], [curriculum], generate.group_size\n",
        "\n  tokens_wasted: ",
        "% of the tokens were filtered, above 80%\n    do: ",
        "\n    see: docs/how_to/reading_a_run.md#tokens_wasted\n",
    ] {
        assert!(ended.out.contains(part), "{part}: {}", ended.out);
    }
    assert_eq!(diagnose(folder.path(), &[]).code, Some(2), "there is no run");
}

#[test]
fn a_run_in_progress_is_diagnosed_without_stage_times() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let mut running = Running::start(&run_args(GRPO, &run, &["train.steps=1000000", "train.target_reward=9"]));
    running.until("it logs steps", |_| read(&run.join("metrics.jsonl")).lines().count() > 2);
    let ended = diagnose(&run, &[]);
    assert!(
        ended.out.contains(": running, ") && ended.out.contains("known when the run has ended"),
        "{}{}",
        ended.out,
        ended.err
    );
    running.interrupt();
    assert_eq!(running.end(), Some(0));
}

#[test]
fn a_run_whose_process_was_killed_has_the_stage_times_of_its_last_step() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let mut running = Running::start(&run_args(GRPO, &run, &["train.steps=1000000", "train.target_reward=9"]));
    running.until("it timed its stages", |_| read(&run.join("timings.jsonl")).contains("stage_train"));
    drop(running);
    let ended = diagnose(&run, &[]);
    for part in
        [": died, ", "  starved  blocked  credit  weights\n  prompts ", "\n  not known: its process ended without notice\n"]
    {
        assert!(ended.out.contains(part), "{part}: {}", ended.out);
    }
    let top = rollflow(&["top", run.to_str().unwrap(), "--once"]).ok().out;
    assert!(top.contains("prompts") && !top.contains("no times of stages yet"), "{top}");
}

#[test]
fn a_run_that_failed_is_found_with_its_error() {
    let folder = tempfile::tempdir().unwrap();
    let run = recorded(folder.path(), &LEARNS, &["train.steps=20", "train.lr=1e-1", "flow.max_staleness=1"]);
    assert_eq!(found(&run)[0], "failed");
    assert!(diagnose(&run, &[]).out.contains("generator and trainer disagree"));
}

#[test]
fn a_learning_rate_a_hundred_times_too_high_is_found() {
    assert_found(&["reward_flat", "no_spread"], &LEARNS, &["train.steps=60", "train.lr=1e-1"]);
}

#[test]
fn a_loss_that_is_not_finite_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let sets = ["sft.steps=20", "sft.lr=1e30", "sft.on_nonfinite=skip", "sft.max_grad_norm=1e9", "model.hidden=16"];
    rollflow(&plain_run_args(SFT, &run, &sets)).ok();
    assert_eq!(found(&run), ["not_finite"]);
    let advice = "do: lower sft.lr or sft.max_grad_norm";
    assert!(diagnose(&run, &[]).out.contains(advice), "keys of the section that trains");
}

#[test]
fn a_constant_reward_is_found() {
    let constant = "reward={kind=\"regex\",pattern=\".*\",require_end_of_text=false}";
    assert_found(&["reward_flat", "no_spread"], &SMALL, &[constant, "train.steps=60"]);
}

#[test]
fn a_temperature_that_leaves_groups_without_spread_is_found() {
    assert_found(&["no_spread"], &LEARNS, &["train.steps=20", "train.lr=1e-5", "generate.temperature=0.02"]);
}

#[test]
fn completions_that_the_length_limit_cuts_off_are_found() {
    assert_found(&["truncated_completions"], &LEARNS, &["train.steps=20", "generate.max_new_tokens=1"]);
}

#[test]
fn completions_that_nearly_repeat_each_other_are_found() {
    let sets = ["generate.max_new_tokens=120", "generate.ignore_eos=true", "generate.temperature=0.1", "train.lr=1e-4"];
    assert_found(&["near_duplicates"], &SMALL, &[&sets[..], &["train.steps=12"]].concat());
}

#[test]
fn lengths_that_grow_to_their_limit_are_found() {
    let part = |length: usize| format!("{{name=\"over_{length}\",kind=\"regex\",pattern=\"^.{{{length}}}\"}}");
    let longer = [2, 3, 5, 9].map(part).join(",");
    let reward = format!("reward={{kind=\"parts\",require_end_of_text=false,part=[{longer}]}}");
    assert_found(&["length_drift"], &SMALL, &["train.steps=60", "train.lr=1e-2", "generate.max_new_tokens=12", &reward]);
}

#[test]
fn a_part_of_the_reward_that_falls_while_another_rises_is_found() {
    let part = |name: &str, pattern: &str, weight: f64| {
        format!("{{name=\"{name}\",kind=\"regex\",pattern=\"{pattern}\",weight={weight:?}}}")
    };
    let reward = format!("reward={{kind=\"parts\",part=[{},{}]}}", part("long", "^..$", 1.0), part("short", "^.$", 0.4));
    assert_found(&["parts_diverge"], &SMALL, &["train.steps=60", "train.lr=1e-2", &reward]);
}

#[test]
fn staleness_at_a_loose_bound_is_found() {
    let slow_trainer = ["flow.max_staleness=4", "train.ppo_epochs=3", "train.lr=1e-4", "train.steps=40"];
    assert_found(&["staleness_at_bound"], &LEARNS, &slow_trainer);
}

#[test]
fn a_generator_that_the_trainer_waits_for_is_found() {
    let slow_generator = ["train.threads=1", "generate.max_num_seqs=1", "generate.max_new_tokens=32", "generate.ignore_eos=true"];
    assert_found(&["generator_limits"], &[], &[&slow_generator[..], &["flow.max_staleness=1", "train.steps=20"]].concat());
}

#[test]
fn entropy_that_collapses_before_the_task_is_solved_is_found() {
    assert_found(&["entropy_collapse", "reward_falls"], &LEARNS, &["train.steps=60", "train.entropy_coef=-1.0", STEADY]);
}

#[test]
fn a_reward_that_falls_after_it_rose_is_found() {
    assert_found(&["reward_falls"], &LEARNS, &["train.steps=60", STEADY, "change=[{at=40,set=[\"train.lr=0.1\"]}]"]);
}

#[test]
fn a_spike_of_the_gradient_is_found() {
    let spike = "change=[{at=30,set=[\"train.entropy_coef=30.0\"]},{at=31,set=[\"train.entropy_coef=0.0\"]}]";
    assert_found(&["gradient_spikes"], &LEARNS, &["train.steps=40", spike]);
}

#[test]
fn a_generator_that_samples_otherwise_than_the_trainer_computes_is_found() {
    let truncated = ["generate.top_k=3", "train.probe=false", "train.gap_warn=0.03", "train.gap_halt=50.0"];
    assert_found(&["gap_high"], &LEARNS, &[&truncated[..], &["train.steps=20"]].concat());
}

#[test]
fn a_gap_that_grows_is_found() {
    let faster = "change=[{at=25,set=[\"train.lr=3e-3\"]}]";
    let sets =
        ["train.steps=40", "train.lr=1e-4", STEADY, faster, "flow.max_staleness=1", "train.gap_warn=0.1", "train.gap_halt=100.0"];
    assert_found(&["gap_grows"], &LEARNS, &sets);
}

#[test]
fn ratios_that_are_clipped_often_are_found() {
    let narrow = "train.loss={kind=\"grpo\",epsilon=0.02,epsilon_high=0.02}";
    assert_found(&["clip_high"], &LEARNS, &["train.steps=12", "train.ppo_epochs=6", STEADY, narrow]);
}

#[test]
fn a_policy_that_leaves_its_reference_is_found() {
    let sets = ["train.steps=20", "train.lr=5e-3", "reference={kind=\"frozen\"}", "train.kl_loss={beta=0.0001}"];
    assert_found(&["kl_high"], &LEARNS, &sets);
}

#[test]
fn rewards_that_fail_are_found() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("rewards.py");
    fs::write(&file, "def reward(completion, answer):\n    return 1.0 / (not answer.startswith('1'))\n").unwrap();
    let reward = format!("reward={{kind=\"python\",file={file:?},function=\"reward\",retries=0}}");
    assert_found(&["groups_poisoned", "tokens_wasted"], &LEARNS, &["train.steps=10", "train.lr=1e-4", &reward]);
}
