//! `check` and `graph`: everything that is wrong at once, and drawings of what would run.

use serde_json::Value;

use crate::running::{GRPO, SFT, rollflow};

#[test]
fn a_good_recipe_checks_and_shows_what_follows_from_it() {
    for (recipe, shown) in [(GRPO, "admission window"), (SFT, "one epoch")] {
        let checked = rollflow(&["check", recipe]);
        assert_eq!((checked.code, checked.err.as_str()), (Some(0), ""));
        assert!(checked.out.contains(shown), "{}", checked.out);
    }
    let overridden = rollflow(&["check", GRPO, "--set", "batch.groups=5", "--set", "generate.group_size=3"]);
    assert!(overridden.out.contains("15 (5 groups of 3)"), "{}", overridden.out);
}

#[test]
fn a_bad_recipe_exits_with_2_and_tells_all_that_is_wrong_where_it_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = folder.path().join("bad.toml");
    let text = "pipeline = \"grpo\"\n[model]\nkind = \"tiny\"\nhiden = 64\n[task]\nkind = \"arithmetic\"\n[train]\nsteps = 10\nlr = -1.0\n";
    std::fs::write(&recipe, text).unwrap();
    let recipe = recipe.to_str().unwrap();
    for command in [&["check", recipe][..], &["graph", recipe], &["run", recipe]] {
        let refused = rollflow(&[command, &["--set", "batch.grups=4"]].concat());
        assert_eq!((refused.code, refused.out.as_str()), (Some(2), ""));
        for part in [
            &format!("{recipe}:4:1"),
            "did you mean `hidden`",
            &format!("{recipe}:9:6"),
            "--set batch.grups",
            "did you mean `groups`",
        ] {
            assert!(refused.err.contains(part), "{part} is missing:\n{}", refused.err);
        }
    }
}

#[test]
fn a_recipe_that_is_not_there_is_named() {
    let refused = rollflow(&["run", "no/such.toml"]);
    assert_eq!(refused.code, Some(2));
    assert!(refused.err.contains("no/such.toml"), "{}", refused.err);
}

/// Who follows the policy stands on the weights edge.
#[test]
fn a_reference_that_follows_the_policy_is_drawn_on_the_weights_edge() {
    for (reference, follows) in [("{kind=\"ema\"}", true), ("{kind=\"periodic\"}", true), ("{kind=\"frozen\"}", false)] {
        let sets = [format!("reference={reference}"), "train.kl_loss={coef=0.1}".to_owned(), "model.hidden=16".to_owned()];
        let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
        let drawn = rollflow(&[&["graph", GRPO, "--format", "json"][..], &sets].concat());
        assert_eq!(drawn.code, Some(0), "{}", drawn.err);
        let graph: Value = serde_json::from_str(&drawn.out).unwrap();
        let name = |node: &Value| graph["nodes"][node.as_u64().unwrap() as usize]["name"].as_str().unwrap().to_owned();
        let edges = graph["weights"].as_array().unwrap();
        let readers: Vec<String> = edges.iter().map(|edge| name(&edge["to"])).collect();
        assert_eq!(readers, if follows { vec!["generate", "reference"] } else { vec!["generate"] });
        assert!(graph["nodes"].as_array().unwrap().iter().any(|node| node["name"] == "reference"));
    }
}

#[test]
fn a_pipeline_is_drawn_in_three_languages() {
    let tiny = ["--set", "model.hidden=16", "--set", "model.heads=2", "--set", "model.kv_heads=1"];
    let draw = |format: &str| {
        let drawn = rollflow(&[&["graph", GRPO, "--format", format][..], &tiny].concat());
        assert_eq!(drawn.code, Some(0), "{}", drawn.err);
        drawn.out
    };
    assert!(draw("mermaid").starts_with("flowchart LR"));
    assert!(draw("dot").starts_with("digraph \"grpo-addition\""));
    let graph: Value = serde_json::from_str(&draw("json")).unwrap();
    let names: Vec<&str> = graph["nodes"].as_array().unwrap().iter().map(|node| node["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["prompts", "generate", "reward", "filter", "batch", "train", "sync", "log"], "reads as the algorithm");
}
