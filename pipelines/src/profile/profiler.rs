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
    steps: VecDeque<StepTimes>,
    /// Number of all steps.
    count: u64,
    /// Tokens and reward of each sample, with the group's number.
    answers: VecDeque<(u64, Vec<(usize, f64)>)>,
}

/// Size and seconds of a trained step.
#[derive(Clone, Copy)]
struct StepTimes {
    /// Tokens that passes went over, once for each PPO epoch.
    tokens: f64,
    /// Optimizer steps.
    updates: f64,
    /// Seconds until the last pass has ended, with the updates that passes wait for.
    passes: f64,
    /// Seconds of the last update and of the copy for the publish.
    update: f64,
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
        let times = StepTimes {
            tokens: step.batch.tokens() as f64 * step.ppo_epochs as f64,
            updates: step.updates as f64,
            passes: step.seconds - step.update_seconds,
            update: step.update_seconds,
        };
        keep(&mut gathered.steps, NEWEST[1], times);
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

/// Fits the trainer's times, of an update and of a token in a pass, to its steps: their sum is exact.
fn trainer_times(steps: impl ExactSizeIterator<Item = StepTimes> + Clone) -> ItemTimes {
    let sum = |of: fn(StepTimes) -> f64| steps.clone().map(of).sum::<f64>();
    let (all, updates) = (sum(|step| step.passes + step.update), sum(|step| step.updates).max(1.0));
    // The updates that passes wait for take as long as the last one, but no longer than all.
    let item = (sum(|step| step.update) / steps.len().max(1) as f64).min(all / updates);
    ItemTimes { item, token: (all - item * updates).max(0.0) / sum(|step| step.tokens).max(1.0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Times from three steps of 1000 tokens, 4 epochs of 2 minibatches each.
    fn times(passes: f64, update: f64) -> ItemTimes {
        let profiler = Profiler::default();
        for _ in 0..3 {
            let samples = vec![Sample::supervised(&[1; 600], &[1; 400])];
            let batch = Batch { groups: vec![Group { samples, ..Group::default() }], ..Batch::default() };
            assert_eq!(batch.tokens(), 1000);
            let (seconds, update_seconds) = (passes + update, update);
            let step = Trained::<()> { batch, ppo_epochs: 4, updates: 8, seconds, update_seconds, ..Trained::default() };
            profiler.look(&step);
        }
        trainer_times(profiler.0.lock().steps.iter().copied())
    }

    #[test]
    fn the_passes_and_updates_of_a_step_take_its_time_together() {
        // Passes of 1 ms a token, and 7 updates of 0.1 s that they wait for.
        let found = times(4.0 + 0.7, 0.1);
        assert!((found.item - 0.1).abs() < 1e-9 && (found.token - 1e-3).abs() < 1e-9, "{found:?}");
        // The copy for the publish takes longer than the passes.
        let found = times(1.0, 3.0);
        assert!((4.0 * 1000.0 * found.token + 8.0 * found.item - 4.0).abs() < 1e-9, "{found:?}");
    }
}
