//! `graph`: drawings of what would run.

use serde_json::Value;

use crate::running::{GRPO, rollflow, with_sets};

/// Who follows the policy stands on the weights edge.
#[test]
fn a_reference_that_follows_the_policy_is_drawn_on_the_weights_edge() {
    for (reference, follows) in [("{kind=\"ema\"}", true), ("{kind=\"periodic\"}", true), ("{kind=\"frozen\"}", false)] {
        let sets = [format!("reference={reference}"), "train.kl_loss={beta=0.1}".to_owned(), "model.hidden=16".to_owned()];
        let drawn = rollflow(&with_sets(&["graph", GRPO, "--format", "json"], &sets)).ok();
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
    let draw = |format: &str| rollflow(&[&["graph", GRPO, "--format", format][..], &tiny].concat()).ok().out;
    let mermaid = draw("mermaid");
    assert!(
        mermaid.starts_with("flowchart LR") && mermaid.contains("Prompt with its partial completions<br/>"),
        "law D7: {mermaid}"
    );
    assert!(draw("dot").starts_with("digraph \"grpo-addition\""));
    let graph: Value = serde_json::from_str(&draw("json")).unwrap();
    let names: Vec<&str> = graph["nodes"].as_array().unwrap().iter().map(|node| node["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["prompts", "generate", "reward", "filter", "batch", "train", "sync", "log"], "reads as the algorithm");
}

#[test]
fn a_pipeline_is_drawn_where_tokens_of_its_servers_are_absent() {
    for kind in ["kind=\"server\",token_env", "kind=\"tinker\",key_env"] {
        let reference = format!("reference={{{kind}=\"NO_SUCH_VARIABLE\",url=\"http://127.0.0.1:1\"}}");
        let sets = [&*reference, "train.kl_loss={beta=0.1}", "generate.temperature=1"];
        let drawn = rollflow(&with_sets(&["graph", GRPO], &sets)).ok();
        assert!(drawn.out.contains("reference"), "{}", drawn.out);
    }
}

#[test]
fn a_pipeline_is_drawn_where_its_devices_are_absent() {
    let sets = ["--set", "model.device=\"cuda:63\"", "--set", "generate.devices=[\"cuda:62\"]"];
    let with = |command: &str| rollflow(&[&[command, GRPO][..], &sets].concat());
    let drawn = with("graph");
    assert!(drawn.code == Some(0) && drawn.out.starts_with("flowchart LR"), "{drawn:?}");
    assert_eq!(with("check").code, Some(2), "its run would find no such device");
}
