//! Values at the ends of their ranges, and recipes that include themselves.

use std::fs;

use rollflow::recipe::{Plan, RecipeErrors, load, parse};

fn plan(rest: &str) -> Result<Plan, RecipeErrors> {
    let base = "pipeline = 'grpo'\nmodel.kind = 'tiny'\ntask.kind = 'arithmetic'\nreward.kind = 'exact'\n";
    parse("run.toml", &format!("{base}{rest}"), &[])
}

/// Asserts that a recipe is rejected with an error that contains each of `parts`.
fn refused(rest: &str, parts: &[&str]) {
    let errors = plan(rest).expect_err(rest).to_string();
    assert!(parts.iter().all(|part| errors.contains(part)), "{rest}: {errors}");
}

#[test]
fn counts_of_zero_are_errors_by_their_keys_where_the_memory_plan_divides_by_them() {
    let grpo = concat!(env!("CARGO_MANIFEST_DIR"), "/pipelines/recipes/grpo.toml");
    for key in ["generate.group_size", "generate.workers", "generate.max_new_tokens", "train.micro_batch_tokens"] {
        let errors = load(grpo.as_ref(), &[format!("{key}=0")]).expect_err(key).to_string();
        assert!(errors.contains(&format!("`{key}` is 0")), "{errors}");
    }
}

#[test]
fn more_servers_than_there_are_ports_are_an_error() {
    for replicas in ["0", "65537", "9223372036854775807"] {
        let text = format!("engine = {{ launch = 'vllm', replicas = {replicas} }}");
        refused(&text, &[&format!("`engine.replicas` is {replicas}"), "1 to 65536"]);
    }
    refused("engine = { launch = 'vllm', port = 65535, replicas = 65536 }", &["more than there are ports from 65535 on"]);
}

#[test]
fn a_recipe_that_includes_itself_by_another_path_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let inside = folder.path().join("inc");
    fs::create_dir(&inside).unwrap();
    let file = inside.join("b.toml");
    fs::write(&file, "include = ['../inc/b.toml', '../inc/./../inc/b.toml']\n").unwrap();
    let errors = load(&file, &[]).unwrap_err();
    assert_eq!(errors.iter().filter(|error| error.message.contains("includes itself")).count(), 2, "{errors}");
    let written = inside.join("../inc/./../inc/b.toml");
    assert!(errors.to_string().contains(&format!("{} includes itself", written.display())), "{errors}");
}

#[test]
fn every_accepted_number_can_be_read_from_the_recipe_that_a_run_writes() {
    let largest = plan("seed = 9223372036854775807").unwrap();
    assert_eq!(parse("recipe.toml", &largest.to_toml(), &[]).unwrap(), largest);
    refused("seed = 9223372036854775808", &["`seed` is", "from 0 to 9223372036854775807"]);
    refused("generate.top_k = 18446744073709551615", &["`generate.top_k` is", "from 0 to 9223372036854775807"]);
    refused("engine.restarts = 4294967296", &["`engine.restarts` is", "from 0 to 4294967295"]);
    for number in ["nan", "inf", "-inf"] {
        refused(&format!("train.target_reward = {number}"), &["`train.target_reward` is", "finite"]);
    }
}

#[test]
fn a_schedule_that_decays_needs_a_step_after_its_warm_up() {
    let of = |kind: &str, warmup: u64| format!("schedule = {{ kind = '{kind}', warmup = {warmup} }}");
    let train = |kind: &str, warmup| format!("train = {{ steps = 10, {} }}\n", of(kind, warmup));
    for kind in ["linear", "cosine"] {
        let why = format!("a \"{kind}\" schedule falls after its warm-up");
        refused(&train(kind, 10), &["`train.schedule.warmup` is 10", &why]);
        assert!(plan(&train(kind, 9)).is_ok(), "{kind}");
    }
    assert!(plan(&train("constant", 10)).is_ok());
    refused(&train("constant", 11), &["`train.schedule.warmup` is 11, but there are only 10 steps"]);
    refused(&format!("sft = {{ steps = 10, {} }}", of("cosine", 10)), &["`sft.schedule.warmup` is 10"]);
    // The policy does not change during the critic's warm-up.
    let critic = "critic = { warmup_steps = 4 }";
    refused(&format!("{}{critic}", train("linear", 6)), &["only 6 steps after the critic's 4 (critic.warmup_steps)"]);
    assert!(plan(&format!("{}{critic}", train("linear", 5))).is_ok());
}
