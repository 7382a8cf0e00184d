//! Rewards that other processes serve, each group in one request, several groups at a time.
//!
//! A task waits for each request, so that no thread does; what is computed here besides (parts by closures, a letter to the disk) leaves the
//! runtime's threads alone. A stop ends the wait at once. Law F6 holds as for rewards that are computed here.

use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;

use super::score::{Scorers, Scoring, score};
use super::service::Service;
use super::settle::{OnFailure, OnLostSample, Settling};
use crate::algo::rewards::{Earnings, Parts};
use crate::data::{Group, Sample, Scored};
use crate::flow::{AsyncIo, AsyncStage, RunContext, StageError, StageSpec};
use crate::net::Tasks;
use crate::observe::Metrics;
use crate::observe::logs::{DeadLetterWriter, Failure};

/// Rewards of which some or all come from services.
pub struct Served {
    services: Vec<(String, Service)>,
    /// Without parts, the one service's answer is the reward.
    parts: Option<Parts>,
    retries: u32,
}

/// What services said of a group: its samples that have all their values, and the others.
struct Asked {
    /// By sample, in the group's order: a value of each service, in theirs.
    values: Vec<Vec<Earnings>>,
    /// Samples without a value that they need, and why.
    failures: Vec<(Sample, Failure)>,
    failed_calls: u64,
}

impl Served {
    /// The reward is what `service` answers.
    pub fn by(service: Service) -> Self {
        Served { services: vec![("reward".to_owned(), service)], parts: None, retries: 2 }
    }

    /// The reward is what `parts` make together; those that are [given](Parts::given) come from the services of their names. The parts of
    /// a service's own answer are left aside.
    pub fn parts(parts: Parts, services: impl IntoIterator<Item = (String, Service)>) -> Self {
        Served { services: services.into_iter().collect(), parts: Some(parts), retries: 2 }
    }

    /// How often a service, or a part that is computed here, is asked again for a sample: 2 unless told otherwise.
    pub fn retries(self, retries: u32) -> Self {
        Served { retries, ..self }
    }

    /// Gives every sample of `group` its reward, or says which have none. One service is asked after the other. Of a rollout that has several parts
    /// they see the last, and the others earn the same.
    pub async fn score(self: &Arc<Self>, mut group: Group) -> (Group, Scoring) {
        let earlier = group.set_earlier_parts_aside();
        let asked = self.ask(&mut group).await;
        let this = Arc::clone(self);
        let (mut group, scoring) = match tokio::task::spawn_blocking(move || this.combine(group, asked)).await {
            Ok(scored) => scored,
            Err(error) => std::panic::resume_unwind(error.into_panic()),
        };
        group.put_parts_back(earlier);
        (group, scoring)
    }

    /// The same, from a thread that waits; not for a task.
    pub fn score_now(self: &Arc<Self>, group: Group) -> std::io::Result<(Group, Scoring)> {
        Ok(Tasks::new()?.block_on(self.score(group)))
    }

    async fn ask(&self, group: &mut Group) -> Asked {
        let mut values: Vec<Vec<Earnings>> = vec![Vec::new(); group.samples.len()];
        let mut failures: Vec<Option<Failure>> = vec![None; group.samples.len()];
        let mut failed_calls = 0;
        for (_, service) in &self.services {
            let answers = service.score(group, self.retries).await;
            failed_calls += answers.failed_calls;
            for (place, answer) in answers.samples.into_iter().enumerate() {
                match answer {
                    Ok(earnings) => values[place].push(earnings),
                    Err(failure) => failures[place] = failures[place].take().or(Some(failure)),
                }
            }
        }
        let mut asked = Asked { values: Vec::new(), failures: Vec::new(), failed_calls };
        let mut whole = Vec::new();
        for ((sample, values), failure) in std::mem::take(&mut group.samples).into_iter().zip(values).zip(failures) {
            match failure {
                None => {
                    whole.push(sample);
                    asked.values.push(values);
                }
                Some(failure) => asked.failures.push((sample, failure)),
            }
        }
        group.samples = whole;
        asked
    }

    /// Rewards from values.
    fn combine(&self, mut group: Group, asked: Asked) -> (Group, Scoring) {
        let places: Vec<u32> = group.samples.iter().map(|sample| sample.index).collect();
        let reward = |sample: &Sample| {
            let place = places.iter().position(|index| *index == sample.index).unwrap_or(usize::MAX);
            let given = asked.values.get(place).map_or(&[][..], Vec::as_slice);
            match (&self.parts, given) {
                (Some(parts), given) => {
                    let named = self.services.iter().map(|(name, _)| name.as_str()).zip(given.iter().map(|earned| earned.reward));
                    parts.earn_given(sample, &named.collect())
                }
                (None, [earnings]) => Ok(earnings.clone()),
                (None, _) => Err("no service was asked for this sample".to_owned()),
            }
        };
        let mut scoring = score(&mut group, reward, self.retries, Scorers::Caller);
        scoring.failed_calls += asked.failed_calls;
        for (mut sample, failure) in asked.failures {
            (sample.reward, sample.reward_parts) = Default::default();
            group.samples.push(sample);
            scoring.failures.push(failure);
        }
        group.samples.sort_by_key(|sample| sample.index);
        scoring.failures.sort_by_key(|failure| failure.sample);
        (group, scoring)
    }
}

/// Scores groups by [`Served`] rewards and passes them on, in the order in which they are answered.
#[derive(Clone)]
pub struct ServedReward {
    served: Arc<Served>,
    settling: Arc<Mutex<Settling>>,
    concurrency: usize,
}

impl ServedReward {
    /// Asks for eight groups at a time.
    pub fn new(served: impl Into<Arc<Served>>) -> Self {
        ServedReward { served: served.into(), settling: Arc::default(), concurrency: 8 }
    }

    /// Most groups that are asked for at the same time.
    pub fn concurrency(self, groups: usize) -> Self {
        ServedReward { concurrency: groups.max(1), ..self }
    }

    /// As [`Reward::on_failure`](super::Reward::on_failure).
    pub fn on_failure(self, on_failure: OnFailure) -> Self {
        self.settling(|settling| settling.on_failure = on_failure)
    }

    /// As [`Reward::on_lost_sample`](super::Reward::on_lost_sample).
    pub fn on_lost_sample(self, on_lost_sample: OnLostSample) -> Self {
        self.settling(|settling| settling.on_lost_sample = on_lost_sample)
    }

    /// As [`Reward::max_poisoned`](super::Reward::max_poisoned).
    pub fn max_poisoned(self, groups: u64) -> Self {
        self.settling(|settling| settling.max_poisoned = groups)
    }

    /// As [`Reward::dead_letters`](super::Reward::dead_letters).
    pub fn dead_letters(self, writer: DeadLetterWriter) -> Self {
        self.settling(|settling| settling.dead_letters = Some(writer))
    }

    /// As [`Reward::metrics`](super::Reward::metrics).
    pub fn metrics(self, metrics: &Metrics) -> Self {
        self.settling(|settling| settling.metrics = Some(metrics.clone()))
    }

    fn settling(self, change: impl FnOnce(&mut Settling)) -> Self {
        change(&mut self.settling.lock());
        self
    }

    async fn judge(&self, stage: &str, group: Group) -> Result<Scored, StageError> {
        let (group, scoring) = self.served.score(group).await;
        let (settling, stage) = (Arc::clone(&self.settling), stage.to_owned());
        let settle = move || settling.lock().settle(&stage, group, scoring);
        match tokio::task::spawn_blocking(settle).await {
            Ok(scored) => scored,
            Err(error) => std::panic::resume_unwind(error.into_panic()),
        }
    }
}

impl AsyncStage for ServedReward {
    type In = Group;
    type Out = Scored;

    fn attach(&mut self, context: &mut RunContext) {
        context.fill(&mut self.settling.lock().metrics);
    }

    async fn run(&mut self, io: &mut AsyncIo<Group, Scored>) -> Result<(), StageError> {
        while let Some(group) = io.recv().await? {
            let stage = io.stage().to_owned();
            let scored = tokio::select! {
                biased;
                () = io.stopped() => return Ok(()),
                scored = self.judge(&stage, group) => scored?,
            };
            io.send(scored).await?;
        }
        Ok(())
    }

    fn spec(&self) -> StageSpec {
        StageSpec::task().workers(self.concurrency).knob("concurrency")
    }

    fn replica(&self) -> Option<Self> {
        Some(self.clone())
    }
}

impl fmt::Debug for ServedReward {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let urls: Vec<&Service> = self.served.services.iter().map(|(_, service)| service).collect();
        f.debug_struct("ServedReward").field("services", &urls).field("concurrency", &self.concurrency).finish_non_exhaustive()
    }
}
