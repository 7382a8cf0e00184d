//! `[[change]]` and `[[ramp]]`: a run that changes its mind does so in the step that it was told, and again when it is resumed (law C2).

use std::path::Path;

use serde_json::Value;

use crate::crashes::{run_killed, same_bytes};
use crate::running::{GRPO, TINY_MODEL, json_lines, plain_run_args, read, rollflow, rows, run_args};

/// GRPO, then DAPO with leave-one-out advantages and a correction, then GSPO without one; the temperature falls and an entropy bonus fades
/// meanwhile.
const CHANGES: [&str; 5] = [
    "filter=[{kind=\"nonzero_std\"}]",
    "train.lr=1e-3",
    "train.schedule.kind=constant",
    "change=[{at=5,set=[\"train.loss={ kind = 'dapo' }\",\"train.advantage={ kind = 'leave_one_out' }\",\
     \"train.correction={ kind = 'truncated_is' }\"]},{at=9,set=[\"train.loss={ kind = 'gspo' }\",\"train.correction={ kind = 'none' }\",\
     \"train.lr=1e-5\",\"train.ppo_epochs=2\",\"observe.rollouts_every=2\"]}]",
    "ramp=[{key=\"generate.temperature\",from=1.3,to=0.7,begin=2,end=12},{key=\"train.entropy_coef\",from=0.01,to=0.0,end=10}]",
];

fn run(out: &Path, sets: &[&str]) -> (Vec<Value>, String) {
    let ended = rollflow(&run_args(GRPO, out, &[&CHANGES[..], sets].concat())).ok();
    (rows(out), ended.out + &ended.err)
}

#[test]
fn a_step_is_learned_by_what_was_said_for_it() {
    let folder = tempfile::tempdir().unwrap();
    for staleness in ["0", "2"] {
        let bound = format!("flow.max_staleness={staleness}");
        let (rows, said) = run(&folder.path().join(staleness), &["train.steps=12", &bound]);
        let of = |step: usize, key: &str| rows[step - 1][key].as_f64();
        let column = |key: &str| (1..=12).map(|step| of(step, key)).collect::<Vec<_>>();
        assert_eq!(column("setting_changes"), [[None; 4], [Some(1.0); 4], [Some(2.0); 4]].concat());
        let weighed: Vec<bool> = column("correction_weight_mean").iter().map(Option::is_some).collect();
        assert_eq!(weighed, [[false; 4], [true; 4], [false; 4]].concat(), "only DAPO corrects");
        assert_eq!([4, 8, 9].map(|step| of(step, "learning_rate").unwrap()), [1e-3, 1e-3, 1e-5]);
        assert_eq!([1, 7, 12].map(|step| of(step, "setting_generate_temperature").unwrap()), [1.3, 1.0, 0.7]);
        assert_eq!([1, 10, 12].map(|step| of(step, "setting_train_entropy_coef").unwrap()), [0.01, 0.0, 0.0]);
        for step in [5, 9] {
            assert_eq!(said.matches(&format!("From step {step} on: train.loss=")).count(), 1, "{said}");
        }
        // Law N3: tokens are scored at the temperature that they were sampled at, whatever it is by now.
        if staleness == "0" {
            assert!((1..=12).all(|step| of(step, "log_prob_gap_max_nats").is_none_or(|gap| gap < 1e-3)), "{rows:?}");
        }
        let temperatures = read(&folder.path().join(staleness).join("rollouts.jsonl"));
        assert!(temperatures.contains("\"temperature\":1.3"), "rollouts say how they were sampled");
    }
}

#[test]
fn a_log_begins_and_gets_rarer_at_the_steps_that_were_said() {
    let folder = tempfile::tempdir().unwrap();
    let change = "change=[{at=5,set=[\"observe.rollouts_every=3\",\"observe.log_every=4\"]}]";
    let sets = ["train.steps=12", "observe.log_every=1", "observe.rollouts_every=0", "observe.progress=false", change];
    let ended = rollflow(&run_args(GRPO, folder.path(), &sets)).ok();
    let said = ended.out + &ended.err;
    let printed: Vec<u64> = (1..=12).filter(|step| said.contains(&format!("Step {step}: "))).collect();
    assert_eq!(printed, [1, 2, 3, 4, 8, 12], "{said}");
    let rollouts = json_lines(&folder.path().join("rollouts.jsonl"));
    let recorded: std::collections::BTreeSet<u64> = rollouts.iter().map(|of| of["step"].as_u64().unwrap()).collect();
    assert_eq!(recorded, [6, 9, 12].into());
    assert!(rollouts.iter().any(|of| of["trainer_log_probs"].is_array()), "{}", rollouts[0]);
}

#[test]
fn c2_a_run_that_changes_its_mind_ends_the_same_when_it_was_killed() {
    let folder = tempfile::tempdir().unwrap();
    let (whole, killed) = (folder.path().join("whole"), folder.path().join("killed"));
    let sets = ["train.steps=14", "flow.max_staleness=0", "checkpoint.every=1", "observe.rollouts_every=1"];
    run(&whole, &sets);
    assert!(run_killed(&killed, &[&CHANGES[..], &sets].concat(), 6, 3) >= 3);
    for file in ["metrics.jsonl", "rollouts.jsonl", "checkpoints/step_000014/model.safetensors"] {
        same_bytes(&whole.join(file), &killed.join(file));
    }
}

/// GRPO, then DAPO, then pairs, in one run; a frozen reference is there for all of them.
#[test]
fn c2_a_run_may_come_to_pairs_and_goes_on_with_them_when_it_was_killed() {
    let folder = tempfile::tempdir().unwrap();
    let (whole, killed) = (folder.path().join("whole"), folder.path().join("killed"));
    let change = "change=[{at=4,set=[\"train.loss={ kind = 'dapo' }\"]},\
                  {at=7,set=[\"train.loss={ kind = 'dpo', beta = 0.5 }\",\"pairs.select=best_worst\"]}]";
    let sets = ["train.steps=10", "train.lr=1e-3", "reference.kind=frozen", change, "checkpoint.every=1", "flow.max_staleness=0"];
    rollflow(&run_args(GRPO, &whole, &sets)).ok();
    let paired: Vec<bool> = rows(&whole).iter().map(|row| row["pair_accuracy_ratio"].is_number()).collect();
    assert_eq!(paired, [[false; 6].as_slice(), &[true; 4]].concat());
    assert!(rows(&whole).iter().all(|row| row["grad_norm"].as_f64().unwrap() > 0.0), "every step learns");
    assert!(run_killed(&killed, &sets, 4, 11) >= 2);
    for file in ["metrics.jsonl", "checkpoints/step_000010/model.safetensors"] {
        same_bytes(&whole.join(file), &killed.join(file));
    }
}

#[test]
fn a_change_that_cannot_be_made_is_an_error_of_the_recipe() {
    for (set, said) in [
        ("change=[{at=5,set=[\"batch.groups=9\"]}]", "`batch.groups` is the same in all steps"),
        ("change=[{at=5,set=[\"train.loss={ kind = 'dapoo' }\"]}]", "did you mean \"dapo\"?"),
        ("ramp=[{key=\"train.entropy_coef\",from=0.1,to=0.0,begin=7,end=7}]", "not after its begin 7"),
    ] {
        let refused = rollflow(&["check", GRPO, "--set", set]);
        assert_eq!(refused.code, Some(2), "{set}");
        assert!(refused.err.contains(said), "{set}: {}", refused.err);
    }
}

/// Supervised runs change and ramp what they are learned by, too, and pairs that are held out are judged meanwhile.
#[test]
fn supervised_runs_change_their_rates_and_a_reward_model_is_evaluated_on_held_out_pairs() {
    let folder = tempfile::tempdir().unwrap();
    let run = |recipe: &str, name: &str, sets: &[&str]| -> Vec<Value> {
        let out = folder.path().join(name);
        rollflow(&plain_run_args(recipe, &out, &[TINY_MODEL, sets].concat())).ok();
        rows(&out)
    };
    let rates = |rows: &[Value]| rows.iter().map(|row| row["learning_rate"].as_f64().unwrap()).collect::<Vec<_>>();
    let change = ["sft.steps=4", "sft.schedule={kind=\"constant\"}", "change=[{at=3,set=[\"sft.lr=1e-4\"]}]"];
    let found = run("pipelines/recipes/sft.toml", "sft", &change);
    assert_eq!(rates(&found), [1e-3, 1e-3, 1e-4, 1e-4]);
    assert_eq!(found[3]["setting_changes"], 1.0);
    let judged = [
        "reward_model.steps=4",
        "reward_model.schedule={kind=\"constant\"}",
        "ramp=[{key=\"reward_model.lr\",from=1e-3,to=4e-3,end=4}]",
        "eval={every=2,limit=32}",
    ];
    let found = run("pipelines/recipes/reward_model.toml", "reward_model", &judged);
    assert!(rates(&found).iter().zip([1e-3, 2e-3, 3e-3, 4e-3]).all(|(found, said)| (found - said).abs() < 1e-9), "{found:?}");
    let evaluated = json_lines(&folder.path().join("reward_model/evaluations.jsonl"));
    let judged = |row: &Value| row["eval_pair_accuracy_ratio"].is_number() && row["eval_loss"].is_number();
    assert!(evaluated.iter().all(judged), "{evaluated:?}");
    assert!(evaluated.iter().map(|row| row["eval_step"].as_f64().unwrap()).eq([0.0, 2.0, 4.0]), "{evaluated:?}");
    let sets = ["--set", "change=[{at=3,set=[\"train.lr=1\"]}]"];
    let refused = rollflow(&[&["check", "pipelines/recipes/sft.toml"][..], &sets].concat());
    assert!(refused.err.contains("these may change: sft.lr, sft.schedule"), "{}", refused.err);
}
