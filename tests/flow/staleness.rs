//! Law V2: no token older than `max_staleness` versions reaches the optimizer. The real runner is
//! driven with adversarial lengths, delays and drops; the trainer asserts the bound for every
//! token, and the test once more. Law D4: the ledger balances at every step.

use std::sync::{Arc, Mutex};

use proptest::prelude::*;
use rollflow::algo::filters::Verdict;
use rollflow::flow::Capacity;
use rollflow::flow::RunError;
use rollflow::prelude::*;
use rollflow::rollout::Admission;
use rollflow::rollout::Totals;
use rollflow::stages::train::{OnStale, staleness};
use rollflow::train::{BackendState, ForwardBackward};

use crate::scripted::{Script, draw, pause};
use crate::support::backend::{Asked, Counting};

#[derive(Clone, Debug)]
struct Case {
    bound: u64,
    /// Groups between entry and publish; what the bound allows unless a test widens it.
    window: Option<u64>,
    groups: u64,
    sync_every: u64,
    steps: u64,
    capacity: usize,
    /// Of a hundred groups, so many are dropped.
    dropped: u64,
    /// If true, tokens are of the oldest versions that may sample them.
    older: bool,
    seed: u64,
    slow: [u64; 3],
    on_stale: OnStale,
    /// What a stage of the user's own does to the scored groups from the fifth on.
    tampers: Tampers,
    /// Tokens that the ledger counts too many from the start.
    miscounted: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tampers {
    Not,
    /// Removes a sample without a word.
    Removes,
    /// Drops a sample with a reason.
    Drops,
}

impl Default for Case {
    fn default() -> Self {
        Case {
            bound: 1,
            window: None,
            groups: 3,
            sync_every: 1,
            steps: 12,
            capacity: 4,
            dropped: 0,
            older: false,
            seed: 0,
            slow: [0; 3],
            on_stale: OnStale::Wait,
            tampers: Tampers::Not,
            miscounted: 0,
        }
    }
}

/// What a run's trained steps were: the largest lag of each, and the ledger's sums.
#[derive(Debug, Default)]
struct Seen {
    lags: Vec<u64>,
    groups: Vec<u64>,
    stale: u64,
    totals: Vec<Totals>,
    /// Samples of each trained group, and their advantages.
    advantages: Vec<Vec<Option<f64>>>,
    /// Steps with a checkpoint.
    saved: Arc<Mutex<Vec<u64>>>,
}

impl Case {
    fn run(&self) -> Result<Seen, RunError> {
        let seen = Seen::default();
        let seen = Arc::new(Mutex::new(seen));
        self.run_noting(&seen)?;
        Ok(std::mem::take(&mut *seen.lock().unwrap()))
    }

    fn run_noting(&self, seen: &Arc<Mutex<Seen>>) -> Result<(), RunError> {
        let Case { bound, groups, sync_every, seed, dropped, slow: [generator, reward, trainer], .. } = *self;
        let per_version = groups * sync_every;
        let window = self.window.unwrap_or((bound + 1) * per_version);
        let admission = Admission::new(per_version, window, None).bounded(bound);
        let (publisher, published) = weights();
        let script = Script {
            weights: published,
            admission: admission.clone(),
            seed,
            samples: 2,
            longest: 6,
            slowest: generator,
            older: self.older,
        };
        let slow = move |_: &_, state: &BackendState| {
            pause(draw(&[state.step], trainer));
            ForwardBackward::default()
        };
        let saved = seen.lock().unwrap().saved.clone();
        let hears = move |asked| {
            if let Asked::Save(step) = asked {
                saved.lock().unwrap().push(step);
            }
        };
        let backend = Counting { forward: Box::new(slow), hears: Box::new(hears), ..Counting::default() };
        if self.miscounted > 0 {
            let mut progress = serde_json::to_value(admission.progress()).unwrap();
            progress["ledger"]["generated"] = self.miscounted.into();
            admission.restore(serde_json::from_value(progress).unwrap());
        }
        let folder = tempfile::tempdir().unwrap();
        let trainer = Trainer::new(backend).advantages(GroupMean::default());
        let trainer = trainer.steps(self.steps).sync_every(sync_every).on_stale(self.on_stale);
        let trainer = trainer.checkpoints(folder.path(), None);
        let score = move |sample: &Sample| {
            pause(draw(&[seed, sample.group_index, 3], reward));
            f64::from(sample.index)
        };
        let keep = move |group: &Group| match draw(&[seed, group.id(), 4], 100) {
            drawn if drawn < dropped => Verdict::Drop("drawn".into()),
            _ => Verdict::Keep,
        };
        let note = seen.clone();
        let tampers = self.tampers;
        let tamper = move |mut scored: Scored| {
            match tampers {
                Tampers::Drops => drop(scored.drop_samples("duplicate", |sample| sample.group_index > 4 && sample.index == 0)),
                Tampers::Removes if scored.group().id() > 4 => {
                    let mut group = scored.group().clone();
                    group.samples.pop();
                    scored = Scored::new(group).unwrap();
                }
                _ => {}
            }
            scored
        };

        let mut flow = Flow::new("staleness").admission(&admission);
        flow.capacity(Capacity::items(self.capacity));
        let prompts = flow.source("prompts", Prompts::addition(1, seed).unwrap());
        let answered = flow.stage("generate", prompts, script);
        let scored = flow.stage("reward", answered, Reward::each(score));
        let scored = flow.stage("tamper", scored, map(tamper));
        let kept = flow.stage("filter", scored, Filter::by(keep));
        let batches = flow.stage("batch", kept, Batcher::groups(groups as usize));
        let trained = flow.stage("train", batches, trainer);
        let synced = flow.stage("sync", trained, WeightSync::to(publisher));
        flow.sink("note", synced, move |step: Trained<u64>| {
            let mut note = note.lock().unwrap();
            let counted = |sample: &&Sample| sample.loss_mask.iter().any(|mask| *mask > 0.0);
            note.lags.extend(step.batch.samples().filter(counted).filter_map(|sample| staleness(sample, step.version)).max());
            note.groups.extend(step.batch.groups.iter().map(Group::id));
            note.stale += step.batch.dropped.iter().filter(|dropped| dropped.reason == "stale").count() as u64;
            note.totals.extend(step.totals);
            let advantages = |group: &Group| group.samples.iter().map(|sample| sample.advantage).collect();
            note.advantages.extend(step.batch.groups.iter().map(advantages));
        });
        flow.run(Until::finished())?;
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn no_lengths_delays_or_drops_break_the_bound(
        bound in 0u64..4, groups in 1u64..5, sync_every in 1u64..4, capacity in 1usize..9, dropped in 0u64..60, older in any::<bool>(),
        seed in any::<u64>(), slow in [0u64..400, 0u64..400, 0u64..800],
    ) {
        let case = Case { bound, groups, sync_every, capacity, dropped, older, seed, slow, ..Case::default() };
        let seen = case.run().map_err(|error| TestCaseError::fail(error.to_string()))?;
        prop_assert!(seen.lags.iter().all(|lag| *lag <= bound), "{:?}", seen.lags);
        prop_assert_eq!(seen.groups.len() as u64, groups * case.steps);
        prop_assert!(seen.groups.is_sorted(), "law D6: trained in the order of entry");
        for totals in seen.totals {
            prop_assert_eq!(totals.imbalance(), (0, 0), "law D4: {:?}", totals);
        }
    }
}

/// One group more than the window may hold, so that generators run ahead of the trainer.
fn too_wide(on_stale: OnStale) -> Case {
    Case { bound: 1, window: Some(24), slow: [0, 0, 2000], steps: 20, on_stale, ..Case::default() }
}

#[test]
fn a_window_that_cannot_hold_the_bound_is_caught_at_the_trainer_with_the_sample_named() {
    let error = too_wide(OnStale::Wait).run().unwrap_err().to_string();
    assert!(error.contains("tokens are too old: sample") && error.contains("version"), "{error}");
}

#[test]
fn stale_groups_are_dropped_and_counted_if_that_is_the_policy() {
    let seen = too_wide(OnStale::Drop).run().unwrap();
    assert!(seen.stale > 0 && seen.lags.iter().all(|lag| *lag <= 1), "{seen:?}");
    assert_eq!(seen.totals.last().unwrap().imbalance(), (0, 0));
    assert_eq!(seen.totals.last().unwrap().groups.get(&rollflow::rollout::Fate::Stale), Some(&seen.stale));
}

#[test]
fn stale_tokens_are_masked_and_counted_if_that_is_the_policy() {
    // The generator is the slow one, so that weights change within a group and only a part of it gets too old.
    let seen = Case { bound: 0, slow: [400, 0, 400], ..too_wide(OnStale::Mask) }.run().unwrap();
    let masked = seen.totals.last().unwrap().tokens.get(&rollflow::rollout::Fate::Masked).copied();
    assert!(masked.is_some_and(|tokens| tokens > 0), "{seen:?}");
}

/// Law D4, in builds without debug assertions too.
#[test]
fn samples_that_disappear_end_the_run_before_they_are_trained_and_the_error_says_what_to_call() {
    let seen = Arc::default();
    let error = Case { tampers: Tampers::Removes, ..Case::default() }.run_noting(&seen).unwrap_err().to_string();
    for part in ["stage \"train\"", "group 5", "drop_samples"] {
        assert!(error.contains(part), "{part} is missing: {error}");
    }
    let seen = seen.lock().unwrap();
    assert_eq!((&seen.groups[..], &seen.saved.lock().unwrap()[..]), (&[0, 1, 2][..], &[1][..]), "the last whole step is saved");
}

#[test]
fn dropped_samples_are_counted_and_advantages_are_computed_over_the_rest() {
    let seen = Case { tampers: Tampers::Drops, ..Case::default() }.run().unwrap();
    let last = seen.totals.last().unwrap();
    assert!(last.imbalance() == (0, 0) && last.tokens[&rollflow::rollout::Fate::Filtered] > 0, "law D4: {last:?}");
    assert!(seen.advantages[..5].iter().all(|group| group.len() == 2 && group[0] != Some(0.0)));
    assert!(seen.advantages[5..].iter().all(|group| group[..] == [Some(0.0)]), "{:?}", seen.advantages);
}

#[test]
fn a_ledger_that_does_not_balance_ends_the_run_and_saves_nothing() {
    let seen = Arc::default();
    let error = Case { miscounted: 7, ..Case::default() }.run_noting(&seen).unwrap_err().to_string();
    assert!(error.contains("the ledger does not balance: 7 of"), "{error}");
    let seen = seen.lock().unwrap();
    assert!(seen.groups.is_empty() && seen.saved.lock().unwrap().is_empty());
}
