//! The whole loop without a model: prompts, a scripted generator, filter, batcher, trainer and sync on the real runner.

use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rollflow::algo::filters::Verdict;
use rollflow::data::{SampledToken, Version};
use rollflow::engine::OlderVersions;
use rollflow::flow::{RunError, Signal, WeightsRx, Window};
use rollflow::observe::StepMetrics;
use rollflow::prelude::*;
use rollflow::rollout::{Admission, Progress, Totals};
use rollflow::stages::filter::Fallback;
use rollflow::stages::reward::{FailurePolicy, OnFailure};
use rollflow::stages::train::OnStale;
use rollflow::stages::train::{Resumed, staleness};

use super::backend::Counting;

/// When a group is finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    /// After so many others.
    After(u64),
    /// When nothing else is left that anybody could wait for.
    Last,
    /// When the weights have this version.
    At(Version),
}

/// Answers out of order, as slots and answers of all lengths would. The first token of an answer is sampled when its prompt comes, the last
/// when it is finished.
pub struct Scripted {
    published: WeightsRx<u64>,
    window: Window,
    /// Prompts that came before an interruption.
    received: u64,
    pace: Arc<dyn Fn(u64) -> Pace + Send + Sync>,
    /// Law D4: its ledger counts each token.
    admission: Admission,
    /// If true, tokens are of the oldest versions that may sample them.
    older: bool,
}

impl Scripted {
    fn version(&self, id: u64) -> Version {
        let newest = self.published.version().unwrap_or(0);
        let oldest = self.admission.oldest(id).min(newest);
        if self.older && self.admission.claim(id, oldest) { oldest } else { newest }
    }

    /// Adds `token` to each sample of a group.
    fn sample(&self, mut group: Group, token: u32) -> Group {
        let (ordinal, version) = (group.id(), self.version(group.id()));
        for sample in &mut group.samples {
            sample.push(token, -1.0, version);
            let (index, status) = (sample.index, Status::Pending);
            self.admission.sampled([SampledToken { ordinal, index, token, log_prob: -1.0, version, status, routes: None }]);
        }
        group
    }

    fn next(&self, held: &[(u64, Group)], tick: u64) -> Option<usize> {
        let rank = |(came, group): &(u64, Group)| match (self.pace)(group.id()) {
            Pace::After(others) => Some((0, came + others)),
            Pace::Last => Some((1, *came)),
            Pace::At(version) => (self.published.version() >= Some(version)).then_some((0, tick)),
        };
        (0..held.len()).filter(|&at| rank(&held[at]).is_some()).min_by_key(|&at| rank(&held[at]))
    }
}

impl Stage for Scripted {
    type In = Prompt;
    type Out = Group;

    fn run(&mut self, io: &mut Io<Prompt, Group>) -> Result<(), StageError> {
        let (mut held, mut received, mut tick) = (Vec::new(), self.received, 0);
        while io.signal() == Signal::Run {
            // Whoever may enter will come.
            while held.is_empty() || received < self.window.limit() {
                let Some(prompt) = io.recv()? else { return Ok(()) };
                received += 1;
                let samples = (0..2).map(|index| Sample::begin(&prompt, index, &[5, 6])).collect();
                // Of a prompt that came back, nothing is continued.
                for index in 0..2 {
                    self.admission.discard(prompt.ordinal, index);
                }
                let group = Group { samples, prompt: Arc::new(prompt), ..Group::default() };
                held.push((tick, self.sample(group, 7)));
            }
            // An adversary keeps the last ones back as long as something else may happen first.
            let only_last = held.iter().all(|(_, group)| !matches!((self.pace)(group.id()), Pace::After(_)));
            for _ in 0..20 {
                if !only_last || received < self.window.limit() {
                    break;
                }
                std::thread::sleep(Duration::from_micros(100));
            }
            if received < self.window.limit() {
                continue;
            }
            if let Some(at) = self.next(&held, tick) {
                let (_, group) = held.remove(at);
                io.send(self.sample(group, 8))?;
                tick += 1;
            }
        }
        Ok(())
    }
}

/// What is rehearsed.
#[derive(Clone)]
pub struct Rehearsal {
    pub groups: usize,
    pub sync_every: u64,
    pub max_staleness: u64,
    pub over_sample: f64,
    pub window: u64,
    pub on_stale: OnStale,
    pub steps: u64,
    pub pace: Arc<dyn Fn(u64) -> Pace + Send + Sync>,
    /// If true, tokens are of the oldest versions that may sample them.
    pub older: bool,
    pub verdict: Arc<dyn Fn(&Group) -> Verdict + Send + Sync>,
    pub patience: u64,
    pub fallback: Fallback,
    /// Groups whose reward fails.
    pub broken: Arc<dyn Fn(u64) -> bool + Send + Sync>,
    /// Samples that a stage of one's own drops.
    pub unwanted: Arc<dyn Fn(&Sample) -> bool + Send + Sync>,
}

/// One step of it.
#[derive(Clone, Debug)]
pub struct Seen {
    pub ids: Vec<u64>,
    pub dropped: Vec<(u64, String)>,
    pub spared: Vec<u64>,
    /// The largest lag of a token with weight.
    pub lag: u64,
    pub row: StepMetrics,
}

impl fmt::Debug for Rehearsal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Rehearsal { groups, sync_every, max_staleness, over_sample, window, on_stale, steps, .. } = self;
        let paces: Vec<Pace> = (0..steps * *groups as u64).map(|id| (self.pace)(id)).collect();
        write!(
            f,
            "{groups} groups × {over_sample}, sync {sync_every}, staleness {max_staleness}, older {}, {on_stale:?}, ",
            self.older
        )?;
        write!(f, "window {window}, {steps} steps, {paces:?}")
    }
}

impl Default for Rehearsal {
    fn default() -> Self {
        Rehearsal {
            groups: 4,
            sync_every: 1,
            max_staleness: 2,
            over_sample: 1.5,
            window: 6,
            on_stale: OnStale::Wait,
            steps: 8,
            pace: Arc::new(|_| Pace::After(0)),
            older: false,
            verdict: Arc::new(|_| Verdict::Keep),
            patience: u64::MAX,
            fallback: Fallback::Error,
            broken: Arc::new(|_| false),
            unwanted: Arc::new(|_| false),
        }
    }
}

impl Rehearsal {
    /// From the first prompt to `self.steps`.
    pub fn run(&self) -> Result<(Vec<Seen>, Totals), RunError> {
        self.run_on(Progress::default(), 0, self.steps).map(|(seen, admission)| (seen, admission.totals()))
    }

    /// From step `from`, where `progress` was saved, to step `to`.
    pub fn run_on(&self, progress: Progress, from: u64, to: u64) -> Result<(Vec<Seen>, Admission), RunError> {
        let total = self.steps * self.groups as u64;
        let admission =
            Admission::new(self.groups as u64 * self.sync_every, self.window, Some(total)).bounded(self.max_staleness);
        // Where the trainer's resume will have the flow's admission begin.
        let begins = Admission::new(1, 1, None);
        begins.restore(progress.clone());
        let backend = Counting::default();
        if from > 0 {
            let mut state = backend.state.lock().unwrap();
            (state.step, state.weight_version) = (from, from / self.sync_every + 1);
        }
        let (publisher, published) = weights();
        let seen: Arc<Mutex<Vec<Seen>>> = Arc::default();
        let (tapped, logged) = (Arc::clone(&seen), Arc::clone(&seen));
        let generator = Scripted {
            published,
            window: admission.window(),
            received: begins.window().admitted(),
            pace: Arc::clone(&self.pace),
            admission: admission.clone(),
            older: self.older,
        };
        let (broken, verdict, unwanted) = (Arc::clone(&self.broken), Arc::clone(&self.verdict), Arc::clone(&self.unwanted));
        let reward = move |sample: &Sample| {
            assert!(!broken(sample.group_index), "broken");
            f64::from(sample.index)
        };
        let filter = Filter::by(move |group: &Group| verdict(group)).patience(self.patience).fallback(self.fallback);
        let batcher = Batcher::groups(self.groups).over_sample(self.over_sample).on_stale(self.on_stale);
        let trainer = Trainer::new(backend).advantages(GroupMean::default()).sync_every(self.sync_every).steps(to);
        let trainer = trainer.on_stale(self.on_stale);
        let trainer = if from > 0 {
            trainer.resume(Path::new(""), Resumed { step: from, progress, ..Resumed::default() }).unwrap()
        } else {
            trainer
        };

        let mut flow = Flow::new("rehearsal").admission(&admission);
        let prompts = flow.source("prompts", Prompts::addition(1, 0).unwrap());
        let groups = flow.stage("generate", prompts, generator);
        let scored = flow.stage(
            "reward",
            groups,
            Reward::each(reward).failures(FailurePolicy {
                on_failure: OnFailure::Drop,
                max_poisoned: u64::MAX,
                ..FailurePolicy::default()
            }),
        );
        let chosen = map(move |mut scored: Scored| {
            scored.drop_samples("unwanted", |sample| unwanted(sample));
            scored
        });
        let scored = flow.stage("choose", scored, chosen);
        let kept = flow.stage("filter", scored, filter);
        let batches = flow.stage("batch", kept, batcher);
        let trained = flow.stage("train", batches, trainer);
        let synced = flow.stage("sync", trained, WeightSync::to(publisher));
        let synced = flow.stage(
            "look",
            synced,
            map(move |step: Trained<u64>| {
                if step.step > 0 {
                    tapped.lock().unwrap().push(look(&step));
                }
                step
            }),
        );
        let log = RunLog::new(&Metrics::new()).logger(move |step: u64, row: &StepMetrics| {
            logged.lock().unwrap()[(step - from) as usize - 1].row = row.clone();
        });
        flow.sink("log", synced, log);
        flow.run(Until::finished())?;
        let seen = seen.lock().unwrap().clone();
        Ok((seen, admission))
    }
}

fn look(step: &Trained<u64>) -> Seen {
    let weighed = step.batch.samples().flat_map(|sample| sample.versions.per_token().zip(&sample.loss_mask));
    let lags = weighed.filter(|(_, mask)| **mask > 0.0).filter_map(|(version, _)| Some(step.version - version?));
    let whole = |group: &Group| group.samples.len() + group.dropped.len() == 2;
    assert!(step.batch.groups.iter().all(whole), "law D2: groups are whole, but for what was dropped with a reason");
    assert!(step.batch.samples().all(|sample| staleness(sample, step.version).is_some()));
    Seen {
        ids: step.batch.groups.iter().map(Group::id).collect(),
        dropped: step.batch.dropped.iter().map(|dropped| (dropped.id, dropped.reason.clone())).collect(),
        spared: step.batch.spared.clone(),
        lag: lags.max().unwrap_or(0),
        row: StepMetrics::new(),
    }
}

/// Laws D2, D4, D6, V2: whole batches in order, nothing twice, nothing too old.
pub fn assert_sound(rehearsal: &Rehearsal, seen: &[Seen]) {
    let mut gone = BTreeSet::new();
    for step in seen {
        assert_eq!(step.ids.len(), rehearsal.groups, "{step:?}");
        assert!(step.ids.is_sorted(), "law D6: {step:?}");
        assert!(step.lag <= rehearsal.max_staleness, "law V2: {step:?}");
        for id in step.ids.iter().chain(step.dropped.iter().map(|(id, _)| id)) {
            assert!(gone.insert(*id), "group {id} comes twice");
        }
    }
}
