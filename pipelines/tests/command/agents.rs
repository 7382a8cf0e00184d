//! Recipes whose rollouts have several turns, by the command: what the environment says is the reward, and what was said can be looked at.

use rollflow::observe::logs::read_rollouts;
use serde_json::Value;

use crate::running::{read, rollflow};

const CALCULATOR: &str = "pipelines/recipes/calculator_agent.toml";

#[test]
fn the_environments_grade_is_the_reward_and_every_turn_can_be_read() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("run");
    let sets = [
        "model={kind=\"tiny\",hidden=16,layers=1,heads=2,kv_heads=1,intermediate=32}",
        "sft.steps=2",
        "train.steps=2",
        "batch.groups=2",
        "generate.group_size=2",
        "generate.max_new_tokens=36",
        "filter=[]",
        "observe.rollouts_every=1",
        "flow.max_staleness=0",
    ];
    let mut args = vec!["run", CALCULATOR, "--out", out.to_str().unwrap()];
    args.extend(sets.iter().flat_map(|set| ["--set", set]));
    let ended = rollflow(&args);
    assert_eq!(ended.code, Some(0), "{}", ended.err);
    let rollouts: Vec<_> = read_rollouts(out.join("rollouts.jsonl")).unwrap().map(Result::unwrap).collect();
    assert_eq!(rollouts.len(), 8);
    for line in read(&out.join("rollouts.jsonl")).lines() {
        let row: Value = serde_json::from_str(line).unwrap();
        let metadata = &row["metadata"];
        assert_eq!(row["reward"], metadata["environment_reward"], "{row}");
        let turns = metadata["conversation"].as_array().unwrap();
        let said = turns.iter().filter(|turn| turn["role"] == "assistant").count();
        assert_eq!((turns[0]["role"].as_str(), Some(said as u64)), (Some("user"), metadata["turns"].as_u64()));
    }
}
