//! Changes of a run's settings that a person orders while it runs. They are those that `[[change]]` may
//! make, and each is written into the run's recipe, so that a resume repeats it.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use parking_lot::Mutex;
use rollflow::observe::logs::{Every, last_step};
use rollflow::recipe::{Change, Plan, RecipeErrors, Timeline, may_change, parse, parse_with};
use rollflow::util::atomic_file;

use crate::registry::Registry;
use crate::run::RECIPE;
use crate::run::recipe_keys::flat;
use crate::validate::complaints;

/// Sections that decide what a run's graph is made of.
const BUILT: [&str; 2] = ["pairs", "teacher"];

/// Gives changes to the trainer that follows. Clones give them to the same one.
#[derive(Clone, Default)]
pub struct Changes(Arc<Mutex<Option<Followed>>>);

struct Followed {
    timeline: Timeline,
    registry: Registry,
}

/// Reason why a change is not made.
#[derive(Debug, thiserror::Error)]
pub enum ChangeError {
    /// Nothing follows changes.
    #[error("this run follows its recipe alone: it has not begun to train, has several ranks, or is the part of another run")]
    NotFollowed,
    /// Nothing would change.
    #[error("no change was given; give at least one KEY=VALUE")]
    Empty,
    /// The graph would be another.
    #[error("`{0}` decides what the run's graph is made of, which stays; end the run, and resume it with --set")]
    Built(String),
    /// The run is over before.
    #[error("the change would begin at step {at}, and the run has {steps}")]
    Late {
        /// First step that is not trained.
        at: u64,
        /// Steps of the run.
        steps: u64,
    },
    /// The changed recipe has errors.
    #[error("{0}")]
    Recipe(#[from] RecipeErrors),
    /// The recipe can't be read or written.
    #[error("{0}: {1}; nothing was changed")]
    File(String, std::io::Error),
}

impl Changes {
    /// Gives changes to this timeline from now on.
    pub fn follow(&self, timeline: &Timeline, registry: &Registry) {
        *self.0.lock() = Some(Followed { timeline: timeline.clone(), registry: registry.clone() });
    }

    /// How often something is logged: what a step's plan says, and what `plan` says until a trainer follows.
    pub fn every(&self, plan: &Plan, of: impl Fn(&Plan) -> u64 + Send + Sync + 'static) -> Every {
        let (followed, before) = (self.0.clone(), of(plan));
        Every::by_step(move |step| followed.lock().as_ref().map_or(before, |to| of(&to.timeline.seen_at(step))))
    }

    /// Sets keys, as after `--set`, from the next step on. Returns that step.
    pub fn order(&self, folder: &Path, set: Vec<String>) -> Result<u64, ChangeError> {
        let followed = self.0.lock();
        let Followed { timeline, registry } = followed.as_ref().ok_or(ChangeError::NotFollowed)?;
        if set.is_empty() {
            return Err(ChangeError::Empty);
        }
        let built = |set: &&String| BUILT.iter().any(|section| set.trim_start().starts_with(section));
        if let Some(set) = set.iter().find(built) {
            return Err(ChangeError::Built(set.clone()));
        }
        let done = last_step(&folder.join("metrics.jsonl")).unwrap_or(0);
        timeline.amend(set, done, |change| keep(folder, change, registry))
    }

    /// The keys that an order may set, with the values that the newest phase of the recipe has.
    pub fn possible(&self) -> BTreeMap<String, String> {
        let Some(timeline) = self.0.lock().as_ref().map(|followed| followed.timeline.clone()) else { return BTreeMap::new() };
        let Some(plan) = timeline.plans().pop() else { return BTreeMap::new() };
        let mut keys = flat(&plan.to_toml()).unwrap_or_default();
        let built = |key: &str| BUILT.iter().any(|section| key.starts_with(section));
        keys.retain(|key, _| may_change(plan.pipeline, key) && !built(key) && !timeline.is_ramped(key));
        keys
    }
}

/// Writes the recipe with one more change, if it is sound and leaves the graph as it was.
fn keep(folder: &Path, change: &Change, registry: &Registry) -> Result<(), ChangeError> {
    let path = folder.join(RECIPE);
    let failed = |error| ChangeError::File(path.display().to_string(), error);
    let text = std::fs::read_to_string(&path).map_err(failed)?;
    let before = parse(RECIPE, &text, &[])?;
    if change.at > before.steps() {
        return Err(ChangeError::Late { at: change.at, steps: before.steps() });
    }
    let mut plan = before.clone();
    plan.change.push(change.clone());
    let text = plan.to_toml();
    let plan = parse_with(RECIPE, &text, &[], |plan| complaints(registry, plan))?;
    if pairs(&plan)? != pairs(&before)? {
        return Err(ChangeError::Built(change.set.join(", ")));
    }
    atomic_file::write(&path, text).map_err(failed)
}

/// Returns true if some step learns from pairs.
fn pairs(plan: &Plan) -> Result<bool, RecipeErrors> {
    Ok(Timeline::of(plan)?.plans().iter().any(|plan| plan.pairing().is_some()))
}
