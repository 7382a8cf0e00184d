//! The synchronous algorithm with engines elsewhere: `max_staleness = 0`, with and without over-sampling, under faults drawn by a seed.
//!
//! Laws V2 (no token of an older version is trained), V4 (an engine without verified weights gets no work), D4 (the ledger balances) and F6 (a
//! sample that no engine makes costs itself).

use std::path::Path;
use std::sync::mpsc;
use std::sync::{Arc, Mutex};

use rollflow::algo::filters::Verdict;
use rollflow::engine::FinishReason;
use rollflow::engine::remote::{Attempt, Ending, Fault, InferenceEngine, PauseMode, RemoteError, WeightControl, async_trait};
use rollflow::flow::WeightsTx;
use rollflow::prelude::*;
use rollflow::rollout::Admission;
use rollflow::rollout::{Fate, LOST, SURPLUS, Totals};
use rollflow::stages::reward::{FailurePolicy, OnFailure};
use rollflow::stages::sync::RemoteSync;
use tokio::sync::mpsc::Sender;

use super::server::next;
use super::*;
use crate::support::backend::Counting;

/// An engine that breaks off, fails and, once, starts again without its weights.
pub struct Unsteady {
    seed: u64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    asked: u64,
    label: Option<String>,
    paused: bool,
    /// Number of loads that fail before the others.
    refuses: u32,
    /// The label under which each attempt began.
    began: Vec<Option<String>>,
}

impl Unsteady {
    pub fn new(seed: u64) -> Arc<Self> {
        Arc::new(Unsteady { seed, state: Mutex::default() })
    }

    /// The same, whose first loads fail.
    fn refusing(seed: u64, refuses: u32) -> Arc<Self> {
        Arc::new(Unsteady { seed, state: Mutex::new(State { refuses, ..State::default() }) })
    }

    fn error<T>(&self, fault: Fault) -> Result<T, RemoteError> {
        Err(RemoteError::new(self.name(), fault))
    }

    /// The next draw of this engine.
    fn nth(&self) -> u64 {
        let mut state = self.state.lock().unwrap();
        state.asked += 1;
        state.asked
    }
}

/// Whether no engine makes this sample.
pub fn is_lost(seed: u64, ordinal: u64, index: u32) -> bool {
    draw(&[seed, 99, ordinal, u64::from(index)], 12) == 0
}

#[async_trait]
impl InferenceEngine for Unsteady {
    fn name(&self) -> String {
        format!("engine {}", self.seed)
    }

    async fn generate(&self, attempt: &Attempt, tokens: &Sender<Vec<(u32, f32)>>) -> Result<Ending, RemoteError> {
        let nth = self.nth();
        let (label, paused) = {
            let mut state = self.state.lock().unwrap();
            if nth == 9 && self.seed % 2 == 1 {
                state.label = None;
            }
            let label = state.label.clone();
            state.began.push(label.clone());
            (label, state.paused)
        };
        if paused {
            return self.error(Fault::Busy { status: 503, retry_after: None });
        }
        if nth == 9 && self.seed % 2 == 1 {
            return self.error(Fault::Unreachable("it starts again".into()));
        }
        if is_lost(self.seed / 2, attempt.ordinal, attempt.index) {
            let (what, begins, advice) = ("the request".into(), "no".into(), "give up".into());
            return self.error(Fault::Refused { what, status: 400, begins, advice });
        }
        let (mut read, mut made) = (attempt.tokens.to_vec(), 0);
        let breaks = (draw(&[self.seed, nth, 1], 6) == 0).then(|| draw(&[self.seed, nth, 2], 4) as usize);
        let finish = loop {
            if breaks == Some(made) {
                return self.error(Fault::Broke("by the script".into()));
            }
            let (token, log_prob) = next(&read);
            read.push(token);
            made += 1;
            if tokens.send(vec![(token, log_prob)]).await.is_err() {
                break None;
            }
            match token {
                1 => break Some(FinishReason::Stop),
                _ if made >= attempt.rest() => break Some(FinishReason::Length),
                _ => tokio::task::yield_now().await,
            }
        };
        let label = label.unwrap_or_else(|| "default".to_owned());
        Ok(Ending { finish, spans: Some(vec![(label, 0..made)]), ..Ending::default() })
    }

    fn weights(&self) -> Option<&dyn WeightControl> {
        Some(self)
    }
}

#[async_trait]
impl WeightControl for Unsteady {
    async fn pause(&self, _: PauseMode) -> Result<(), RemoteError> {
        self.state.lock().unwrap().paused = true;
        Ok(())
    }

    async fn load(&self, _: &Path, _: &str) -> Result<(), RemoteError> {
        let refuses = {
            let mut state = self.state.lock().unwrap();
            let refuses = state.refuses;
            state.refuses = refuses.saturating_sub(1);
            refuses > 0
        };
        if refuses {
            return self.error(Fault::Broke("as each of its first loads".into()));
        }
        match draw(&[self.seed, self.nth(), 3], 4) {
            0 => self.error(Fault::Broke("while it loaded".into())),
            _ => Ok(()),
        }
    }

    async fn label(&self, label: &str) -> Result<(), RemoteError> {
        self.state.lock().unwrap().label = Some(label.to_owned());
        Ok(())
    }

    async fn served(&self) -> Result<Option<String>, RemoteError> {
        Ok(self.state.lock().unwrap().label.clone())
    }

    async fn flush_cache(&self) -> Result<(), RemoteError> {
        Ok(())
    }

    async fn resume(&self) -> Result<(), RemoteError> {
        self.state.lock().unwrap().paused = false;
        Ok(())
    }
}

/// Gives the engines of `handle` versions, of which they know nothing but the number.
pub fn sync(handle: &FleetHandle, to: WeightsTx<()>) -> RemoteSync<u64> {
    RemoteSync::new(manager(handle), |version, _: &Arc<u64>| Ok::<_, std::io::Error>(unprobed(version)), to)
}

const GROUPS: usize = 3;
const SAMPLES: usize = 4;
const STEPS: u64 = 4;

/// The steps of a synchronous run on two engines, and the book.
fn train(seed: u64, round: u64, sync_every: u64) -> (Vec<(u64, Batch)>, Totals) {
    let engines = [2 * seed, 2 * seed + 1].map(|seed| Unsteady::new(seed) as Arc<dyn InferenceEngine>);
    train_on(&handle(engines), seed, round, sync_every, Duration::from_secs(120))
}

/// The same on these engines, which may be unavailable for the time of `patience`.
fn train_on(handle: &FleetHandle, seed: u64, round: u64, sync_every: u64, patience: Duration) -> (Vec<(u64, Batch)>, Totals) {
    let per_version = GROUPS as u64 * sync_every;
    let window = per_version - GROUPS as u64 + round;
    let admission = Admission::new(per_version, window, Some(STEPS * GROUPS as u64)).bounded(0);
    let (publisher, published) = weights();
    let config = FleetConfig { fleet_timeout: GUARD, ..hasty() };
    let generator = Generator::remote(handle, config, &tokenizer()).weights(published).group_size(SAMPLES).max_new_tokens(12);
    let seen: Arc<Mutex<Vec<(u64, Batch)>>> = Arc::default();
    let noted = seen.clone();
    let mut flow = Flow::new("synchronous").admission(&admission);
    let prompts = flow.source("prompts", Prompts::addition(1, seed).unwrap());
    let groups = flow.stage("generate", prompts, generator);
    let reward = move |sample: &Sample| draw(&[seed, 7, sample.group_index, u64::from(sample.index)], 3) as f64;
    let scored = flow.stage(
        "reward",
        groups,
        Reward::each(reward).failures(FailurePolicy {
            on_failure: OnFailure::Drop,
            max_poisoned: u64::MAX,
            ..FailurePolicy::default()
        }),
    );
    let filter = move |group: &Group| Verdict::keep_if(draw(&[seed, 8, group.id()], 4) > 0, "unlucky");
    let kept = flow.stage("filter", scored, Filter::by(filter));
    let batcher = Batcher::groups(GROUPS).over_sample(round as f64 / GROUPS as f64);
    let batches = flow.stage("batch", kept, batcher);
    let trainer = Trainer::new(Counting::default()).advantages(GroupMean::default());
    let trainer = trainer.sync_every(sync_every).steps(STEPS);
    let trained = flow.stage("train", batches, trainer);
    let synced = flow.stage("sync", trained, sync(handle, publisher).patience(patience));
    flow.sink("note", synced, move |step: Trained<u64>| {
        if step.step > 0 {
            noted.lock().unwrap().push((step.version, step.batch.clone()));
        }
    });
    let (done, ended) = mpsc::channel();
    std::thread::spawn(move || drop(done.send(flow.run(Until::finished()))));
    ended.recv_timeout(GUARD).expect("the run never ended").unwrap();
    let seen = std::mem::take(&mut *seen.lock().unwrap());
    (seen, admission.totals())
}

/// Their first sync fails after a second and a half of retries.
#[test]
fn a_version_is_retried_for_its_time_limit_however_long_its_first_sync_took() {
    let engines = [0, 1].map(|seed| Unsteady::refusing(seed, 6) as Arc<dyn InferenceEngine>);
    let (steps, _) = train_on(&handle(engines), 0, GROUPS as u64, 1, Duration::from_millis(1200));
    assert_eq!(steps.len() as u64, STEPS);
}

#[test]
fn v2_with_servers_a_synchronous_run_trains_no_token_of_an_older_version_whatever_they_do() {
    let (mut lost, mut surplus) = (0, 0);
    for seed in 0..6 {
        let (round, sync_every) = (GROUPS as u64 + [0, 2, 5][seed as usize % 3], 1 + seed % 2);
        let (steps, totals) = train(seed, round, sync_every);
        assert_eq!(steps.len() as u64, STEPS, "seed {seed}");
        for (version, batch) in &steps {
            assert_eq!(batch.groups.len(), GROUPS);
            for sample in batch.samples() {
                let versions: Vec<_> = sample.versions.per_token().flatten().collect();
                assert!(versions.iter().all(|made| made == version), "seed {seed}: {versions:?} in a step of version {version}");
            }
            for group in &batch.groups {
                assert!(group.samples.len() >= 2 && group.samples.len() + group.dropped.len() == SAMPLES);
                for gone in &group.dropped {
                    assert!(gone.reason == LOST && is_lost(seed, group.id(), gone.index));
                }
                let advantages: f64 = group.samples.iter().map(|sample| sample.advantage.unwrap()).sum();
                assert!(advantages.abs() < 1e-6, "compared among those that are left");
                lost += group.dropped.len();
            }
        }
        assert_eq!((totals.imbalance(), totals.open_groups), ((0, 0), 0), "law D4, seed {seed}: {totals:?}");
        surplus += totals.groups.get(&Fate::Surplus).copied().unwrap_or(0);
        let told = steps.iter().flat_map(|(_, batch)| &batch.dropped).filter(|dropped| dropped.reason == SURPLUS).count();
        assert_eq!(told as u64, totals.groups.get(&Fate::Surplus).copied().unwrap_or(0));
    }
    assert!(lost > 0 && surplus > 0, "the script must lose samples and leave groups over: {lost}, {surplus}");
}
