//! The whole loop on a simulated machine, under faults, for thousands of seeds: whatever fails or
//! is interrupted, whenever, the run ends, says the root cause first (laws F3, F5, F6), and has
//! neither lost nor repeated a group nor trained a token that was too old (laws D2, D4, V2).
//! Generator, batcher, trainer and all between them are the real ones; only model and time are not.
//!
//! `FAULT_SEEDS` says how many seeds (300). A seed that fails is named, and makes the same run
//! again.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rollflow::algo::filters::Verdict;
use rollflow::engine::{Load, OnNewWeights, SimulatedEngine};
use rollflow::flow::Capacity;
use rollflow::flow::Report;
use rollflow::flow::{Ended, RunError, Simulation, State, WeightsTx};
use rollflow::prelude::*;
use rollflow::rollout::Admission;
use rollflow::rollout::Fate;
use rollflow::stages::generate::EngineSettings;
use rollflow::stages::reward::{FailurePolicy, OnFailure};
use rollflow::stages::train::OnStale;
use rollflow::stages::train::staleness;
use rollflow::train::TrainFuture;
use rollflow::train::{
    BackendState, CheckpointMetadata, ForwardBackward, OptimStep, SaveCheckpoint, SavedCheckpoint, SimulatedBackend, Snapshot,
    TrainBatch, TrainError,
};

/// Numbers drawn by a seed.
#[derive(Clone, Copy)]
struct Draws(u64);

impl Draws {
    /// The number that belongs to `key`, below `below`.
    fn at(self, key: u64, below: u64) -> u64 {
        let mixed = (self.0 ^ key.wrapping_mul(0x9E37_79B9_7F4A_7C15)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        ((mixed ^ (mixed >> 29)).wrapping_mul(0x94D0_49BB_1331_11EB) >> 33) % below.max(1)
    }

    /// From `low` to `high`, both included.
    fn between(self, key: u64, low: u64, high: u64) -> u64 {
        low + self.at(key, high - low + 1)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    Nothing,
    /// The reward panics on some samples, again and again.
    Reward,
    /// Some samples are lost.
    Lost,
    /// The backend fails at this step.
    Backend(u64),
    /// The filter panics on this group.
    Filter(u64),
    /// From this version on, the sync no longer says that it published.
    Sync(u64),
    /// The run is drained, or stopped, after so many milliseconds.
    Drain(u64),
    Stop(u64),
}

#[derive(Clone, Debug)]
struct Scenario {
    seed: u64,
    groups: usize,
    sync_every: u64,
    max_staleness: u64,
    over_sample: f64,
    window: u64,
    steps: u64,
    group_size: usize,
    slots: usize,
    workers: usize,
    capacity: usize,
    on_new_weights: OnNewWeights,
    on_stale: OnStale,
    parts: Option<usize>,
    fault: Fault,
}

impl Scenario {
    fn draw(seed: u64) -> Self {
        let draws = Draws(seed);
        let (groups, sync_every, max_staleness) = (draws.between(1, 1, 4), draws.between(2, 1, 3), draws.between(3, 0, 3));
        let steps = sync_every * draws.between(4, 2, 5);
        // A window that holds what a batch chooses from, and no more than the bound allows.
        let per_version = groups * sync_every;
        let wide = (max_staleness + 1) * per_version;
        // A round may have any number of groups more than its steps train.
        let more = if max_staleness == 0 { 4 } else { wide - per_version };
        let chosen_from = draws.between(5, groups, groups + more);
        let most = if max_staleness == 0 { per_version - groups + chosen_from } else { wide };
        let window = draws.between(6, per_version - groups + chosen_from, most);
        let fault = match draws.at(7, 7) {
            0 => Fault::Nothing,
            1 => Fault::Reward,
            6 => Fault::Lost,
            2 => Fault::Backend(draws.between(8, 1, steps)),
            3 => Fault::Filter(draws.at(8, groups * 3)),
            4 => Fault::Drain(draws.at(8, 4000)),
            5 => Fault::Sync(draws.between(8, 1, steps / sync_every)),
            _ => Fault::Stop(draws.at(8, 4000)),
        };
        let policies = [OnNewWeights::Swap, OnNewWeights::Recompute, OnNewWeights::Finish, OnNewWeights::Abort];
        Scenario {
            seed,
            groups: groups as usize,
            sync_every,
            max_staleness,
            over_sample: chosen_from as f64 / groups as f64,
            window,
            steps,
            group_size: draws.between(9, 1, 4) as usize,
            slots: draws.between(10, 1, 12) as usize,
            workers: draws.between(14, 1, 3) as usize,
            capacity: draws.between(11, 1, 4) as usize,
            on_new_weights: policies[draws.at(12, 4) as usize],
            on_stale: [OnStale::Wait, OnStale::Drop, OnStale::Mask][draws.at(13, 3) as usize],
            parts: (max_staleness > 0).then(|| draws.at(15, groups) as usize),
            fault,
        }
    }

    fn run(&self) -> (Result<Report, RunError>, Vec<Seen>, Admission) {
        let Scenario { seed, group_size, max_staleness, fault, .. } = *self;
        let draws = Draws(seed);
        let simulation = Simulation::new(seed);
        for (key, stage) in ["reward", "filter", "batch", "train", "sync", "log"].into_iter().enumerate() {
            let most = if stage == "train" { 400 } else { 20 };
            let time = Duration::from_millis(draws.at(20 + key as u64, most));
            simulation.takes(stage, move |_| time);
        }
        let admission = Admission::new(self.groups as u64 * self.sync_every, self.window, Some(self.steps * self.groups as u64));
        let admission = admission.bounded(max_staleness);
        let (publisher, published) = weights();
        let machine = simulation.clone();
        let engine = move |settings: &EngineSettings| {
            let pass = draws.at(30, 30) as usize;
            let time =
                move |load: Load| Duration::from_micros((1000 * pass * load.passes + 100 * (load.rows + load.prefill)) as u64);
            // One answer in eight is long.
            let length = move |ordinal, index: u32| {
                let key = 1000 + 8 * ordinal + u64::from(index);
                (if draws.at(key, 8) == 0 { draws.between(key + 1, 10, 40) } else { draws.between(key + 1, 1, 6) }) as usize
            };
            SimulatedEngine::new(&machine, settings.slots, time, length).on_new_weights(settings.on_new_weights)
        };
        let tokenizer = Arc::new(Tokenizer::characters("0123456789+=", 16).unwrap());
        let generator =
            Generator::by(engine, &tokenizer).weights(published).group_size(group_size).slots(self.slots).workers(self.workers);
        let generator = generator.max_new_tokens(48).on_new_weights(self.on_new_weights);
        let reward = move |sample: &Sample| {
            let key = 1_000_000 + 8 * sample.group_index + u64::from(sample.index);
            assert!(fault != Fault::Reward || draws.at(key, 9) > 0, "the reward is poisoned");
            match fault == Fault::Lost && draws.at(key, 5) == 0 {
                true => Err("the service is away"),
                false => Ok(f64::from(draws.at(key, 2) as u32)),
            }
        };
        let mut flow = Flow::new("faults").admission(&admission);
        flow.capacity(Capacity::items(self.capacity));
        let (control, clock) = (flow.handle(), simulation.clone());
        let verdict = move |group: &Group| {
            assert!(fault != Fault::Filter(group.id()), "the filter is broken");
            let now = clock.now().as_millis() as u64;
            match fault {
                Fault::Drain(at) if now >= at => control.drain(),
                Fault::Stop(at) if now >= at => control.stop(),
                _ => {}
            }
            Verdict::keep_if(draws.at(2_000_000 + group.id(), 5) > 0, "unlucky")
        };
        let batcher = Batcher::groups(self.groups).over_sample(self.over_sample).on_stale(self.on_stale);
        let batcher = self.parts.map_or(batcher.clone(), |least| batcher.in_parts(least));
        let trainer = Trainer::new(Failing { inner: SimulatedBackend::default(), fault }).sync_every(self.sync_every);
        let trainer = trainer.steps(self.steps).on_stale(self.on_stale);
        let seen: Arc<Mutex<Vec<Seen>>> = Arc::default();
        let noted = seen.clone();
        let log = RunLog::new(&Metrics::new()).each(move |step: &Trained<()>| noted.lock().unwrap().push(Seen::of(step)));

        let prompts = flow.source("prompts", Prompts::addition(1, seed).unwrap());
        let groups = flow.stage("generate", prompts, generator);
        let scored = flow.stage(
            "reward",
            groups,
            Reward::each(reward).retries(0).failures(FailurePolicy {
                on_failure: OnFailure::Drop,
                max_poisoned: u64::MAX,
                ..FailurePolicy::default()
            }),
        );
        let kept = flow.stage("filter", scored, Filter::by(verdict).patience(u64::MAX));
        let batches = flow.stage("batch", kept, batcher);
        let trained = flow.stage("train", batches, trainer);
        let synced = match fault {
            Fault::Sync(from) => {
                let (to, admission) = (publisher, admission.clone());
                flow.stage("sync", trained, Forgetful { to, admission, from })
            }
            _ => flow.stage("sync", trained, WeightSync::to(publisher)),
        };
        flow.sink("log", synced, log);
        let ended = flow.simulate(&simulation, Until::finished());
        let seen = seen.lock().unwrap().clone();
        (ended, seen, admission)
    }
}

/// A sync of the user's own, which publishes and no longer says so from a version on.
struct Forgetful {
    to: WeightsTx<()>,
    admission: Admission,
    from: u64,
}

impl Stage for Forgetful {
    type In = Trained<()>;
    type Out = Trained<()>;

    fn run(&mut self, io: &mut Io<Trained<()>, Trained<()>>) -> Result<(), StageError> {
        while let Some(trained) = io.recv()? {
            if let Some(publish) = &trained.publish {
                self.to.publish(publish.version, publish.weights.clone())?;
                if publish.version < self.from {
                    self.admission.published(publish.version);
                }
            }
            io.send(trained)?;
        }
        Ok(())
    }
}

/// A step, as far as the laws are concerned.
#[derive(Clone, Debug)]
struct Seen {
    groups: Vec<(u64, usize)>,
    dropped: Vec<u64>,
    lag: u64,
}

impl Seen {
    fn of(step: &Trained<()>) -> Self {
        let weighs = |sample: &&Sample| sample.loss_mask.iter().any(|weight| *weight > 0.0);
        let lag = |sample: &Sample| {
            let versions = sample.versions.per_token().zip(&sample.loss_mask).filter(|(_, weight)| **weight > 0.0);
            versions.filter_map(|(version, _)| Some(step.version - version?)).max()
        };
        assert!(step.batch.samples().all(|sample| staleness(sample, step.version).is_some()));
        Seen {
            groups: step.batch.groups.iter().map(|group| (group.id(), group.samples.len())).collect(),
            dropped: step.batch.dropped.iter().map(|dropped| dropped.id).collect(),
            lag: step.batch.samples().filter(weighs).filter_map(lag).max().unwrap_or(0),
        }
    }
}

/// Fails at a step, if that is the fault.
struct Failing {
    inner: SimulatedBackend,
    fault: Fault,
}

impl TrainingBackend for Failing {
    type Weights = ();

    fn forward_backward(&self, batch: Arc<TrainBatch>) -> TrainFuture<ForwardBackward> {
        if self.fault == Fault::Backend(self.inner.state().step + 1) {
            return TrainFuture::ready(Err(TrainError::Tensor("out of memory".into())));
        }
        self.inner.forward_backward(batch)
    }
    fn score(&self, batch: Arc<TrainBatch>) -> TrainFuture<Vec<Vec<f64>>> {
        self.inner.score(batch)
    }
    fn update(&self, scale: f64, schedule: Option<Schedule>) -> TrainFuture<OptimStep> {
        self.inner.update(scale, schedule)
    }
    fn takes_parts(&self, algorithm: Option<&rollflow::train::Algorithm>) -> bool {
        self.inner.takes_parts(algorithm)
    }
    fn snapshot(&self) -> TrainFuture<Snapshot<()>> {
        self.inner.snapshot()
    }
    fn current(&self) -> TrainFuture<Snapshot<()>> {
        self.inner.current()
    }
    fn load_weights(&self, weights: Arc<()>) -> TrainFuture<()> {
        self.inner.load_weights(weights)
    }
    fn save_checkpoint(&self, request: SaveCheckpoint) -> SavedCheckpoint {
        self.inner.save_checkpoint(request)
    }
    fn load_checkpoint(&self, folder: &Path) -> TrainFuture<CheckpointMetadata> {
        self.inner.load_checkpoint(folder)
    }
    fn state(&self) -> BackendState {
        self.inner.state()
    }
}

/// What must hold of every run, whatever happened to it.
fn check(scenario: &Scenario) {
    let (ended, seen, admission) = scenario.run();
    let mut gone = BTreeSet::new();
    for step in &seen {
        // Where old tokens are given up, a group may have no other.
        let least = if scenario.on_stale == OnStale::Wait { scenario.groups } else { 1 };
        assert!((least..=scenario.groups).contains(&step.groups.len()), "law D6: batches are full: {step:?}");
        let fewest = if scenario.fault == Fault::Lost { 2.min(scenario.group_size) } else { scenario.group_size };
        let whole = |samples: &usize| (fewest..=scenario.group_size).contains(samples);
        assert!(step.groups.iter().all(|(_, samples)| whole(samples)), "law D2: groups are whole but for what was lost");
        assert!(step.lag <= scenario.max_staleness, "law V2: {step:?}");
        for id in step.groups.iter().map(|(id, _)| id).chain(&step.dropped) {
            assert!(gone.insert(*id), "group {id} comes twice");
        }
    }
    let totals = admission.totals();
    assert_eq!(totals.imbalance(), (0, 0), "law D4: {totals:?}");
    let through = seen.len() as u64 == scenario.steps;
    match (scenario.fault, ended) {
        (Fault::Nothing | Fault::Reward | Fault::Lost, Ok(report)) => {
            assert_eq!(report.ended, Ended::Finished);
            assert!(through, "{} of {} steps", seen.len(), scenario.steps);
            // For a group that the trainer gave up others enter, which the last step may not have waited for.
            let gave_up = totals.groups.contains_key(&Fate::Stale);
            assert!(gave_up || totals.open_groups == 0, "nothing is left behind: {totals:?}");
        }
        (Fault::Drain(_), Ok(report)) => assert!(through || report.ended == Ended::Drained, "{:?}", report.ended),
        (Fault::Stop(_), Ok(report)) => assert!(through || report.ended == Ended::Stopped, "{:?}", report.ended),
        // It may have been through before it came to the fault.
        (Fault::Filter(_), Ok(_)) => assert!(through),
        // The window may have been wide enough.
        (Fault::Sync(_), Ok(_)) => assert!(through, "law F7: a run that can't go on ends with an error"),
        (Fault::Sync(_), Err(RunError::Stalled { waits, report, .. })) => {
            assert!(!through && report.ended == Ended::Failed);
            let prompts = waits.iter().find(|wait| wait.stage == "prompts").expect("law F7: it is named");
            assert_eq!(prompts.state, State::Credit);
            let numbers = prompts.waits_for.split(' ').filter_map(|word| word.parse().ok()).collect::<Vec<u64>>();
            let [admitted, limit] = numbers[..] else { panic!("{waits:?}") };
            assert!(admitted == limit && prompts.waits_for.contains("Admission::published"), "{waits:?}");
        }
        (Fault::Backend(_), Err(RunError::Failed { failures, .. })) => assert_eq!(failures[0].stage, "train", "law F3"),
        (Fault::Filter(_), Err(RunError::Failed { failures, .. })) => assert_eq!(failures[0].stage, "filter", "law F3"),
        (_, ended) => panic!("{ended:?}"),
    }
}

#[test]
fn whatever_fails_the_run_ends_with_its_cause_and_its_books_balanced() {
    // Faults panic on purpose, by the thousand.
    std::panic::set_hook(Box::new(|panic| {
        let text = panic.to_string();
        if !text.contains("is poisoned") && !text.contains("is broken") {
            eprintln!("{text}");
        }
    }));
    let seeds = std::env::var("FAULT_SEEDS").map_or(300, |number| number.parse().expect("a number of seeds"));
    for seed in 0..seeds {
        let scenario = Scenario::draw(seed);
        let checked = std::panic::catch_unwind(|| check(&scenario));
        assert!(checked.is_ok(), "{scenario:?}");
    }
}
