//! `dpo`: preference training on a data set of pairs, and runs whose length is given in epochs.

use std::fs;
use std::path::Path;

use rollflow::algo::PairLoss;
use serde_json::{Value, json};

use crate::running::{Ended, TINY_MODEL, json_lines, plain_run_args, rollflow, rows, with_sets};

const PAIRS: &str = "pipelines/recipes/dpo_pairs.toml";

fn run(out: &Path, sets: &[&str]) -> Ended {
    rollflow(&plain_run_args(PAIRS, out, sets))
}

/// The shipped recipe: at the reference itself the loss is log 2 and no pair is told apart; what is learned holds for pairs that were held out.
#[test]
fn a_policy_learns_to_prefer_what_was_chosen_and_so_do_held_out_pairs_show() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("run");
    run(&out, &["train.epochs=6"]).ok();
    let trained = rows(&out);
    assert_eq!(trained.len(), 102, "6 epochs of 540 pairs, 32 a step");
    assert!((trained[0]["loss"].as_f64().unwrap() - 2f64.ln()).abs() < 1e-4, "{}", trained[0]);
    let evaluated = json_lines(&out.join("evaluations.jsonl"));
    let (first, last) = (&evaluated[0], &evaluated[evaluated.len() - 1]);
    assert_eq!((first["eval_step"].as_f64(), last["eval_step"].as_f64()), (Some(0.0), Some(102.0)), "{evaluated:?}");
    assert!((first["eval_loss"].as_f64().unwrap() - 2f64.ln()).abs() < 1e-6, "{first}");
    let accuracy = last["eval_pair_accuracy_ratio"].as_f64().unwrap();
    // Of 60 held-out pairs; a policy that learned nothing is above 0.7 once in a thousand runs. Rounding differs between processors.
    assert!(accuracy > 0.7 && last["eval_pair_margin_mean"].as_f64().unwrap() > 0.5, "{last}");
    assert!(last["eval_loss"].as_f64().unwrap() < 0.5, "{last}");
}

/// Law C2: a run that goes on ends as one that was never interrupted, evaluations included.
#[test]
fn c2_preference_training_goes_on_where_it_was() {
    let folder = tempfile::tempdir().unwrap();
    let (whole, parts) = (folder.path().join("whole"), folder.path().join("parts"));
    let constant = ["batch.groups=16", "train.schedule={kind=\"constant\"}", "checkpoint.every=3", "eval.every=3"];
    let start = |out: &Path, steps: &str| {
        run(out, &[TINY_MODEL, &constant, &[steps]].concat()).ok();
    };
    start(&whole, "train.steps=9");
    start(&parts, "train.steps=3");
    rollflow(&["resume", parts.to_str().unwrap(), "--set", "train.steps=9"]).ok();
    let model = |run: &Path| fs::read(run.join("checkpoints/step_000009/model.safetensors")).unwrap();
    assert!(model(&whole) == model(&parts), "the same weights to the bit");
    let judged = |run: &Path| -> Vec<[Value; 3]> {
        let keys = ["eval_step", "eval_pair_margin_mean", "eval_loss"];
        json_lines(&run.join("evaluations.jsonl")).iter().map(|row| keys.map(|key| row[key].clone())).collect()
    };
    assert_eq!((judged(&whole).len(), judged(&whole)), (4, judged(&parts)));
}

/// TRL's formats: prompts that are given or implicit, text or messages.
#[test]
fn pairs_are_read_in_all_formats_and_every_loss_of_pairs_trains_on_them() {
    let folder = tempfile::tempdir().unwrap();
    let user = json!({"role": "user", "content": "1+1="});
    let said = |text: &str| json!({"role": "assistant", "content": text});
    let records = [
        json!({"prompt": "1+1=", "chosen": "2", "rejected": "3"}),
        json!({"chosen": "1+1= 2", "rejected": "1+1= 3"}),
        json!({"prompt": [user], "chosen": [said("2")], "rejected": [said("3")]}),
        json!({"chosen": [user, said("2")], "rejected": [user, said("3")]}),
    ];
    let data = folder.path().join("pairs.jsonl");
    fs::write(&data, records.map(|record| format!("{record}\n")).concat()).unwrap();
    let task = format!("task={{data={:?}}}", data.to_str().unwrap());
    for pair_loss in PairLoss::ALL.iter().map(|loss| loss.word()) {
        let out = folder.path().join(pair_loss);
        let loss = format!("train.loss={{kind=\"dpo\",pair_loss=\"{pair_loss}\",label_smoothing=0.1}}");
        let eval = format!("eval={{every=1,task={{data={:?}}}}}", data.to_str().unwrap());
        let sets =
            [task.as_str(), &loss, &eval, "chat.template=plain", "chat.ask=as_written", "train.epochs=0.5", "batch.groups=4"];
        let ended = run(&out, &[TINY_MODEL, &sets, &["train.schedule.warmup=0"]].concat());
        assert_eq!(ended.code, Some(0), "{pair_loss}: {}", ended.err);
        assert!(ended.out.contains("Data: pairs: 4 records"), "{}", ended.out);
        assert_eq!(json_lines(&out.join("evaluations.jsonl")).len(), 2, "{pair_loss}: before the only step and after it");
    }
}

#[test]
fn references_by_data_set_score_held_out_pairs_too() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    for name in ["low.jsonl", "high.jsonl", "other.jsonl"] {
        fs::write(path(name), "{\"prompt\": \"1+1=\", \"chosen\": \"2\", \"rejected\": \"3\"}\n").unwrap();
    }
    let task = format!("task={{kind=\"data\", sources=[{{data={:?}}}, {{data={:?}}}]}}", path("low.jsonl"), path("high.jsonl"));
    let reference =
        "reference={kind=\"by_source\", part=[{kind=\"frozen\", sources=[\"low\"]}, {kind=\"frozen\", sources=[\"high\"]}]}";
    let sets = [task.as_str(), reference, "train.epochs=1", "batch.groups=2", "train.schedule.warmup=0"];
    let out = folder.path().join("run");
    run(&out, &[TINY_MODEL, &sets, &["eval={every=1}"]].concat()).ok();
    let evaluated = json_lines(&out.join("evaluations.jsonl"));
    assert!((evaluated[0]["eval_loss"].as_f64().unwrap() - 2f64.ln()).abs() < 1e-6, "{evaluated:?}");
    let other = format!("eval={{every=1, task={{data={:?}}}}}", path("other.jsonl"));
    let cases = [
        (other.as_str(), "name other, or add a part without sources"),
        ("eval={every=1, task={kind=\"arithmetic\"}}", "help: add a part without sources"),
    ];
    for (eval, advice) in cases {
        let refused = run(&folder.path().join("refused"), &[TINY_MODEL, &sets, &[eval]].concat());
        assert!(refused.code == Some(2) && refused.err.contains(advice), "{}", refused.err);
    }
    let named = reference.replace("[\"high\"]", "[\"high\", \"other\"]");
    let sets = sets.map(|set| if set == reference { named.as_str() } else { set });
    run(&folder.path().join("named"), &[TINY_MODEL, &sets, &[&other]].concat()).ok();
}

#[test]
fn what_means_nothing_to_pairs_of_a_data_set_is_refused() {
    let sets = ["eval.samples=2", "train.target_reward=1", "reference.kind=ema", "train.minibatches=2", "generate.temperature=1"];
    let refused = rollflow(&with_sets(&["check", PAIRS], &sets));
    assert_eq!(refused.code, Some(2));
    for part in [
        "`eval.samples` means nothing to pipeline = \"dpo\"",
        "have no rewards",
        "publishes none",
        "pairs are laid out over a whole batch",
        "[generate] means nothing",
    ] {
        assert!(refused.err.contains(part), "{part}: {}", refused.err);
    }
}

/// A recipe may leave the loss and the reference out.
#[test]
fn check_derives_loss_reference_rate_and_steps_and_says_why() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = folder.path().join("mine.toml");
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/models/qwen2_tied");
    let data = concat!(env!("CARGO_MANIFEST_DIR"), "/data/preferences_addition.jsonl");
    let text = format!("pipeline = 'dpo'\nmodel.path = '{model}'\ntask.data = '{data}'\ntrain.epochs = 2\nlora.rank = 4\n");
    fs::write(&recipe, text).unwrap();
    let checked = rollflow(&["check", recipe.to_str().unwrap()]).ok();
    for part in [
        "train.loss.kind = \"dpo\": pipeline = \"dpo\"",
        "reference.kind = \"frozen\": ",
        "train.lr = 1e-5: a Hugging Face model, adapters",
        "train.steps = 38: train.epochs = 2.0 of 600 pairs, 32 a step",
        "chat.ask = \"as_written\": the model has no chat template",
    ] {
        assert!(checked.out.contains(part), "{part}: {}", checked.out);
    }
}

/// A run's own recipe holds the steps, and the schedule follows them.
#[test]
fn epochs_become_steps_for_every_pipeline_and_stay_the_same_when_the_run_goes_on() {
    let steps = |recipe: &str, sets: &[&str]| -> String {
        let checked = rollflow(&with_sets(&["check", recipe, "--json"], sets));
        assert_eq!(checked.code, Some(0), "{recipe}: {}{}", checked.out, checked.err);
        let checked: Value = serde_json::from_str(&checked.out).unwrap();
        let derived = checked["derived"].as_array().unwrap().iter();
        let found = derived.filter(|one| one["key"].as_str().unwrap().ends_with(".steps"));
        found
            .map(|one| format!("{}={}", one["key"].as_str().unwrap(), one["value"].as_str().unwrap()))
            .collect::<Vec<_>>()
            .join(" ")
    };
    let of = |name: &str| format!("pipelines/recipes/{name}.toml");
    assert_eq!(steps(&of("grpo"), &["train.epochs=3", "sft.epochs=1.5"]), "sft.steps=3 train.steps=10");
    assert_eq!(steps(&of("sft"), &["sft.epochs=2", "sft.schedule.warmup=0"]), "sft.steps=4");
    assert_eq!(steps(&of("text"), &["sft.epochs=1"]), "sft.steps=17", "rows of packed samples");
    assert_eq!(steps(&of("reward_model"), &["reward_model.epochs=1"]), "reward_model.steps=90");
    assert_eq!(steps(&of("grpo_offline"), &["train.epochs=1", "filter=[]", "train.schedule.warmup=0"]), "train.steps=7");
    assert_eq!(steps(&of("dpo_pairs"), &[]), "train.steps=169");
    assert_eq!(steps(&of("dpo_pairs"), &["train.steps=6"]), "", "what is laid over the file wins");

    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("run");
    run(&out, &[TINY_MODEL, &["batch.groups=16", "train.epochs=0.1", "eval.every=0", "train.schedule.warmup=0"]].concat()).ok();
    let written = fs::read_to_string(out.join("recipe.toml")).unwrap();
    assert!(written.contains("\nsteps = 4\n") && !written.contains("\nepochs"), "{written}");
    let recipe = folder.path().join("both.toml");
    fs::write(&recipe, format!("include = '{}/../{PAIRS}'\ntrain = {{ steps = 3, epochs = 1 }}\n", env!("CARGO_MANIFEST_DIR")))
        .unwrap();
    let refused = rollflow(&["check", recipe.to_str().unwrap()]);
    assert!(refused.err.contains("there are both `train.steps` and `train.epochs`"), "{}", refused.err);
    // A mixture by weights has no end.
    let pairs = r#"{"prompt": "1+1=", "completion": "2", "chosen": "2", "rejected": "3"}"#;
    let mixture = ["a", "b"].map(|name| {
        let file = folder.path().join(name).with_extension("jsonl");
        fs::write(&file, format!("{pairs}\n")).unwrap();
        format!("{{data={file:?}, weight=1}}")
    });
    let mixture = mixture.join(", ");
    let [task, sft] = ["task={kind=\"data\", sources=", "sft.sources="].map(|to| format!("{to}[{mixture}]"));
    for (recipe, section, data) in [(PAIRS, "train", task + "}"), (&of("sft"), "sft", sft)] {
        let sets = [format!("{section}.epochs=1"), data];
        let refused = rollflow(&with_sets(&["check", recipe], &sets));
        let said = format!("give repeats instead, or set {section}.steps");
        assert!(refused.code == Some(2) && refused.err.contains(&said), "{}{}", refused.out, refused.err);
    }
}
