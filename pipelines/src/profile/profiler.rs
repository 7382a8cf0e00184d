//! Gathers a profile while a run lasts.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;
use rollflow::engine::{Load, LocalEngine};
use rollflow::flow::{Report, State};
use rollflow::prelude::*;
use rollflow::stages::train::Trained;

use super::{Answers, ItemTimes, Profile, Recorded, fit_decode};

/// The stages that take a message at a time and are timed as a whole.
const OTHERS: [&str; 8] = ["reward", "filter", "pairs", "reference", "teacher", "batch", "sync", "log"];

/// Newest steps of engines and of the trainer, and newest groups, that a profile is made of.
const NEWEST: [usize; 3] = [20_000, 2_000, 2_048];

/// Gathers what a profile needs while a run lasts. Clones gather for the same one.
#[derive(Clone, Default)]
pub struct Profiler(Arc<Mutex<Gathered>>);

#[derive(Default)]
struct Gathered {
    loads: VecDeque<Load>,
    /// Tokens, seconds in passes and seconds of the update.
    steps: VecDeque<(usize, f64, f64)>,
    /// Number of all steps.
    count: u64,
    /// Tokens and reward of each sample, with the group's number.
    answers: VecDeque<(u64, Vec<(usize, f64)>)>,
}

fn keep<T>(newest: &mut VecDeque<T>, most: usize, item: T) {
    newest.push_back(item);
    if newest.len() > most {
        newest.pop_front();
    }
}

impl Profiler {
    /// Looks at the engine's steps.
    pub fn observes(&self, generator: Generator<LocalEngine>) -> Generator<LocalEngine> {
        let gathered = self.0.clone();
        generator.each_step(move |load| keep(&mut gathered.lock().loads, NEWEST[0], load))
    }

    /// Looks at a trained step.
    pub fn look<W>(&self, step: &Trained<W>) {
        let mut gathered = self.0.lock();
        gathered.count += 1;
        keep(&mut gathered.steps, NEWEST[1], (step.batch.tokens(), step.seconds - step.update_seconds, step.update_seconds));
        // Those that a step learned from stay, however many a filter drops.
        for dropped in &step.batch.dropped {
            let rewards = dropped.rewards.iter().copied().chain(std::iter::repeat(0.0));
            keep(&mut gathered.answers, NEWEST[2], (dropped.id, dropped.lengths.iter().copied().zip(rewards).collect()));
        }
        for group in &step.batch.groups {
            let answer = |sample: &Sample| (sample.generated(), sample.reward.unwrap_or(0.0));
            keep(&mut gathered.answers, NEWEST[2], (group.id(), group.samples.iter().map(answer).collect()));
        }
    }

    /// The profile of what was seen, with the times of the other stages from the `report`; `None` without a
    /// step of a local engine and of the trainer.
    pub fn profile(&self, report: &Report) -> Option<Profile> {
        let gathered = self.0.lock();
        if gathered.loads.is_empty() || gathered.answers.iter().all(|(_, answers)| answers.is_empty()) {
            return None;
        }
        let per_item = |name: &&str| {
            let stage = report.stage(name)?;
            let item = stage.time().of(State::Busy) as f64 / 1e9 / stage.items_in.max(1) as f64;
            Some(((*name).to_owned(), ItemTimes { item, token: 0.0 }))
        };
        let mut stages: BTreeMap<_, _> = OTHERS.iter().filter_map(per_item).collect();
        stages.insert("train".to_owned(), trainer_times(gathered.steps.iter().copied()));
        let mut answers: Vec<_> = gathered.answers.iter().filter(|(_, answers)| !answers.is_empty()).cloned().collect();
        answers.sort_by_key(|(ordinal, _)| *ordinal);
        Some(Profile {
            decode: fit_decode(gathered.loads.iter().copied()),
            stages,
            answers: Answers::Recorded(answers.into_iter().map(|(_, group)| group).collect()),
            recorded: Some(Recorded { steps: gathered.count, seconds: report.wall as f64 / 1e9 }),
        })
    }
}

/// Fits the trainer's times to (tokens, seconds in passes, seconds of the update) of each step.
fn trainer_times(steps: impl ExactSizeIterator<Item = (usize, f64, f64)> + Clone) -> ItemTimes {
    let sum = |of: fn((usize, f64, f64)) -> f64| steps.clone().map(of).sum::<f64>();
    ItemTimes {
        item: sum(|step| step.2) / steps.len().max(1) as f64,
        token: sum(|step| step.1) / sum(|step| step.0 as f64).max(1.0),
    }
}
