//! `[[change]]` and `[[ramp]]`: settings that change during a run. A step's plan is a pure function
//! of its number, so that nothing needs saving and a resumed run does the same (law C2). A change that is
//! ordered during the run begins at a step that was not asked for yet, and is written into the recipe.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;
use toml::Value;

use super::load::parse;
use super::plan::{Pipeline, Plan};
use crate::settings::declare::{choices, section};
use crate::settings::error::{Place, Problem, RecipeError, RecipeErrors};
use crate::settings::renames::{self, Renames};
use crate::settings::section::join;
use crate::settings::setting::{FINITE, GIVEN, Limit};

/// Keys, and sections with all keys in them, that a step may have other values of than the step before.
const CHANGEABLE: &str = "train.lr train.schedule train.loss train.entropy_coef train.top_entropy \
     train.off_policy_threshold train.kl_loss train.kl_reward train.advantage train.loss_aggregation \
     train.proximal train.correction train.reject train.ppo_epochs train.minibatches pairs \
     teacher.coef teacher.discount teacher.rewards teacher.top_k teacher.beta generate.temperature \
     sft.lr sft.schedule reward_model.lr reward_model.schedule reward_model.center observe.log_every observe.rollouts_every";

/// Keys of [`CHANGEABLE`] that the steps of a pipeline read. A supervised phase before
/// reinforcement counts its steps separately.
fn changeable(pipeline: Pipeline) -> impl Iterator<Item = &'static str> {
    let trained = match pipeline {
        Pipeline::Sft => "sft",
        Pipeline::RewardModel => "reward_model",
        _ => "train",
    };
    CHANGEABLE.split_whitespace().filter(move |key| match key.split('.').next() {
        Some(section @ ("sft" | "reward_model")) => section == trained,
        Some("observe") => true,
        // Other pipelines read one temperature, at the start.
        Some("generate") => pipeline.reinforces(),
        _ => trained == "train",
    })
}

const LATER: Limit<u64> = Limit { text: "2 or more", holds: |step| *step >= 2 };
const STEP: Limit<u64> = Limit { text: "1 or more", holds: |step| *step >= 1 };
const SETS: Limit<Vec<String>> =
    Limit { text: "at least one KEY=VALUE", holds: |sets| !sets.is_empty() && sets.iter().all(|set| set.contains('=')) };

section! {
    /// A phase: keys with other values from a step on.
    pub struct Change {
        /// First step of the phase.
        at: u64 = 0, LATER;
        /// Keys and values, as after `--set` on the command line: `"train.loss={ kind = 'dapo' }"`.
        /// Earlier phases stay in effect.
        set: Vec<String> = Vec::new(), SETS;
    }
}

section! {
    /// A number that changes over the steps.
    pub struct Ramp {
        /// Key of the number, such as `train.entropy_coef`.
        key: String = String::new(), GIVEN;
        /// Value up to step `begin`.
        from: f64 = 0.0, FINITE;
        /// Value from step `end`.
        to: f64 = 0.0, FINITE;
        /// Step at which the change begins.
        begin: u64 = 1, STEP;
        /// Step at which the change ends.
        end: u64 = 0, LATER;
        /// Course of the change.
        shape: Shape = Shape::default();
    }
}

choices! {
    /// Course of a number from one value to another.
    pub enum Shape {
        /// in a straight line.
        "linear" => Linear,
        /// along half a cosine: slow, fast, slow.
        "cosine" => Cosine,
        /// by the same factor at every step; both ends must be above 0.
        "geometric" => Geometric,
    }
}

impl Ramp {
    /// Returns the value in a step.
    pub fn at(&self, step: u64) -> f64 {
        let (passed, steps) = (step.saturating_sub(self.begin), self.end.saturating_sub(self.begin).max(1));
        let x = (passed as f64 / steps as f64).min(1.0);
        let (from, to) = (self.from, self.to);
        match self.shape {
            _ if x == 1.0 => to,
            Shape::Linear => from + x * (to - from),
            Shape::Cosine => from + 0.5 * (1.0 - (std::f64::consts::PI * x).cos()) * (to - from),
            Shape::Geometric => from * (to / from).powf(x),
        }
    }
}

impl Plan {
    /// Returns true if this key or section, or one inside, changes in some step.
    pub fn changes(&self, section: &str) -> bool {
        let sets = self.change.iter().flat_map(|change| &change.set).map(|set| key_of(set));
        sets.chain(self.ramp.iter().map(|ramp| ramp.key.as_str())).any(|key| inside(key, section))
    }
}

/// The key of `KEY=VALUE`.
fn key_of(set: &str) -> &str {
    set.split('=').next().unwrap_or_default().trim()
}

/// The value of `KEY=VALUE`, unless it is a bare word, which is no TOML.
fn value_of(text: &str) -> Option<Value> {
    format!("value={text}").parse::<toml::Table>().ok()?.remove("value")
}

/// Returns true if `KEY=VALUE` sets this key, by itself or in a table.
fn sets(set: &str, key: &str) -> bool {
    let Some((section, text)) = set.split_once('=') else { return false };
    match key.strip_prefix(section.trim()) {
        Some("") => true,
        Some(rest) => rest
            .strip_prefix('.')
            .zip(value_of(text))
            .is_some_and(|(rest, value)| rest.split('.').try_fold(&value, |value, key| value.get(key)).is_some()),
        None => false,
    }
}

/// The problem of a change at `place` whose key has a ramp.
fn overridden(ramps: &[Ramp], place: &str, set: &str) -> Option<Problem> {
    let key = &ramps.iter().find(|ramp| sets(set, &ramp.key))?.key;
    let message = format!("`{key}` has its value of every step by [[ramp]], so that a change of it would have no effect");
    Some(Problem::of(place, message, "leave out the change, or the ramp"))
}

/// Returns true if a key is in a section, or is the section.
fn inside(key: &str, section: &str) -> bool {
    key.strip_prefix(section).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// The plan of every step. Clones share it, with what is added later.
#[derive(Clone, Debug)]
pub struct Timeline {
    phases: Arc<Mutex<Phases>>,
    ramps: Arc<[Ramp]>,
}

#[derive(Debug)]
struct Phases {
    all: Vec<Phase>,
    /// The last step whose plan was asked for.
    trained: u64,
    /// The last step whose completions were sampled.
    sampled: u64,
}

#[derive(Clone, Debug)]
struct Phase {
    /// First step of the phase.
    at: u64,
    set: Vec<String>,
    plan: Arc<Plan>,
    text: String,
}

impl Phases {
    /// The phases from `first` on by these changes.
    fn of(first: Phase, mut changes: Vec<Change>) -> Result<Vec<Phase>, RecipeErrors> {
        changes.sort_by_key(|change| change.at);
        let mut all = vec![first];
        for Change { at, set } in changes {
            let before = all.last().map_or("", |phase| &phase.text);
            let plan = parse("the recipe", before, &set)?;
            all.push(Phase { at, set, text: plan.to_toml(), plan: plan.into() });
        }
        Ok(all)
    }

    fn at(&self, step: u64) -> &Phase {
        let later = self.all.partition_point(|phase| phase.at <= step);
        &self.all[later.max(1) - 1]
    }
}

impl Timeline {
    /// Makes the timeline of a loaded plan, or returns the errors of its changes.
    pub fn of(plan: &Plan) -> Result<Self, RecipeErrors> {
        let base = Plan { change: Vec::new(), ramp: Vec::new(), ..plan.clone() };
        let first = Phase { at: 1, set: Vec::new(), text: base.to_toml(), plan: base.into() };
        let phases = Phases { all: Phases::of(first, plan.change.clone())?, trained: 0, sampled: 0 };
        Ok(Timeline { phases: Arc::new(Mutex::new(phases)), ramps: plan.ramp.clone().into() })
    }

    /// Returns true if every step has the same plan.
    pub fn is_constant(&self) -> bool {
        self.phases.lock().all.len() == 1 && self.ramps.is_empty()
    }

    /// Returns the plan of a step, which counts from 1, to its trainer. With ramps it is parsed again,
    /// which takes a millisecond. Two numbers that are valid at both ends may contradict each other in
    /// between.
    pub fn at(&self, step: u64) -> Result<Arc<Plan>, RecipeErrors> {
        let mut phases = self.phases.lock();
        phases.trained = phases.trained.max(step);
        self.ramped(phases.at(step), step)
    }

    /// Returns the plan by which completions for a step are sampled.
    pub fn sampling_at(&self, step: u64) -> Result<Arc<Plan>, RecipeErrors> {
        let mut phases = self.phases.lock();
        phases.sampled = phases.sampled.max(step);
        self.ramped(phases.at(step), step)
    }

    /// Returns the plan of a step, without ramps, to what only looks at the step. Changes don't wait for it.
    pub fn seen_at(&self, step: u64) -> Arc<Plan> {
        self.phases.lock().at(step).plan.clone()
    }

    fn ramped(&self, phase: &Phase, step: u64) -> Result<Arc<Plan>, RecipeErrors> {
        if self.ramps.is_empty() {
            return Ok(phase.plan.clone());
        }
        let sets: Vec<String> = self.ramps.iter().map(|ramp| format!("{}={:?}", ramp.key, ramp.at(step))).collect();
        parse(&format!("the recipe as of step {step}"), &phase.text, &sets).map(Arc::new)
    }

    /// Returns true if a ramp gives this key its value.
    pub fn is_ramped(&self, key: &str) -> bool {
        self.ramps.iter().any(|ramp| ramp.key == key)
    }

    /// Adds a change that begins at the first step that is neither trained (up to `done`, or by this
    /// process) nor, if it changes how completions are sampled, sampled. `keep` gets the change before any
    /// step can have it, and may refuse it.
    ///
    /// # Errors
    /// Errors of `keep`, of the changed recipe, and of a key that has a ramp.
    pub fn amend<E: From<RecipeErrors>>(
        &self,
        set: Vec<String>,
        done: u64,
        keep: impl FnOnce(&Change) -> Result<(), E>,
    ) -> Result<u64, E> {
        let ramped = set.iter().filter_map(|set| overridden(&self.ramps, "change", set));
        RecipeErrors::unless_empty(ramped.map(|problem| problem.at(Place::Code)).collect::<Vec<RecipeError>>())?;
        let mut phases = self.phases.lock();
        let sampled = if set.iter().any(|set| inside(key_of(set), "generate")) { phases.sampled } else { 0 };
        let change = Change { at: (phases.trained.max(sampled).max(done) + 1).max(2), set };
        let before = phases.all[1..].iter().map(|phase| Change { at: phase.at, set: phase.set.clone() });
        let all = Phases::of(phases.all[0].clone(), before.chain([change.clone()]).collect())?;
        keep(&change)?;
        phases.all = all;
        Ok(change.at)
    }

    /// Plans of the phases, in the order of their steps, without ramps.
    pub fn plans(&self) -> Vec<Arc<Plan>> {
        self.phases.lock().all.iter().map(|phase| phase.plan.clone()).collect()
    }

    /// Returns the changes that begin at this step.
    pub fn begins(&self, step: u64) -> Vec<String> {
        let phases = self.phases.lock();
        phases.all.iter().filter(|phase| phase.at == step).flat_map(|phase| phase.set.clone()).collect()
    }

    /// Numbers of the ramps in a step, as `setting_` and the key with `_` for `.`, and from the first change
    /// on the number of changes.
    pub fn settings(&self, step: u64) -> BTreeMap<String, f64> {
        let ramps = self.ramps.iter().map(|ramp| (format!("setting_{}", ramp.key.replace('.', "_")), ramp.at(step)));
        let changes = self.phases.lock().all.iter().filter(|phase| phase.at <= step).count() - 1;
        let changes = (changes > 0).then(|| ("setting_changes".to_owned(), changes as f64));
        ramps.chain(changes).collect()
    }
}

/// Returns true if a key, or the section that it is, may have another value in a later step of a pipeline.
pub fn may_change(pipeline: Pipeline, key: &str) -> bool {
    changeable(pipeline).any(|section| inside(key, section))
}

/// Gives the keys of `[[change]]` and `[[ramp]]`, and those inside a change's value, their current names.
pub(super) fn rename_keys(plan: &mut Plan, renames: &Renames) {
    let current = |place: &str, key: &str| {
        let current = renames.path(key);
        if current != key {
            renames::warn(place, key, &current);
        }
        current
    };
    for (at, change) in plan.change.iter_mut().enumerate() {
        let current = |key: &str| current(&format!("change[{at}].set"), key);
        for set in &mut change.set {
            let Some((key, text)) = set.split_once('=') else { continue };
            let named = current(key.trim());
            let inside =
                value_of(text).and_then(|mut value| rename_inside(&mut value, &named, &current).then(|| value.to_string()));
            if named != key.trim() || inside.is_some() {
                *set = format!("{named}={}", inside.as_deref().unwrap_or(text));
            }
        }
    }
    for (at, ramp) in plan.ramp.iter_mut().enumerate() {
        ramp.key = current(&format!("ramp[{at}].key"), &ramp.key);
    }
}

/// Gives keys of tables in the value of `path` their current names, and returns true if it renamed any.
/// A key that is given under both names keeps them: the reader reports it.
fn rename_inside(value: &mut Value, path: &str, current: &impl Fn(&str) -> String) -> bool {
    let mut renamed = false;
    match value {
        Value::Array(items) => items.iter_mut().for_each(|item| renamed |= rename_inside(item, &format!("{path}[]"), current)),
        Value::Table(table) => {
            for key in table.keys().cloned().collect::<Vec<_>>() {
                let old = join(path, &key);
                let new = current(&old);
                let name = if new == old { &key } else { new.rsplit('.').next().unwrap_or(&key) };
                if name != key && table.contains_key(name) {
                    continue;
                }
                let Some(mut value) = table.remove(&key) else { continue };
                renamed |= rename_inside(&mut value, &new, current) || name != key;
                table.insert(name.to_owned(), value);
            }
        }
        _ => {}
    }
    renamed
}

/// Returns the problems of a plan's changes and ramps, by themselves and together with the values
/// that they change.
pub(super) fn problems(plan: &Plan) -> Vec<Problem> {
    let mut problems = Vec::new();
    let refuse_fixed = |problems: &mut Vec<Problem>, place: String, key: &str| {
        if !may_change(plan.pipeline, key) {
            let all: Vec<&str> = changeable(plan.pipeline).collect();
            let help = format!("these may change: {}", all.join(", "));
            problems.push(Problem::of(place, format!("`{key}` is the same in all steps"), help));
        }
    };
    for (at, change) in plan.change.iter().enumerate() {
        let place = format!("change[{at}].set");
        change.set.iter().for_each(|set| refuse_fixed(&mut problems, place.clone(), key_of(set)));
        problems.extend(change.set.iter().filter_map(|set| overridden(&plan.ramp, &place, set)));
    }
    for (at, ramp) in plan.ramp.iter().enumerate() {
        refuse_fixed(&mut problems, format!("ramp[{at}].key"), &ramp.key);
        if let Some(first) = plan.ramp[..at].iter().position(|other| other.key == ramp.key) {
            let message = format!("`ramp[{at}].key` is {:?}, as that of ramp {first} is", ramp.key);
            problems.push(Problem::of(format!("ramp[{at}].key"), message, "leave one of them out: a key has one ramp"));
        }
        if ramp.end <= ramp.begin {
            let message = format!("`ramp[{at}].end` is {}, not after its begin {}", ramp.end, ramp.begin);
            problems.push(Problem::of(format!("ramp[{at}].end"), message, "a ramp takes at least one step"));
        }
        if ramp.shape == Shape::Geometric && (ramp.from <= 0.0 || ramp.to <= 0.0) {
            let message = format!("`ramp[{at}]` is geometric from {:?} to {:?}", ramp.from, ramp.to);
            let help = "both ends must be above 0; choose another shape, or a small number";
            problems.push(Problem::of(format!("ramp[{at}].shape"), message, help));
        }
    }
    if !problems.is_empty() {
        return problems;
    }
    match Timeline::of(plan) {
        Ok(timeline) => plan.ramp.iter().enumerate().flat_map(|(at, ramp)| ends(&timeline, at, ramp)).collect(),
        Err(errors) => later("change", &errors),
    }
}

/// Returns the problems of a ramp's first and last value.
fn ends(timeline: &Timeline, at: usize, ramp: &Ramp) -> Vec<Problem> {
    let wrong = |(end, value): (&str, f64)| {
        let set = format!("{}={value:?}", ramp.key);
        let phases = timeline.phases.lock();
        let errors = phases.all.iter().find_map(|phase| parse("", &phase.text, std::slice::from_ref(&set)).err());
        errors.map_or_else(Vec::new, |errors| later(&format!("ramp[{at}].{end}"), &errors))
    };
    [("from", ramp.from), ("to", ramp.to)].into_iter().flat_map(wrong).collect()
}

/// Errors of a later step's plan, at the change or ramp that makes them.
fn later(key: &str, errors: &RecipeErrors) -> Vec<Problem> {
    errors.iter().map(|error| Problem::of(key, format!("in a later step {}", error.message), error.help.clone())).collect()
}
