//! The loop as a graph, driven by a backend that only writes down what it is asked: order of a
//! step, versions, checkpoints.
//!
//! Laws V1 (versions count publishes), V4 (weights before the first rollout), C1 (a checkpoint is a
//! step's, and the last is never lost), N3 (a gap above its limit ends the run before it is learned
//! from), F6 and D4 (a poisoned group costs no step, and its tokens their fate), and V3's order:
//! with `max_staleness` 0 every rollout of a step is made by the weights it trains.

use std::sync::{Arc, Mutex};

use rollflow::algo::{ComparedToken, LogProbGap};
use rollflow::data::{POISONED, Version};
use rollflow::flow::{Report, RunError, Signal};
use rollflow::observe::Metric;
use rollflow::observe::StepMetrics;
use rollflow::prelude::*;
use rollflow::rollout::Admission;
use rollflow::stages::reward::OnFailure;
use rollflow::train::ForwardBackward;

use crate::support::backend::{Asked, Counting, Forward};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    Generated { group: u64, version: Option<Version> },
    Rewarded(u64),
    Scored,
    Updated(u64),
    Synced(Version),
    Logged(u64),
    Saved(u64),
}
use Event::*;

#[derive(Clone, Default)]
struct Diary(Arc<Mutex<Vec<Event>>>);

impl Diary {
    fn note(&self, event: Event) {
        self.0.lock().unwrap().push(event);
    }

    fn events(&self) -> Vec<Event> {
        self.0.lock().unwrap().clone()
    }

    fn pick<T>(&self, which: impl Fn(&Event) -> Option<T>) -> Vec<T> {
        self.events().iter().filter_map(which).collect()
    }

    fn saved(&self) -> Vec<u64> {
        self.pick(|event| if let Saved(step) = event { Some(*step) } else { None })
    }

    fn synced(&self) -> Vec<Version> {
        self.pick(|event| if let Synced(version) = event { Some(*version) } else { None })
    }

    fn at(&self, event: Event) -> usize {
        let events = self.events();
        events.iter().position(|other| *other == event).unwrap_or_else(|| panic!("{event:?} never happened: {events:?}"))
    }
}

const GROUPS: u64 = 2;

/// What varies between the tests below.
struct Loop {
    steps: u64,
    sync_every: u64,
    save_every: Option<u64>,
    prompts: u64,
    broken_group: Option<u64>,
    on_failure: OnFailure,
    target_reward: Option<f64>,
    /// The version from which on the generator's log-probabilities are 4 nats off.
    gap_from: Option<u64>,
    updates: u64,
    diary: Diary,
    metrics: Metrics,
}

impl Default for Loop {
    fn default() -> Self {
        let (broken_group, target_reward) = (None, None);
        Loop {
            steps: 3,
            sync_every: 1,
            save_every: None,
            prompts: u64::MAX,
            broken_group,
            on_failure: OnFailure::default(),
            target_reward,
            gap_from: None,
            updates: 1,
            diary: Diary::default(),
            metrics: Metrics::new(),
        }
    }
}

impl Loop {
    fn forward(&self) -> Forward {
        let gap_from = self.gap_from;
        Box::new(move |batch, state| {
            assert_eq!(batch.version, state.weight_version, "lags are counted from the version that is trained");
            let mut gap = LogProbGap::default();
            let off = if gap_from.is_some_and(|from| state.weight_version >= from) { 4.0 } else { 0.0 };
            gap.add_sequence(&[ComparedToken { trainer: -1.0 - off, behaviour: -1.0, ..ComparedToken::default() }]);
            ForwardBackward { gap, ..ForwardBackward::default() }
        })
    }

    fn trainer(&self, folder: &tempfile::TempDir) -> Trainer<Counting> {
        let diary = self.diary.clone();
        let hears = move |asked| {
            diary.note(match asked {
                Asked::Score => Scored,
                Asked::Update(step) => Updated(step),
                Asked::Save(step) => Saved(step),
            });
        };
        let backend = Counting { forward: self.forward(), hears: Box::new(hears), ..Counting::default() };
        let trainer = Trainer::new(backend).steps(self.steps).sync_every(self.sync_every);
        let trainer = trainer.configure(|config| (config.ppo_epochs, config.score_first) = (self.updates, true));
        let trainer = trainer.checkpoints(folder.path(), self.save_every);
        match self.target_reward {
            Some(reward) => trainer.target_reward(reward),
            None => trainer,
        }
    }

    fn log(&self) -> RunLog<u64> {
        let diary = self.diary.clone();
        RunLog::new(&self.metrics).logger(move |step: u64, row: &StepMetrics| {
            for metric in [Metric::Loss, Metric::GradNorm, Metric::LearningRate] {
                assert!(row.contains_key(metric.key()), "{} is in every row", metric.key());
            }
            diary.note(Logged(step));
        })
    }

    /// Prompts, answered by a closure where a model would be, to logged steps.
    fn reinforce(&self) -> Result<Report, RunError> {
        let folder = tempfile::tempdir().unwrap();
        let admission = Admission::max_staleness(0, (GROUPS * self.sync_every) as usize);
        let (publisher, published) = weights();
        let (generated, rewarded, synced_on) = (self.diary.clone(), self.diary.clone(), self.diary.clone());
        let broken = self.broken_group;
        let prompts = Prompts::addition(1, 0).unwrap().limited(self.prompts);

        let mut flow = Flow::new("rl").admission(&admission);
        let prompts = flow.source("prompts", prompts);
        let answer = move |prompt: Prompt| {
            let version = published.version();
            generated.note(Generated { group: prompt.ordinal, version });
            let sample = |index| {
                let mut sample = Sample::begin(&prompt, index, &[5, 6]);
                sample.push(7, -1.0, version.unwrap_or(0));
                sample
            };
            Group { samples: (0..2).map(sample).collect(), prompt: Arc::new(prompt), ..Group::default() }
        };
        let groups = flow.stage("generate", prompts, map(answer));
        let reward = move |sample: &Sample| {
            assert_ne!(Some(sample.group_index), broken, "this one can't be judged");
            if sample.index == 0 {
                rewarded.note(Rewarded(sample.group_index));
            }
            f64::from(sample.index)
        };
        let scored = flow.stage("reward", groups, Reward::each(reward).on_failure(self.on_failure));
        let batches = flow.stage("batch", scored, Batcher::groups(GROUPS as usize));
        let trainer = self.trainer(&folder).advantages(GroupMean::default());
        let trained = flow.stage("train", batches, trainer);
        let synced = flow.stage("sync", trained, WeightSync::to(publisher));
        let noted = move |step: Trained<u64>| {
            step.publish.iter().for_each(|publish| synced_on.note(Synced(publish.version)));
            step
        };
        let noted = flow.stage("noted", synced, map(noted));
        flow.sink("log", noted, self.log());
        flow.run(Until::finished())
    }

    /// Ready samples to logged steps.
    fn imitate(&self, available: u64) -> Result<Report, RunError> {
        let folder = tempfile::tempdir().unwrap();
        let samples = vec![Sample::supervised(&[5, 6], &[7, 1])];
        let mut flow = Flow::new("sft");
        let batches = flow.source("samples", Supervised::new(samples, 4, available).unwrap());
        let trained = flow.stage("train", batches, self.trainer(&folder));
        flow.sink("log", trained, self.log());
        flow.run(Until::finished())
    }
}

#[test]
fn a_step_generates_rewards_trains_syncs_and_logs_in_this_order() {
    let run = Loop::default();
    run.reinforce().unwrap();
    let diary = &run.diary;
    for step in 1..=run.steps {
        for group in GROUPS * (step - 1)..GROUPS * step {
            // The weights of version `step` have seen `step − 1` updates: generation waited for the sync before it.
            let generated = diary.at(Generated { group, version: Some(step) });
            assert!(generated < diary.at(Rewarded(group)));
            assert!(diary.at(Rewarded(group)) < diary.at(Updated(step)));
        }
        assert!(diary.at(Updated(step)) < diary.at(Synced(step + 1)));
        assert!(diary.at(Synced(step + 1)) < diary.at(Logged(step)));
    }
    assert_eq!(diary.saved(), [3]);
}

#[test]
fn supervised_training_uses_the_same_backend_stage_and_log() {
    let run = Loop { save_every: Some(2), ..Loop::default() };
    run.imitate(3).unwrap();
    for step in 1..=3 {
        assert!(run.diary.at(Updated(step)) < run.diary.at(Logged(step)));
    }
    assert_eq!(run.diary.saved(), [2, 3]);
}

#[test]
fn no_rollout_is_made_before_weights_were_published() {
    let run = Loop::default();
    run.reinforce().unwrap();
    let versions = run.diary.pick(|event| if let Generated { version, .. } = event { Some(*version) } else { None });
    assert!(versions.len() >= 6 && versions.iter().all(Option::is_some), "law V4: {versions:?}");
}

#[test]
fn versions_count_publishes_from_one_and_a_sync_comes_every_n_steps() {
    let run = Loop { steps: 5, sync_every: 2, ..Loop::default() };
    run.reinforce().unwrap();
    assert_eq!(run.diary.synced(), [1, 2, 3], "law V1: before the first step and after steps 2 and 4");
    // It is noted behind the publish, which lets the next step begin: that one's first rollout tells when it was.
    let first = run.diary.at(Generated { group: 2 * GROUPS, version: Some(2) });
    assert!(run.diary.at(Updated(2)) < first && first < run.diary.at(Updated(3)));
}

#[test]
fn checkpoints_come_every_n_steps_and_at_the_end_once_each_and_never_at_step_0() {
    for (steps, every, saved) in
        [(5, Some(2), vec![2, 4, 5]), (4, Some(2), vec![2, 4]), (3, None, vec![3]), (2, Some(9), vec![2])]
    {
        let run = Loop { steps, save_every: every, ..Loop::default() };
        run.reinforce().unwrap();
        assert_eq!(run.diary.saved(), saved, "{steps} steps, a checkpoint every {every:?}, a sync after each");
    }
}

#[test]
fn a_run_that_ends_early_saves_its_last_step() {
    let run = Loop { steps: 10, prompts: 2 * GROUPS, ..Loop::default() };
    run.reinforce().unwrap();
    assert_eq!(run.diary.saved(), [2], "the prompts ran out");

    let run = Loop { steps: 10, save_every: Some(2), ..Loop::default() };
    run.imitate(4).unwrap();
    assert_eq!(run.diary.saved(), [2, 4], "what is saved already is not saved again");

    let run = Loop { steps: 10, ..Loop::default() };
    run.imitate(0).unwrap();
    assert_eq!(run.diary.saved(), [0_u64; 0], "without a step there is nothing to save");
}

#[test]
fn a_failure_elsewhere_leaves_the_last_whole_step_saved() {
    let run = Loop { steps: 10, broken_group: Some(GROUPS), on_failure: OnFailure::Fail, ..Loop::default() };
    let error = run.reinforce().unwrap_err().to_string();
    assert!(error.contains("sample 0 of group 2") && error.contains("this one can't be judged"), "{error}");
    assert_eq!(run.diary.saved(), [1]);
}

#[test]
fn a_gap_above_its_limit_ends_the_run_before_it_is_learned_from_and_saves_the_last_whole_step() {
    let run = Loop { steps: 10, gap_from: Some(3), ..Loop::default() };
    let error = run.reinforce().unwrap_err().to_string();
    for part in ["step 3", "4.000 nats", "limit of 3", "temperature, top_p"] {
        assert!(error.contains(part), "{part} is missing: {error}");
    }
    let updates = run.diary.pick(|event| if let Updated(step) = event { Some(*step) } else { None });
    assert_eq!((updates, run.diary.saved()), (vec![1, 2], vec![2]));
}

#[test]
fn several_updates_from_a_batch_come_after_one_score_and_make_one_version() {
    let run = Loop { steps: 2, updates: 3, ..Loop::default() };
    run.reinforce().unwrap();
    let learned = run.diary.pick(|event| matches!(event, Scored | Updated(_) | Synced(_)).then_some(*event));
    let trained = [Scored, Updated(1), Updated(2), Updated(3), Scored, Updated(4), Updated(5), Updated(6)];
    assert_eq!(learned.iter().filter(|event| !matches!(event, Synced(_))).copied().collect::<Vec<_>>(), trained);
    assert_eq!(run.diary.synced(), [1, 2, 3]);
    let single = Loop::default();
    single.reinforce().unwrap();
    assert!(!single.diary.events().contains(&Scored), "a single update's own pass is its score");
}

#[test]
fn a_poisoned_group_costs_no_step_and_its_tokens_have_their_fate() {
    let run = Loop { broken_group: Some(GROUPS), ..Loop::default() };
    run.reinforce().unwrap();
    let newest = |metric, label: &str| run.metrics.newest(metric, &[label]);
    assert_eq!(run.diary.saved(), [3], "law F6: all steps are taken");
    assert_eq!(newest(Metric::GroupsDropped, POISONED), Some(1.0));
    // Two samples of one token each.
    assert_eq!(newest(Metric::Tokens, "poisoned"), Some(2.0), "law D4");
    assert_eq!(newest(Metric::Tokens, "trained"), Some(3.0 * 2.0 * GROUPS as f64));
    assert_eq!(newest(Metric::Tokens, "filtered"), Some(0.0));
}

#[test]
fn a_drained_run_saves_its_last_step() {
    let run = Loop { steps: u64::MAX, ..Loop::default() };
    let folder = tempfile::tempdir().unwrap();
    let mut flow = Flow::new("drained");
    let batches = flow.source("samples", Supervised::new(vec![Sample::supervised(&[5], &[6])], 1, u64::MAX).unwrap());
    let trained = flow.stage("train", batches, run.trainer(&folder));
    let control = flow.handle();
    flow.sink("drain", trained, move |step: Trained<u64>| {
        if step.step == 3 && control.signal() == Signal::Run {
            control.drain();
        }
    });
    flow.run(Until::finished()).unwrap();
    let trained = run.diary.pick(|event| if let Updated(step) = event { Some(*step) } else { None });
    assert_eq!(run.diary.saved(), [trained[trained.len() - 1]]);
}

/// Every group earns 0 and 1, so the mean is one half from the first step on; it must hold for
/// twenty.
#[test]
fn a_target_reward_ends_the_run_when_it_has_held_and_saves_the_last_step() {
    let reached = Loop { steps: 100, target_reward: Some(0.5), ..Loop::default() };
    reached.reinforce().unwrap();
    assert_eq!(reached.diary.saved(), [20]);
    let beyond = Loop { steps: 30, target_reward: Some(0.6), ..Loop::default() };
    beyond.reinforce().unwrap();
    assert_eq!(beyond.diary.saved(), [30]);
}
