//! `[reward]` is checked wherever it judges completions: in training, in evaluations, and recorded ones.

use rollflow::recipe::parse;

const SFT: &str = "pipeline = 'sft'\ntask.kind = 'arithmetic'\nsft = {}\neval = { every = 1, samples = 0, limit = 5 }\n";
const GRPO: &str = "pipeline = 'grpo'\ntask.kind = 'arithmetic'\neval = {}\n";
const RESCORED: &str = "pipeline = 'grpo_offline'\ntask = { kind = 'rollouts', path = 'a.jsonl', rescore = true }\n";
const OFFLINE: &str =
    "pipeline = 'grpo_offline'\ntask = { kind = 'rollouts', path = 'a.jsonl' }\neval.task.kind = 'arithmetic'\n";

/// The errors of a recipe; empty if it is accepted.
fn told(base: &str, more: &str) -> String {
    let read = parse("run.toml", &format!("{base}model.kind = 'tiny'\n{more}"), &[]);
    read.map_or_else(|errors| errors.to_string(), |_| String::new())
}

#[test]
fn parts_of_a_reward_are_checked_once_in_every_pipeline_that_judges() {
    let cases = [
        ("", "`reward.part` is empty"),
        ("part = [{ kind = 'length', min = 10, max = 2, name = 'a' }]", "above its max of 2"),
        ("part = [{ kind = 'overlong', buffer = 99999, name = 'a' }]", "`reward.part[0].buffer` is 99999"),
        ("combine = 'custom', part = [{ kind = 'exact', name = 'a' }]", "`reward.aggregator` is missing"),
        ("part = [{ kind = 'exact', name = 'a' }, { kind = 'math', name = 'a' }]", "as that of part 0 is"),
        ("combine = 'min', part = [{ kind = 'exact', name = 'a', weight = 2.0 }]", "only a sum has weights"),
    ];
    for base in [SFT, GRPO, RESCORED, OFFLINE] {
        for (keys, text) in cases {
            let comma = if keys.is_empty() { "" } else { ", " };
            let found = told(base, &format!("reward = {{ kind = 'parts'{comma}{keys} }}"));
            assert_eq!(found.matches(text).count(), 1, "{base}{keys}: {found}");
        }
        assert_eq!(told(base, "reward.kind = 'exact'"), "");
    }
}

#[test]
fn an_evaluation_needs_a_reward_that_it_can_compute() {
    for (base, key) in [(SFT, "eval"), (GRPO, "eval"), (OFFLINE, "eval"), (RESCORED, "task.rescore")] {
        let found = told(base, "reward.kind = 'none'");
        assert_eq!(found.matches(&format!("`{key}`: there is no reward")).count(), 1, "{base}{found}");
    }
    let environment = [(SFT, "\"sft\" have"), (OFFLINE, "\"grpo_offline\" have"), (GRPO, "no section [environment]")];
    for (base, text) in environment {
        let found = told(base, "reward.kind = 'environment'");
        assert_eq!(found.matches("the reward is what an environment says").count(), 1, "{base}{found}");
        assert!(found.contains(text), "{found}");
    }
    assert_eq!(told(RESCORED, "reward.kind = 'environment'"), "", "recorded rollouts have the environment's grades");
}

#[test]
fn an_evaluation_of_a_reward_model_needs_pairs() {
    let base = "pipeline = 'reward_model'\ntask.kind = 'arithmetic'\nreward_model.held_out = 0.0\n";
    assert!(told(base, "eval.every = 5").contains("[eval] has no pairs: `reward_model.held_out` is 0"));
    for more in ["", "eval.every = 0", "eval = { every = 5, task = { kind = 'arithmetic' } }"] {
        assert_eq!(told(base, more), "", "{more}");
    }
}
