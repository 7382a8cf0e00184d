//! Law V2: no token older than `max_staleness` versions reaches the optimizer. The real runner is driven with adversarial lengths, delays and
//! drops; the trainer asserts the bound for every token, and the test once more. Law D4: the ledger balances at every step.
#![allow(clippy::unwrap_used)]

mod scripted;
mod support;

use std::sync::{Arc, Mutex};

use proptest::prelude::*;
use rollflow::flow::RunError;
use rollflow::prelude::*;
use rollflow::stages::Totals;
use rollflow::stages::train::{OnStale, staleness};
use rollflow::train::{BackendState, ForwardBackward};

use scripted::{Script, draw, pause};
use support::backend::Counting;

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
    seed: u64,
    slow: [u64; 3],
    on_stale: OnStale,
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
            seed: 0,
            slow: [0; 3],
            on_stale: OnStale::Wait,
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
}

impl Case {
    fn run(&self) -> Result<Seen, RunError> {
        let Case { bound, groups, sync_every, seed, dropped, slow: [generator, reward, trainer], .. } = *self;
        let per_version = groups * sync_every;
        let window = self.window.unwrap_or((bound + 1) * per_version);
        let admission = Admission::new(per_version, window, None).bounded(bound);
        let (publisher, published) = weights();
        let script =
            Script { weights: published, admission: admission.clone(), seed, samples: 2, longest: 6, slowest: generator };
        let slow = move |_: &_, state: &BackendState| {
            pause(draw(&[state.step], trainer));
            ForwardBackward::default()
        };
        let backend = Counting { forward: Box::new(slow), ..Counting::default() };
        let trainer = Trainer::new(backend).group_relative(AdvantageConfig::default());
        let trainer = trainer.steps(self.steps).sync_every(sync_every).admission(&admission).on_stale(self.on_stale);
        let score = move |sample: &Sample| {
            pause(draw(&[seed, sample.group_index, 3], reward));
            f64::from(sample.index)
        };
        let keep = move |group: &Group| match draw(&[seed, group.id(), 4], 100) {
            drawn if drawn < dropped => Verdict::Drop("drawn".into()),
            _ => Verdict::Keep,
        };
        let seen: Arc<Mutex<Seen>> = Arc::default();
        let note = seen.clone();

        let mut flow = Flow::new("staleness");
        flow.capacity(Capacity::items(self.capacity));
        let prompts = flow.source("prompts", Prompts::addition(1, seed).unwrap().admitted_by(&admission));
        let answered = flow.stage("generate", prompts, script);
        let scored = flow.stage("reward", answered, Reward::each(score));
        let kept = flow.stage("filter", scored, Filter::by(keep));
        let batches = flow.stage("batch", kept, Batcher::groups(groups as usize).in_order().admission(&admission));
        let trained = flow.stage("train", batches, trainer);
        let synced = flow.stage("sync", trained, WeightSync::to(publisher).admission(&admission));
        flow.sink("note", synced, move |step: Trained<u64>| {
            let mut note = note.lock().unwrap();
            let counted = |sample: &&Sample| sample.loss_mask.iter().any(|mask| *mask > 0.0);
            note.lags.extend(step.batch.samples().filter(counted).filter_map(|sample| staleness(sample, step.version)).max());
            note.groups.extend(step.batch.groups.iter().map(Group::id));
            note.stale += step.batch.dropped.iter().filter(|dropped| dropped.reason == "stale").count() as u64;
            note.totals.extend(step.totals);
        });
        flow.run(Until::finished())?;
        Ok(std::mem::take(&mut *seen.lock().unwrap()))
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn no_lengths_delays_or_drops_break_the_bound(
        bound in 0u64..4, groups in 1u64..5, sync_every in 1u64..4, capacity in 1usize..9, dropped in 0u64..60,
        seed in any::<u64>(), slow in [0u64..400, 0u64..400, 0u64..800],
    ) {
        let case = Case { bound, groups, sync_every, capacity, dropped, seed, slow, ..Case::default() };
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
    assert!(error.contains("law V2 is broken: sample") && error.contains("version"), "{error}");
}

#[test]
fn stale_groups_are_dropped_and_counted_if_that_is_the_policy() {
    let seen = too_wide(OnStale::Drop).run().unwrap();
    assert!(seen.stale > 0 && seen.lags.iter().all(|lag| *lag <= 1), "{seen:?}");
    assert_eq!(seen.totals.last().unwrap().imbalance(), (0, 0));
    assert_eq!(seen.totals.last().unwrap().groups.get(&rollflow::stages::Fate::Stale), Some(&seen.stale));
}

#[test]
fn stale_tokens_are_masked_and_counted_if_that_is_the_policy() {
    // The generator is the slow one, so that weights change within a group and only a part of it gets too old.
    let seen = Case { bound: 0, slow: [400, 0, 400], ..too_wide(OnStale::Mask) }.run().unwrap();
    let masked = seen.totals.last().unwrap().tokens.get(&rollflow::stages::Fate::Masked).copied();
    assert!(masked.is_some_and(|tokens| tokens > 0), "{seen:?}");
}
