//! Parts of the user's own by name, through the example that registers a loss: one binary with the whole command in it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use rollflow::algo::filters::Verdict;
use rollflow::prelude::*;
use rollflow::recipe::{Plan, RecipeErrors, parse_with};
use rollflow_pipelines::components::Components;
use rollflow_pipelines::grpo::declare;
use rollflow_pipelines::run::folder::Outputs;
use rollflow_pipelines::{Registry, complaints};

use crate::fork_server::BINARY;
use crate::running::{Ended, GRPO, rollflow, run_args};

const CUSTOM: &str = "train.loss={kind=\"custom\",name=\"reinforce\"}";

/// Runs the example. `cargo test --workspace` has built it; where it is missing, or older than its source or the libraries, it is built here.
fn own_loss(args: &[&str]) -> Ended {
    let (root, target) = (concat!(env!("CARGO_MANIFEST_DIR"), "/.."), Path::new(BINARY).parent().unwrap());
    let example = target.join("examples/own_loss");
    let is_library = |path: &PathBuf| {
        let name = path.file_name().unwrap().to_string_lossy();
        name.starts_with("librollflow") && name.ends_with(".rlib")
    };
    let libraries = fs::read_dir(target.join("deps")).unwrap().map(|entry| entry.unwrap().path()).filter(is_library);
    let sources = libraries.chain([Path::new(root).join("pipelines/examples/own_loss.rs")]);
    let written = |path: &Path| fs::metadata(path).and_then(|file| file.modified()).ok();
    if written(&example) < sources.filter_map(|path| written(&path)).max() {
        let build = ["build", "--quiet", "--workspace", "--example", "own_loss"];
        assert!(Command::new(env!("CARGO")).current_dir(root).args(build).status().unwrap().success());
    }
    let output = Command::new(example).current_dir(root).args(args).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Ended { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
}

#[test]
fn a_program_with_a_loss_of_its_own_is_the_command_with_that_loss() {
    own_loss(&["check", GRPO, "--set", CUSTOM]).ok();
    let slip = own_loss(&["check", GRPO, "--set", "train.loss={kind=\"custom\",name=\"reinforced\"}"]);
    assert_eq!(slip.code, Some(2));
    assert!(slip.err.contains("no loss is registered as \"reinforced\""), "{}", slip.err);
    assert!(slip.err.contains("did you mean \"reinforce\"? registered are reinforce"), "{}", slip.err);
    let params = own_loss(&["check", GRPO, "--set", "train.loss={kind=\"custom\",name=\"reinforce\",params={beta=1}}"]);
    assert!(params.err.contains("unknown parameter `beta`; it takes none"), "{}", params.err);

    // The library's own command knows no such name, and says what to do.
    let unknown = rollflow(&["check", GRPO, "--set", CUSTOM]);
    assert_eq!(unknown.code, Some(2));
    assert!(unknown.err.contains("this program registers none; write one with Registry::loss"), "{}", unknown.err);

    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("run");
    own_loss(&run_args(GRPO, &out, &[CUSTOM])).ok();
    own_loss(&["resume", out.to_str().unwrap(), "--set", "train.steps=5"]).ok();
}

#[derive(serde::Deserialize)]
struct Strict {
    at_least: f64,
}

fn registry() -> Registry {
    Registry::default()
        .loss("mine", Grpo::default())
        .advantage("doubled", |groups: &[rollflow::algo::ScoredGroup]| {
            Ok::<_, rollflow::algo::AdvantageError>(
                groups.iter().map(|group| group.rewards.iter().map(|r| 2.0 * r).collect()).collect(),
            )
        })
        .reward("digits", |sample: &Sample| sample.response.chars().filter(char::is_ascii_digit).count() as f64)
        .aggregator_with("power", |params: std::collections::BTreeMap<String, f64>| {
            let power = params.get("power").copied().ok_or("give it a power")?;
            Ok::<_, &str>(move |values: &[f64]| values.iter().sum::<f64>().powf(power))
        })
        .filter_with("strict", |Strict { at_least }| match at_least {
            negative if negative < 0.0 => Err("at_least is below 0"),
            at_least => {
                Ok(move |group: &Group| Verdict::keep_if(group.rewards().iter().any(|reward| *reward >= at_least), "strict"))
            }
        })
}

fn plan(text: &str) -> Result<Plan, RecipeErrors> {
    let text = format!("pipeline = 'grpo'\nmodel.kind = 'tiny'\ntask.kind = 'arithmetic'\n{text}");
    parse_with("own.toml", &text, &[], |plan| complaints(&registry(), plan))
}

#[test]
fn everything_that_can_be_registered_is_found_by_a_recipe_and_trains() {
    let text = "
        model = { kind = 'tiny', hidden = 16, layers = 1, heads = 2, kv_heads = 1, intermediate = 32 }
        generate = { group_size = 4, max_new_tokens = 4 }
        batch.groups = 2
        train = { steps = 2, probe = false, loss = { kind = 'custom', name = 'mine' }, advantage = { kind = 'custom', name = 'doubled' } }
        filter = [{ kind = 'custom', name = 'strict', params = { at_least = 0.0 } }]
        reward = { kind = 'parts', require_end_of_text = false, combine = 'custom', aggregator = 'power', aggregator_params = { power = 2.0 }, part = [
            { name = 'digits', kind = 'custom', function = 'digits' }, { name = 'one', kind = 'length', max = 4 } ] }";
    let text = format!("pipeline = 'grpo'\ntask.kind = 'arithmetic'\n{text}");
    let plan =
        parse_with("own.toml", &text, &[], |plan| complaints(&registry(), plan)).unwrap_or_else(|errors| panic!("{errors}"));
    let policy = rollflow_pipelines::assemble::policy::policy(&plan).unwrap();
    let mut outputs = Outputs::in_memory();
    let seen = std::sync::Arc::<std::sync::Mutex<Vec<Sample>>>::default();
    let kept = seen.clone();
    outputs.log = outputs.log.each(move |step: &Trained<_>| kept.lock().unwrap().extend(step.batch.samples().cloned()));
    let mut flow = declare(&plan, Components::local(&plan, &registry(), &policy, &policy).unwrap(), outputs, None).unwrap();
    flow.run(Until::finished()).unwrap();
    let seen = seen.lock().unwrap();
    assert_eq!(seen.len(), 2 * 2 * 4);
    for sample in seen.iter() {
        let digits = sample.response.chars().filter(char::is_ascii_digit).count() as f64;
        assert_eq!((sample.reward_parts["digits"], sample.reward), (digits, Some((digits + 1.0).powi(2))));
        assert_eq!(sample.advantage, sample.reward.map(|reward| 2.0 * reward));
    }
}

#[test]
fn names_and_parameters_that_are_wrong_are_errors_at_their_place_all_at_once() {
    let errors = plan(
        "train.loss = { kind = 'custom', name = 'mime' }\n\
         train.advantage = { kind = 'custom', name = 'x' }\n\
         reward = { kind = 'custom', name = 'digit' }\n\
         [[filter]]\nkind = 'custom'\nname = 'strict'\nparams = { at_leest = 1.0 }\n\
         [[filter]]\nkind = 'custom'\nname = 'strict'\nparams = { at_least = -1.0 }\n\
         [[filter]]\nkind = 'custom'\nname = 'strict'\nparams = { at_least = 'much' }\n",
    )
    .unwrap_err();
    let told: Vec<String> = errors.iter().map(ToString::to_string).collect();
    let expected = [
        ("own.toml:4:", "no loss is registered as \"mime\"", "did you mean \"mine\"? registered are mine"),
        ("own.toml:5:", "no advantage is registered as \"x\"", "registered are doubled"),
        ("own.toml:6:", "no reward is registered as \"digit\"", "did you mean \"digits\"? registered are digits"),
        (
            "own.toml:10:",
            "the filter \"strict\" can't be made",
            "unknown parameter `at_leest`; did you mean `at_least`? known here: at_least",
        ),
        ("own.toml:14:", "the filter \"strict\" can't be made", "at_least is below 0"),
        ("own.toml:18:", "the filter \"strict\" can't be made", "invalid type: string \"much\", expected f64"),
    ];
    assert_eq!(told.len(), expected.len(), "{told:#?}");
    for (told, (place, what, help)) in told.iter().zip(expected) {
        assert!(told.starts_with(place) && told.contains(what) && told.contains(help), "{told}");
    }
}
