//! Defaults that follow from the kind of model, each with the reason that `rollflow check` prints.
//!
//! A rate is written into the document before it is read, so that the resolved recipe of a run spells it out.

use super::plan::{Pipeline, Plan};
use super::presets::{PRESETS, Preset};
use crate::settings::document::{Entry, Node, Table, Value};
use crate::settings::error::Place;
use crate::settings::section::Findings;

/// A value that a recipe left out and that follows from other keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Derived {
    /// The key, dotted from the top.
    pub key: String,
    /// The value, as TOML.
    pub value: String,
    /// Why it has this value.
    pub reason: String,
}

impl Derived {
    /// Creates a derived value of `key`, with its reason.
    pub fn of(key: impl Into<String>, value: impl ToString, reason: impl Into<String>) -> Self {
        Derived { key: key.into(), value: value.to_string(), reason: reason.into() }
    }
}

/// Learning rates by kind of model.
pub(crate) struct Rates {
    /// A small random model.
    pub(crate) random: f64,
    /// A Hugging Face model, all weights.
    pub(crate) full: f64,
    /// A Hugging Face model, adapters.
    pub(crate) adapters: f64,
}

/// Reinforcement and preferences. TRL (`GRPOConfig`, `DPOConfig`) and verl (`actor.optim.lr`) take
/// 1e-6 for all weights. Adapters take ten times as much. The arithmetic recipes learn with 3e-4.
pub(crate) const POLICY: Rates = Rates { random: 3e-4, full: 1e-6, adapters: 1e-5 };
/// Imitation. TRL takes 2e-5 (`SFTConfig`) and 2e-4 for adapters (its script `sft.py`).
pub(crate) const IMITATION: Rates = Rates { random: 1e-3, full: 2e-5, adapters: 2e-4 };
/// Reward models. TRL's script `reward_modeling.py` takes 1e-5, and 1e-4 for adapters.
pub(crate) const REWARD_MODEL: Rates = Rates { random: 1e-3, full: 1e-5, adapters: 1e-4 };
/// Critics. verl (`critic.optim.lr`) takes 1e-5. All weights of a critic are trained, even if the
/// policy has adapters.
pub(crate) const CRITIC: Rates = Rates { random: 5e-4, full: 1e-5, adapters: 1e-5 };

/// From so many parameters on, imitation of a popular model takes half the rate.
const LARGE: u64 = 2_000_000_000;

/// Writes the rates into `root` that the recipe leaves out. A recipe without a readable model gets none.
pub(crate) fn fill(root: &mut Node) -> Vec<Derived> {
    let Value::Table(table) = &mut root.value else { return Vec::new() };
    let Some(model) = Model::of(table) else { return Vec::new() };
    let supervised = is(table, Pipeline::Sft) || is(table, Pipeline::RewardModel);
    if !supervised && !table.contains_key("train") {
        table.insert("train".to_owned(), entry(Value::Table(Table::new()), &root.place));
    }
    let mut derived = if is(table, Pipeline::Dpo) { preferences(table, &root.place) } else { Vec::new() };
    if is(table, Pipeline::Distill) {
        derived.extend(unrewarded(table, &root.place));
    }
    let sections = [("train", &POLICY), ("sft", &IMITATION), ("reward_model", &REWARD_MODEL), ("critic", &CRITIC)];
    // In that pipeline [sft] is the data of [mix], without a phase.
    let mixed = is(table, Pipeline::GrpoOffline);
    for (name, rates) in sections.into_iter().filter(|(name, _)| *name != "sft" || !mixed) {
        let Some(Node { value: Value::Table(section), place }) = table.get_mut(name).map(|entry| &mut entry.node) else {
            continue;
        };
        if section.contains_key("lr") {
            continue;
        }
        let (lr, reason) = model.rate(name, rates);
        section.insert("lr".to_owned(), entry(Value::Float(lr), place));
        derived.push(Derived::of(format!("{name}.lr"), format!("{lr:?}"), reason));
    }
    derived
}

fn is(table: &Table, pipeline: Pipeline) -> bool {
    matches!(table.get("pipeline").map(|entry| &entry.node.value), Some(Value::Text(of)) if of == pipeline.word())
}

/// The loss and the reference of `pipeline = "dpo"`.
fn preferences(table: &mut Table, place: &Place) -> Vec<Derived> {
    let mut derived = Vec::new();
    let mut kind = |of: &mut Table, section: &str, word: &str, reason: &str| {
        if !of.contains_key("kind") {
            of.insert("kind".to_owned(), entry(Value::Text(word.to_owned()), place));
            derived.push(Derived::of(format!("{section}.kind"), format!("{word:?}"), reason));
        }
    };
    let mut needs_reference = true;
    if let Some(Value::Table(train)) = table.get_mut("train").map(|entry| &mut entry.node.value) {
        let loss = train.entry("loss".to_owned()).or_insert_with(|| entry(Value::Table(Table::new()), place));
        if let Value::Table(loss) = &mut loss.node.value {
            kind(loss, "train.loss", "dpo", "pipeline = \"dpo\"");
            let says = |key: &str, is: fn(&Value) -> bool| loss.get(key).is_some_and(|entry| is(&entry.node.value));
            needs_reference = !says("reference_free", |value| matches!(value, Value::Flag(true)))
                && !says("pair_loss", |value| matches!(value, Value::Text(of) if of == "sft"));
        }
    }
    if needs_reference {
        let reference = table.entry("reference".to_owned()).or_insert_with(|| entry(Value::Table(Table::new()), place));
        if let Value::Table(reference) = &mut reference.node.value {
            kind(reference, "reference", "frozen", "pairs are compared with the policy as it begins");
        }
    }
    derived
}

/// The reward of `pipeline = "distill"` without a section `[reward]`.
fn unrewarded(table: &mut Table, place: &Place) -> Option<Derived> {
    if table.contains_key("reward") {
        return None;
    }
    let kind = ("kind".to_owned(), entry(Value::Text("none".to_owned()), place));
    table.insert("reward".to_owned(), entry(Value::Table(Table::from([kind])), place));
    Some(Derived::of("reward.kind", "\"none\"", "pipeline = \"distill\" without [reward]"))
}

fn entry(value: Value, place: &Place) -> Entry {
    Entry { key_place: place.clone(), node: Node { value, place: place.clone() } }
}

/// Gives servers all completions that may be in flight if the recipe does not say how many. A fleet computes
/// more at a time than an engine of this process.
pub(crate) fn sequences(root: &Node, plan: &mut Plan) -> Vec<Derived> {
    let Value::Table(table) = &root.value else { return Vec::new() };
    if !plan.engine.is_remote() {
        return Vec::new();
    }
    let (all, mut derived) = (plan.most_in_flight().min(u32::MAX as usize), Vec::new());
    let mut give = |section: &str, to: &mut usize| {
        let given = table.get(section).map(|entry| &entry.node.value);
        if !matches!(given, Some(Value::Table(keys)) if keys.contains_key("max_num_seqs")) {
            *to = all;
            let key = format!("{section}.max_num_seqs");
            derived.push(Derived::of(key, all, "flow.window * generate.group_size, which servers divide among them"));
        }
    };
    give("generate", &mut plan.generate.max_num_seqs);
    plan.eval.iter_mut().for_each(|eval| give("eval", &mut eval.max_num_seqs));
    derived
}

/// Sections with a length, in steps or in epochs.
pub(crate) const LENGTHS: [&str; 3] = ["train", "sft", "reward_model"];

/// Keys that the key replaces where it is laid over them: of lengths the other, and what else names a model.
pub(crate) fn displaced(key: &str) -> &'static [&'static str] {
    match key.split_once('.') {
        Some((section, "steps")) if LENGTHS.contains(&section) => &["epochs"],
        Some((section, "epochs")) if LENGTHS.contains(&section) => &["steps"],
        Some(("model", "path")) => &["preset", "revision"],
        Some(("model", "preset")) => &["path", "revision"],
        _ => &[],
    }
}

/// Rejects a section with both `steps` and `epochs`, neither of which was laid over the other.
pub(crate) fn steps_or_epochs(root: &Node, findings: &mut Findings) {
    let Value::Table(table) = &root.value else { return };
    for section in LENGTHS {
        let Some(Value::Table(keys)) = table.get(section).map(|entry| &entry.node.value) else { continue };
        let (Some(_), Some(epochs)) = (keys.get("steps"), keys.get("epochs")) else { continue };
        let message = format!("there are both `{section}.steps` and `{section}.epochs`");
        findings.error(&epochs.key_place, &format!("{section}.epochs"), message, "leave one of them out".to_owned());
    }
}

/// Facts that rates depend on.
struct Model {
    /// If true, it is a Hugging Face model, else a small random one.
    pretrained: bool,
    preset: Option<&'static Preset>,
    adapters: bool,
}

impl Model {
    /// `None` where the recipe does not say which model.
    fn of(table: &Table) -> Option<Self> {
        let Value::Table(model) = &table.get("model")?.node.value else { return None };
        let text = |key: &str| match model.get(key).map(|entry| &entry.node.value) {
            Some(Value::Text(text)) => Some(text.as_str()),
            _ => None,
        };
        let pretrained = match text("kind") {
            Some("tiny") => false,
            Some("folder") => true,
            Some(_) => return None,
            None => ["path", "preset"].iter().any(|key| model.contains_key(*key)),
        };
        let named = |preset: &&Preset| text("preset") == Some(preset.name) || text("path") == Some(preset.id);
        let adapters = table.contains_key("lora");
        (pretrained || text("kind").is_some()).then(|| Model { pretrained, preset: PRESETS.iter().find(named), adapters })
    }

    /// Returns the rate of a section, with its reason.
    fn rate(&self, section: &str, rates: &Rates) -> (f64, &'static str) {
        let large = self.preset.is_some_and(|preset| preset.parameters() >= LARGE);
        match (self.pretrained, self.adapters, section) {
            (false, ..) => (rates.random, "a small random model"),
            (true, _, "critic") => (rates.full, "a Hugging Face model, a critic"),
            (true, true, _) => (rates.adapters, "a Hugging Face model, adapters"),
            (true, false, "sft") if large => {
                (rates.full / 2.0, "a Hugging Face model, full fine-tuning of 2 billion parameters or more")
            }
            (true, false, _) => (rates.full, "a Hugging Face model, full fine-tuning"),
        }
    }
}

impl Preset {
    /// The default learning rate of supervised training.
    pub fn sft_lr(&self, lora: bool) -> f64 {
        let model = Model { pretrained: true, preset: Preset::named(self.name), adapters: lora };
        model.rate("sft", &IMITATION).0
    }

    /// The default learning rate of reinforcement.
    pub fn rl_lr(&self, lora: bool) -> f64 {
        if lora { POLICY.adapters } else { POLICY.full }
    }
}
