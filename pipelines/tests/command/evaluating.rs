//! Evaluation, during a run and of its own: pinned to a version, in files that outlive it, and no hindrance to the run.

use std::fs;
use std::path::Path;

use rollflow::observe::Metric;
use serde_json::Value;

use crate::asking::tiny_run;
use crate::model_server::ModelServer;
use crate::model_serving::Server;
use crate::offline::OFFLINE;
use crate::running::{
    GRPO, SFT, TINY, TINY_MODEL, finished, json_lines, plain_run_args, read, rollflow, rows, run_args, with_sets,
};

const EVAL: &str = "eval={every=2,samples=4,limit=6,max_num_seqs=8}";
/// Of a run that several tests look at.
pub const EVALUATED: [&str; 2] = [EVAL, "observe.rollouts_every=1"];

/// Law V3, with evaluations.
#[test]
fn a_synchronous_run_evaluates_every_version_that_is_due_and_its_saved_recipe_repeats_its_numbers() {
    let folder = tempfile::tempdir().unwrap();
    let sets = [EVAL, "train.steps=5", "observe.rollouts_every=1", "train.lr=1e-2"];
    let (run, again) = (tiny_run(folder.path(), &sets), folder.path().join("again"));
    let evaluations = json_lines(&run.join("evaluations.jsonl"));
    let steps: Vec<u64> = evaluations.iter().map(|row| row["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, [0, 2, 4, 5], "before the first step, every second, and the last");
    for row in &evaluations {
        assert_eq!(row["eval_version"].as_f64().unwrap(), row["step"].as_f64().unwrap() + 1.0, "pinned: {row}");
        for name in ["eval_greedy_accuracy_ratio", "eval_accuracy_ratio", "eval_reward_mean", "eval_pass_at_2", "eval_pass_at_4"]
        {
            assert!(row[name].is_number(), "{name}: {row}");
        }
        assert!(row["eval_pass_at_1"].as_f64() <= row["eval_pass_at_4"].as_f64(), "{row}");
    }
    let metrics = rows(&run);
    let found: Vec<Option<u64>> =
        metrics.iter().map(|row| row.get("eval_step").map(|step| step.as_f64().unwrap() as u64)).collect();
    assert_eq!(found, [Some(0), Some(2), None, Some(4), Some(5)], "in the row of its own step");
    let answers = json_lines(&run.join("evaluations/step_000004.jsonl"));
    assert_eq!(answers.len(), 6 * (4 + 1));
    assert!(answers.iter().all(|answer| answer["version"] == 5 && answer["reward"].is_number()));

    let recipe = run.join("recipe.toml");
    assert_eq!(rollflow(&["run", recipe.to_str().unwrap(), "--out", again.to_str().unwrap()]).code, Some(0));
    assert!(metrics.iter().any(|row| row["grad_norm"].as_f64().unwrap() > 0.0), "something was learned from");
    let weights = "checkpoints/step_000005/model.safetensors";
    for file in ["metrics.jsonl", "evaluations.jsonl", "rollouts.jsonl", "recipe.toml", weights] {
        assert_eq!(fs::read(run.join(file)).unwrap(), fs::read(again.join(file)).unwrap(), "law V3: {file} is the same");
    }
}

/// Laws V2 and V4 over vLLM's protocol: each evaluation uses the version that is due and verified.
#[test]
fn a_run_with_vllm_servers_samples_and_evaluates_with_verified_versions() {
    let (folder, server) = (tempfile::tempdir().unwrap(), ModelServer::new());
    let run = folder.path().join("run");
    let engine = format!("engine={{kind=\"vllm\",urls=[{:?}]}}", server.url);
    let sets = [EVAL, &engine, "train.steps=3", "flow.max_staleness=1", "sft.steps=20"];
    rollflow(&run_args(GRPO, &run, &sets)).ok();
    let evaluations = json_lines(&run.join("evaluations.jsonl"));
    let pinned: Vec<[u64; 2]> =
        evaluations.iter().map(|row| ["eval_step", "eval_version"].map(|key| row[key].as_f64().unwrap() as u64)).collect();
    assert_eq!(pinned, [[0, 1], [2, 3], [3, 4]], "before the first step, every second, and the last");
    let mut greedy: Vec<String> =
        server.asked().into_iter().filter(|asked| asked.temperature == 0.0).map(|asked| asked.label).collect();
    assert_eq!(greedy.len(), 3 * 6);
    greedy.dedup();
    assert_eq!(greedy, ["1", "3", "4"]);
}

/// Laws V2 and V4: the servers of a run answer its evaluations, by the version that is due and verified, and `eval` asks them of its own.
#[test]
fn a_run_with_servers_is_evaluated_by_them_and_so_is_its_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let (run, base) = (folder.path().join("run"), folder.path().join("base"));
    finished(&base, &[]);
    let server = Server::start(&base, &[]);
    let completed = || server.metric(Metric::ServedSamples, &[("status", "completed")]);
    let engine = format!("engine={{kind=\"rollflow\",urls=[{:?}]}}", server.url);
    let sets = [EVAL, &engine, "train.steps=5", "flow.max_staleness=1", "sft.steps=20"];
    rollflow(&run_args(GRPO, &run, &sets)).ok();
    let evaluations = json_lines(&run.join("evaluations.jsonl"));
    let pinned: Vec<[u64; 2]> =
        evaluations.iter().map(|row| ["eval_step", "eval_version"].map(|key| row[key].as_f64().unwrap() as u64)).collect();
    assert_eq!(pinned, [[0, 1], [2, 3], [4, 5], [5, 6]], "before the first step, every second, and the last");
    let answers = json_lines(&run.join("evaluations/step_000005.jsonl"));
    assert!(answers.len() == 6 * 5 && answers.iter().all(|answer| answer["version"] == 6), "{answers:?}");

    let evaluate = |name: &str, sets: &[&str]| {
        let out = folder.path().join(name);
        rollflow(&with_sets(&["eval", run.to_str().unwrap(), "--out", out.to_str().unwrap()], sets)).ok();
        json_lines(&out.join("answers.jsonl"))
    };
    let before = completed();
    let served = evaluate("served", &[]);
    assert!(completed() > before);
    let greedy = |rows: &[Value]| {
        let mut said: Vec<(u64, String)> = rows
            .iter()
            .filter(|row| row["greedy"] == true)
            .map(|row| (row["question"].as_u64().unwrap(), row["response"].to_string()))
            .collect();
        said.sort();
        said
    };
    assert_eq!(greedy(&served), greedy(&answers), "the run's last weights, and its newest checkpoint's");
    let before = completed();
    let here = evaluate("here", &["engine={kind=\"local\"}"]);
    assert!(completed() == before && greedy(&here) == greedy(&served));
}

#[test]
fn a_run_that_evaluates_learns_what_it_would_learn_without() {
    let folder = tempfile::tempdir().unwrap();
    let (with, without) = (tiny_run(folder.path(), &EVALUATED), folder.path().join("without"));
    finished(&without, &[]);
    let weights = |run: &Path| fs::read(run.join("checkpoints/step_000003/model.safetensors")).unwrap();
    assert_eq!(weights(&with), weights(&without));
}

/// What is learned by imitation, or from what was recorded, is asked as well, and learns the same for it.
#[test]
fn runs_without_a_generator_are_evaluated_too() {
    let folder = tempfile::tempdir().unwrap();
    let supervised = [
        "sft.steps=5",
        "sft.batch=4",
        "sft.schedule.warmup=0",
        "generate.max_new_tokens=4",
        "eval={every=2,samples=2,limit=6,max_num_seqs=8}",
    ];
    let recorded = [
        "batch.groups=2",
        "train.steps=5",
        "train.schedule.warmup=0",
        "generate.max_new_tokens=4",
        "eval={every=2,samples=2,limit=6,max_num_seqs=8,task={kind=\"arithmetic\",digits=1}}",
    ];
    for (recipe, sets) in [(SFT, supervised), (OFFLINE, recorded)] {
        let run = |name: &str, sets: &[&str]| {
            let out = folder.path().join(name);
            rollflow(&plain_run_args(recipe, &out, &[TINY_MODEL, sets].concat())).ok();
            out
        };
        let name = |what| format!("{what}-{}", recipe.rsplit('/').next().unwrap());
        let (with, without) = (run(&name("with"), &sets), run(&name("without"), &sets[..3]));
        let steps: Vec<_> = json_lines(&with.join("evaluations.jsonl")).iter().map(|row| row["step"].as_u64().unwrap()).collect();
        assert_eq!(steps, [0, 2, 4, 5], "{recipe}");
        let found: Vec<_> = rows(&with).iter().map(|row| row["eval_step"].as_f64()).collect();
        assert_eq!(found, [Some(0.0), Some(2.0), None, Some(4.0), Some(5.0)], "{recipe}: in the row of its own step");
        let weights = |run: &Path| fs::read(run.join("checkpoints/step_000005/model.safetensors")).unwrap();
        assert_eq!(weights(&with), weights(&without), "{recipe}");
    }
}

/// Evaluations of a run that is not synchronous end when they end; the last one is waited for.
#[test]
fn an_overlapped_run_ends_with_its_last_evaluation_in_its_last_row() {
    let folder = tempfile::tempdir().unwrap();
    let run = tiny_run(folder.path(), &[EVAL, "flow.max_staleness=1", "train.steps=6"]);
    let last = rows(&run).pop().unwrap();
    assert_eq!((last["step"].as_u64(), last["eval_step"].as_f64()), (Some(6), Some(6.0)), "{last}");
    assert_eq!(json_lines(&run.join("evaluations.jsonl")).pop().unwrap()["step"], 6);
}

#[test]
fn a_run_of_servers_is_evaluated_here_with_the_number_of_sequences_of_one_process() {
    let folder = tempfile::tempdir().unwrap();
    let run = tiny_run(folder.path(), &EVALUATED);
    let recipe = read(&run.join("recipe.toml"));
    let served = recipe
        .replace("[engine]\nkind = \"local\"\nurls = []", "[engine]\nkind = \"rollflow\"\nurls = [\"http://127.0.0.1:9\"]")
        .replace("max_num_seqs = 8\n", "max_num_seqs = 512\n");
    assert!(served.contains("http://127.0.0.1:9") && served.contains("max_num_seqs = 512"), "{served}");
    fs::write(run.join("recipe.toml"), served).unwrap();
    let asked = |name: &str, more: &[&str]| {
        let out = folder.path().join(name);
        let sets = [&["engine={kind=\"local\"}"], more].concat();
        rollflow(&with_sets(&["eval", run.to_str().unwrap(), "--out", out.to_str().unwrap()], &sets)).ok();
        serde_json::from_str::<Value>(&read(&out.join("evaluation.json"))).unwrap()["asked"]["eval.max_num_seqs"].clone()
    };
    assert_eq!(asked("here", &[]), "64");
    assert_eq!(asked("wide", &["eval.max_num_seqs=16"]), "16");
}

#[test]
fn an_interrupted_evaluation_asks_only_what_is_missing() {
    let folder = tempfile::tempdir().unwrap();
    let (run, out) = (tiny_run(folder.path(), &EVALUATED), folder.path().join("eval"));
    let args = ["eval", run.to_str().unwrap(), "--out", out.to_str().unwrap(), "--json"];
    let first = rollflow(&args).ok();
    let report: Value = serde_json::from_str(&first.out).unwrap();
    assert!(report["metrics"]["eval_pass_at_4"].is_number(), "{report}");
    // Cut within a group, and within a line.
    let whole = read(&out.join("answers.jsonl"));
    let kept: Vec<&str> = whole.lines().take(13).collect();
    fs::write(out.join("answers.jsonl"), format!("{}\n{{\"vers", kept.join("\n"))).unwrap();
    let again = rollflow(&args);
    assert_eq!((again.code, &again.out), (Some(0), &first.out), "{}", again.err);
    let sorted = |text: &str| {
        let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
        lines.sort();
        lines
    };
    assert_eq!(sorted(&read(&out.join("answers.jsonl"))), sorted(&whole), "law N2: the same answers, none twice");
    // Another question is another evaluation.
    let other = rollflow(&[&args[..], &["--set", "eval.samples=2"]].concat());
    assert_eq!(other.code, Some(1));
    assert!(other.err.contains("something else"), "{}", other.err);
    // Another model is another evaluation, too.
    let out = folder.path().join("another");
    let stop = "generate.stop=[\"a\\n\\nb\"]";
    let of = |hidden: &str| {
        let sets = [&TINY[..], &[EVAL, stop, hidden]].concat();
        rollflow(&with_sets(&["eval", GRPO, "--out", out.to_str().unwrap()], &sets))
    };
    for _ in 0..2 {
        of("model.hidden=16").ok();
    }
    let other = of("model.hidden=32");
    assert!(other.code == Some(1) && other.err.contains("something else"), "{}", other.err);
}

#[test]
fn what_can_not_be_asked_or_judged_is_an_error_of_its_own() {
    let folder = tempfile::tempdir().unwrap();
    let task = folder.path().join("task.jsonl");
    let long = "1+".repeat(2000);
    fs::write(&task, format!("{{\"prompt\":\"1+1=\",\"answer\":\"2\"}}\n{{\"prompt\":\"{long}\",\"answer\":\"2\"}}\n")).unwrap();
    let run = tiny_run(folder.path(), &[]);
    let set = format!("eval={{samples=2,task={{kind=\"data\",data={:?}}}}}", task.to_str().unwrap());
    let asked = rollflow(&["eval", run.to_str().unwrap(), "--set", &set, "--json"]).ok();
    let report: Value = serde_json::from_str(&asked.out).unwrap();
    assert_eq!(report["metrics"]["eval_errors"], 3.0, "{report}");
    let answers = json_lines(Path::new(report["answers"].as_str().unwrap()));
    let errors: Vec<&Value> = answers.iter().filter(|answer| answer["question"] == 1).collect();
    assert!(errors.len() == 3 && errors.iter().all(|answer| answer["error"].as_str().unwrap().contains("positions")));
    assert!(answers.iter().filter(|answer| answer["question"] == 0).all(|answer| answer["reward"].is_number()));
}

#[test]
fn an_evaluation_set_without_reference_answers_is_an_error_of_check_and_of_eval() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, last: &str| {
        fs::write(folder.path().join(name), format!("{{\"prompt\":\"1+1=\"}}\n{{\"prompt\":\"2+2=\"{last}}}\n")).unwrap();
    };
    write("none.jsonl", "");
    write("half.jsonl", ",\"answer\":\"4\"");
    let eval = |name: &str| format!("eval={{samples=2,task={{kind=\"data\",data={:?}}}}}", folder.path().join(name));
    let (none, half) = (eval("none.jsonl"), eval("half.jsonl"));
    let run = tiny_run(folder.path(), &["reward={kind=\"exact\"}"]);
    let asked = |set: &str| rollflow(&["eval", run.to_str().unwrap(), "--set", set, "--json"]);

    let why = "none holds nothing to use: all records were skipped: 2 without a reference answer";
    let checked = rollflow(&["check", GRPO, "--set", &none]);
    assert!(checked.code == Some(2) && checked.err.contains(&format!("`eval.task.data`: {why}")), "{}", checked.err);
    let refused = asked(&none);
    assert!(refused.code == Some(1) && refused.err.contains(why), "{}", refused.err);

    let checked = rollflow(&["check", GRPO, "--set", &half]).ok();
    let said = "eval.task.data: half, 1 records in 1 file; skipped: 1 without a reference answer";
    assert!(checked.out.contains(said), "{}", checked.out);
    let report: Value = serde_json::from_str(&asked(&half).ok().out).unwrap();
    assert_eq!(report["metrics"]["eval_errors"], 0.0, "{report}");
    assert!(report["metrics"]["eval_accuracy_ratio"].is_number(), "{report}");
}

#[test]
fn an_evaluation_of_which_every_completion_fails_exits_with_1_and_the_first_error() {
    let folder = tempfile::tempdir().unwrap();
    let (task, run) = (folder.path().join("task.jsonl"), tiny_run(folder.path(), &[]));
    fs::write(&task, format!("{{\"prompt\":\"{}\",\"answer\":\"2\"}}\n", "1+".repeat(2000))).unwrap();
    let set = format!("eval={{samples=2,task={{kind=\"data\",data={task:?}}}}}");
    let failed = rollflow(&["eval", run.to_str().unwrap(), "--set", &set, "--json"]);
    assert_eq!(failed.code, Some(1), "{}", failed.err);
    for part in ["all 3 completions failed; the first: ", "positions"] {
        assert!(failed.err.contains(part), "{part}: {}", failed.err);
    }
    let report: Value = serde_json::from_str(&failed.out).unwrap();
    assert_eq!(report["metrics"]["eval_errors"], 3.0, "{report}");
}

#[test]
fn an_evaluation_is_judged_again_when_its_reward_changed() {
    let folder = tempfile::tempdir().unwrap();
    let (file, run) = (folder.path().join("reward.py"), tiny_run(folder.path(), &[]));
    let sets = [EVAL.to_owned(), format!("reward={{kind=\"python\",file={file:?},function=\"reward\"}}")];
    let mean = |value: &str| {
        fs::write(&file, format!("def reward(completion):\n    return {value}\n")).unwrap();
        let asked = rollflow(&with_sets(&["eval", run.to_str().unwrap(), "--json"], &sets)).ok();
        (serde_json::from_str::<Value>(&asked.out).unwrap()["metrics"]["eval_reward_mean"].as_f64(), asked.err)
    };
    assert_eq!(mean("0.25").0, Some(0.25));
    let (again, told) = mean("0.75");
    assert!(again == Some(0.75) && told.contains("judged again"), "{again:?} {told}");
    assert!(!mean("0.75").1.contains("judged again"));
}

#[test]
fn evaluations_of_two_runs_have_two_folders() {
    let folder = tempfile::tempdir().unwrap();
    let [one, other] = ["one", "other"].map(|name| tiny_run(&folder.path().join(name), &[EVAL]));
    let judged = |more: &[&str]| {
        let asked = rollflow(&[&["eval", one.to_str().unwrap(), "--json"][..], more].concat()).ok();
        let report: Value = serde_json::from_str(&asked.out).unwrap();
        Path::new(report["answers"].as_str().unwrap()).parent().unwrap().file_name().unwrap().to_owned()
    };
    let of_other = format!("{}-step_000003", other.file_name().unwrap().display());
    assert_eq!(judged(&[]), "step_000003");
    assert_eq!(judged(&["--model", other.to_str().unwrap()]).to_str(), Some(&*of_other));
}

#[test]
fn prompts_that_changed_since_an_evaluation_are_sampled_again() {
    let folder = tempfile::tempdir().unwrap();
    let (task, run, out) = (folder.path().join("task.jsonl"), tiny_run(folder.path(), &[]), folder.path().join("eval"));
    let set = format!("eval={{samples=2,task={{kind=\"data\",data={task:?}}}}}");
    let asked = |first: &str| {
        fs::write(&task, format!("{{\"prompt\":{first:?},\"answer\":\"2\"}}\n{{\"prompt\":\"3+3=\",\"answer\":\"6\"}}\n"))
            .unwrap();
        rollflow(&["eval", run.to_str().unwrap(), "--set", &set, "--out", out.to_str().unwrap()]).ok();
        let answers = json_lines(&out.join("answers.jsonl"));
        let prompts = |question: u64| -> Vec<String> {
            let of = answers.iter().filter(|answer| answer["question"] == question);
            of.map(|answer| answer["prompt"].as_str().unwrap().to_owned()).collect()
        };
        [prompts(0), prompts(1)]
    };
    for first in ["1+1=", "2+0="] {
        assert_eq!(asked(first), [vec![first; 3], vec!["3+3="; 3]]);
    }
}
