//! Old names of keys: each is accepted with a warning and means what the new name means.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use rollflow::recipe::{Plan, RecipeErrors, parse, schema, with_current_names};
use serde_json::Value;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

/// Every renamed key: what the recipe has besides, the old path, the new name and a value other than the default.
const RENAMED: [(&[&str], &str, &str, &str); 16] = [
    (&[], "generate.slots", "max_num_seqs", "8"),
    (&[], "generate.mask_older", "mask_older_versions", "true"),
    (&["eval={}"], "eval.slots", "max_num_seqs", "8"),
    (&[], "batch.over_sample", "oversampling_factor", "1.5"),
    (&[], "train.updates", "ppo_epochs", "2"),
    (&[], "train.aggregation", "loss_aggregation", "token_sum"),
    (&[], "train.schedule.floor", "min_lr_ratio", "0.5"),
    (&["model.device='cuda:0'"], "train.beside", "replica_devices", "['cuda:1']"),
    (&["train.loss.kind='grpo'"], "train.loss.clip_low", "epsilon", "0.1"),
    (&["train.loss.kind='grpo'"], "train.loss.clip_high", "epsilon_high", "0.1"),
    (&["reference.kind='frozen'", "train.kl_loss={}"], "train.kl_loss.coef", "beta", "0.1"),
    (&["reference.kind='frozen'", "train.kl_reward={}"], "train.kl_reward.coef", "beta", "0.1"),
    (&["sft.max_length=64"], "sft.too_long", "on_overlong", "drop"),
    (&["engine={kind='vllm',urls=['http://a:1']}"], "engine.patience", "lost_timeout", "5.0"),
    (&["reward={kind='http',url='http://a:1'}"], "reward.patience", "busy_timeout", "5.0"),
    (&["reward={kind='judge',url='http://a:1',model='m'}"], "reward.patience", "busy_timeout", "5.0"),
];

const RECIPE: &str = "pipeline='grpo'\nmodel.kind='tiny'\ntask.kind='arithmetic'\n";

fn plan(sets: &[String]) -> Result<Plan, RecipeErrors> {
    parse("r.toml", RECIPE, sets)
}

/// The messages of warnings.
#[derive(Clone, Default)]
struct Warnings(Arc<Mutex<Vec<String>>>);

impl Subscriber for Warnings {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, event: &Event<'_>) {
        struct Message(String);
        impl Visit for Message {
            fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
                if field.name() == "message" {
                    self.0 = format!("{value:?}");
                }
            }
        }
        let mut message = Message(String::new());
        event.record(&mut message);
        self.0.lock().unwrap().push(message.0);
    }
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// The result of `act`, and the warnings that it gave.
fn warned<T>(act: impl FnOnce() -> T) -> (T, Vec<String>) {
    // With a single subscriber, tracing lets whichever thread meets an event first decide for all whether it is wanted. Other
    // tests' threads have no subscriber; a second one has every event asked of both.
    let _second = tracing::Dispatch::new(Warnings::default());
    let warnings = Warnings::default();
    let result = tracing::subscriber::with_default(warnings.clone(), act);
    let seen = warnings.0.lock().unwrap().clone();
    (result, seen)
}

fn current(old: &str, new: &str) -> String {
    format!("{}.{new}", old.rsplit_once('.').unwrap().0)
}

#[test]
fn an_old_name_is_accepted_with_a_warning_and_has_the_same_effect() {
    for (context, old, new, value) in RENAMED {
        let new = current(old, new);
        let with = |more: Option<String>| plan(&context.iter().map(|set| (*set).to_owned()).chain(more).collect::<Vec<_>>());
        let (by_old, told) = warned(|| with(Some(format!("{old}={value}"))).unwrap_or_else(|errors| panic!("{old}: {errors}")));
        assert!(told.len() == 1 && told[0].contains(&format!("`{old}` is now `{new}`")), "{told:?}");
        let (by_new, told) = warned(|| with(Some(format!("{new}={value}"))).unwrap());
        assert!(told.is_empty(), "{told:?}");
        assert!(by_old == by_new && by_new != with(None).unwrap(), "{old}");
        assert_eq!(with_current_names(BTreeMap::from([(old.to_owned(), 1)])), BTreeMap::from([(new, 1)]));
    }
}

#[test]
fn both_names_of_a_key_in_one_file_are_an_error() {
    let text = format!("{RECIPE}[train]\nupdates = 2\nppo_epochs = 2\n");
    let errors = parse("r.toml", &text, &[]).unwrap_err().to_string();
    assert!(errors.contains("r.toml:5:1: `train.updates` is the old name of `train.ppo_epochs`, which is given too"), "{errors}");
    // A value on the command line replaces that of the file, under either name.
    let file = format!("{RECIPE}[train]\nppo_epochs = 2\n");
    assert_eq!(parse("r.toml", &file, &["train.updates=3".to_owned()]).unwrap().train.ppo_epochs, 3);
}

#[test]
fn phases_ramps_and_values_in_tables_accept_old_names() {
    let text = format!(
        "{RECIPE}train.kl_loss = {{ coef = 0.1 }}\nreference.kind = 'frozen'\n[[change]]\nat = 5\nset = ['train.updates=2', \
         'train.loss={{kind=\"grpo\",clip_low=0.1}}']\n[[ramp]]\nkey = 'train.kl_loss.coef'\nfrom = 0.1\nto = 0.2\nend = 9\n"
    );
    let (plan, told) = warned(|| parse("r.toml", &text, &[]).unwrap_or_else(|errors| panic!("{errors}")));
    assert!(told.iter().any(|line| line.contains("r.toml:4:19: `train.kl_loss.coef` is now `train.kl_loss.beta`")), "{told:?}");
    let sets = ["train.ppo_epochs=2", "train.loss={ epsilon = 0.1, kind = \"grpo\" }"];
    assert_eq!((&plan.change[0].set[..], plan.ramp[0].key.as_str()), (&sets.map(str::to_owned)[..], "train.kl_loss.beta"));
    assert!(plan.changes("train.ppo_epochs") && !plan.to_toml().contains("clip_low"), "{}", plan.to_toml());
    let both = text.replace("clip_low=0.1", "clip_low=0.1,epsilon=0.2");
    let errors = parse("r.toml", &both, &[]).unwrap_err().to_string();
    assert!(errors.contains("`train.loss.clip_low` is the old name of `train.loss.epsilon`, which is given too"), "{errors}");
}

#[test]
fn every_old_name_is_tested_here() {
    fn collect(schema: &Value, names: &mut BTreeSet<String>) {
        for (key, of) in schema["properties"].as_object().into_iter().flatten() {
            if of["deprecated"] == true {
                names.insert(key.clone());
            }
            collect(of, names);
        }
        let within = schema["oneOf"].as_array().into_iter().flatten().chain(schema.get("items"));
        within.for_each(|schema| collect(schema, names));
    }
    let mut declared = BTreeSet::new();
    collect(&schema(), &mut declared);
    let tested = RENAMED.iter().map(|(_, old, ..)| old.rsplit_once('.').unwrap().1.to_owned()).collect();
    assert_eq!(declared, tested);
}
