//! Recipes whose rollouts have several turns, by the command: what the environment says is the reward, what was said can be looked at, models are
//! evaluated there, and whatever kills a run, its conversations go on (laws C1, C2, D4, V3).

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use rollflow::data::Status;
use rollflow::rollout::Fate;
use rollflow::stages::train::Resumed;
use rollflow::train::checkpoint;
use serde_json::Value;

use crate::crashes::{run_killed_and_seen, same_bytes};
use crate::model_serving::Server;
use crate::running::{GRPO, json_lines, plain_run_args, read, rollflow, rollouts, run_args};

const CALCULATOR: &str = "pipelines/recipes/calculator_agent.toml";

/// A game of several turns that a model which knows nothing plays, too: the first letter or digit that it says ends its turn.
pub const GAME: [&str; 4] = [
    "environment={kind=\"game\",highest=9,max_turns=4}",
    "reward={kind=\"environment\"}",
    "generate.max_new_tokens=24",
    "generate.stop=[\"0\",\"1\",\"2\",\"3\",\"4\",\"5\",\"6\",\"7\",\"8\",\"9\",\"a\",\"e\",\"i\",\"n\",\"o\",\"r\",\"s\",\"t\",\"x\"]",
];

/// Tokens that the server reads, in which few of the game's conversations end.
const CONTEXT: usize = 80;

#[test]
fn the_environments_grade_is_the_reward_and_every_turn_can_be_read() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("run");
    let sets = [
        "model={kind=\"tiny\",hidden=16,layers=1,heads=2,kv_heads=1,intermediate=32}",
        "sft.steps=2",
        "sft.schedule={kind=\"constant\"}",
        "train.steps=2",
        "train.schedule={kind=\"constant\"}",
        "batch.groups=2",
        "generate.group_size=2",
        "generate.max_new_tokens=36",
        "filter=[]",
        "observe.rollouts_every=1",
        "flow.max_staleness=0",
    ];
    rollflow(&plain_run_args(CALCULATOR, &out, &sets)).ok();
    let rollouts = rollouts(&out);
    assert_eq!(rollouts.len(), 8);
    for row in json_lines(&out.join("rollouts.jsonl")) {
        let metadata = &row["metadata"];
        assert_eq!(row["reward"], metadata["environment_reward"], "{row}");
        let turns = metadata["conversation"].as_array().unwrap();
        let said = turns.iter().filter(|turn| turn["role"] == "assistant").count();
        assert_eq!((turns[0]["role"].as_str(), Some(said as u64)), (Some("user"), metadata["turns"].as_u64()));
    }
}

/// Laws V3 and V4: what is asked is asked of one version, and a synchronous run repeats it.
#[test]
fn a_model_that_works_in_an_environment_is_evaluated_there() {
    let folder = tempfile::tempdir().unwrap();
    let [run, again, asked] = ["run", "again", "asked"].map(|name| folder.path().join(name));
    let sets = [&GAME[..], &["train.steps=4", "eval={every=2,samples=2,limit=5,max_num_seqs=6}"]].concat();
    rollflow(&run_args(GRPO, &run, &sets)).ok();
    let evaluations = json_lines(&run.join("evaluations.jsonl"));
    let versions: Vec<_> =
        evaluations.iter().map(|row| (row["step"].as_u64().unwrap(), row["eval_version"].as_f64().unwrap())).collect();
    assert_eq!(versions, [(0, 1.0), (2, 3.0), (4, 5.0)], "pinned");
    let last = run.join("evaluations/step_000004.jsonl");
    let answers = json_lines(&last);
    assert_eq!(answers.len(), 5 * (2 + 1));
    assert!(answers.iter().all(|answer| answer["version"] == 5 && answer["reward"].is_number()), "{answers:?}");
    let several = |answer: &Value| answer["response"].as_str().unwrap().contains("user: ");
    assert!(answers.iter().any(several), "some have several turns: {answers:?}");

    let recipe = run.join("recipe.toml");
    assert_eq!(rollflow(&["run", recipe.to_str().unwrap(), "--out", again.to_str().unwrap()]).code, Some(0));
    for file in ["metrics.jsonl", "evaluations.jsonl", "evaluations/step_000004.jsonl"] {
        same_bytes(&run.join(file), &again.join(file));
    }
    // The same model says the same by itself.
    rollflow(&["eval", run.to_str().unwrap(), "--out", asked.to_str().unwrap()]).ok();
    let said = |rows: Vec<Value>| rows.iter().map(|row| (row["response"].clone(), row["reward"].clone())).collect::<Vec<_>>();
    assert_eq!(said(json_lines(&asked.join("answers.jsonl"))), said(answers));
}

#[test]
fn a_synchronous_run_that_was_killed_in_its_conversations_is_the_run_that_was_not() {
    let folder = tempfile::tempdir().unwrap();
    let (whole, killed) = (folder.path().join("whole"), folder.path().join("killed"));
    let sets = [&GAME[..], &["train.steps=40", "checkpoint.every=1", "observe.rollouts_every=1"]].concat();
    rollflow(&run_args(GRPO, &whole, &sets)).ok();
    assert!(run_killed_and_seen(&killed, &sets, (8, 21), || ()) >= 5);
    for file in ["metrics.jsonl", "rollouts.jsonl", "checkpoints/step_000040/model.safetensors"] {
        same_bytes(&whole.join(file), &killed.join(file));
    }
}

/// A rollout's index and part, and what a checkpoint has of it.
type Begun = BTreeMap<(u64, u32), Vec<u32>>;

/// Conversations that the newest checkpoint has between two turns or in the middle of a later one.
fn conversing(run: &Path) -> Begun {
    let mut begun = Begun::new();
    let Some((_, newest)) = checkpoint::list(&run.join("checkpoints")).ok().and_then(|mut all| all.pop()) else { return begun };
    for group in Resumed::read(&newest).unwrap().progress.ledger.open() {
        for answer in group.answers.values().filter(|answer| answer.status == Status::Pending) {
            if answer.versions.per_token().any(|version| version.is_none()) {
                begun.insert((group.prompt.ordinal, answer.index), answer.tokens.clone());
            }
        }
    }
    begun
}

#[test]
fn conversations_of_an_asynchronous_run_that_was_killed_go_on_from_their_turn() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let steps = ["train.steps=100", "checkpoint.every=1", "observe.rollouts_every=1", "flow.max_staleness=3"];
    let sets = [&GAME[..], &steps].concat();
    let mut begun = Begun::new();
    assert!(run_killed_and_seen(&run, &sets, (12, 7), || begun.extend(conversing(&run))) >= 8);

    let rollouts = rollouts(&run);
    let places: BTreeMap<(u64, u32), usize> = rollouts.iter().enumerate().map(|(at, row)| ((row.group, row.index), at)).collect();
    assert_eq!((rollouts.len(), places.len()), (100 * 4 * 4, 100 * 4 * 4), "none is trained twice");
    assert!(places.keys().map(|(group, _)| *group).eq((0..400).flat_map(|group| [group; 4])), "none is left out");
    let totals = Resumed::read(&run.join("checkpoints/step_000100")).unwrap().progress.ledger.totals();
    assert_eq!(totals.imbalance(), (0, 0), "law D4: {totals:?}");
    let goes_on = |((group, index), tokens): (&(u64, u32), &Vec<u32>)| {
        let row = &rollouts[places[&(*group, *index)]];
        let read = row.versions.per_token().take_while(Option::is_none).count();
        row.tokens[read..].starts_with(tokens)
    };
    let gone_on = begun.iter().filter(|begun| goes_on(*begun)).count();
    // What was too old to be trained when its turn came was begun anew.
    let anew = totals.tokens.get(&Fate::Truncated).copied().unwrap_or(0);
    assert!(gone_on > 0 && (anew > 0 || gone_on == begun.len()), "{gone_on} of {} went on: {totals:?}", begun.len());
    assert!(fs::exists(run.join("report.html")).unwrap());
}

/// A conversation that has outgrown its server is truncated like one that has outgrown the model: it is no request that fails (law F6).
#[test]
fn a_server_with_a_shorter_context_than_the_model_s_truncates_conversations_and_loses_none() {
    let folder = tempfile::tempdir().unwrap();
    let [out, base] = ["run", "base"].map(|name| folder.path().join(name));
    assert_eq!(rollflow(&run_args(GRPO, &base, &[&GAME[..], &["train.steps=1"]].concat())).code, Some(0));
    let server = Server::start(&base, &["--context-length", &CONTEXT.to_string()]);
    let engine = format!("engine={{kind=\"rollflow\",urls=[{:?}]}}", server.url);
    let sets = [&GAME[..], &[&engine, "train.steps=2", "observe.rollouts_every=1"]].concat();
    let ended = rollflow(&run_args(GRPO, &out, &sets)).ok();
    assert!(!ended.err.contains("given up"), "{}", ended.err);
    let rows = json_lines(&out.join("rollouts.jsonl"));
    let cut: Vec<&Value> = rows.iter().filter(|row| row["metadata"]["stop_reason"] == "max_tokens").collect();
    assert!(!cut.is_empty() && cut.iter().all(|row| row["status"] == "truncated"), "{rows:?}");

    let [none, longer] = ["none", "longer"].map(|name| folder.path().join(name));
    let ended = rollflow(&run_args(GRPO, &none, &[&sets[..], &["generate.max_new_tokens=80"]].concat()));
    assert!(
        ended.code == Some(1) && ended.err.contains("lower it, or start the server with a larger --context-length"),
        "{}",
        ended.err
    );
    let whole = Server::start(&base, &[]);
    let engine = format!("engine={{kind=\"rollflow\",urls=[{:?}]}}", whole.url);
    rollflow(&run_args(GRPO, &longer, &[&sets[..], &[&engine]].concat())).ok();
    let reasons = read(&longer.join("rollouts.jsonl"));
    assert!(!reasons.contains("\"max_tokens\""), "the server's context, and nothing else, ended them");
}
