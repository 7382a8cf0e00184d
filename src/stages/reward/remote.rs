//! Rewards that other processes compute: one request per group, several groups in flight.
//!
//! A tokio task waits for each request, so no thread is blocked. Parts that are computed here, and
//! dead letters, run off the runtime's threads. A stop cancels the wait immediately. Law F6 holds as for
//! [`Reward`](super::Reward).

use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;

use super::failures::{FailureHandler, FailurePolicy, RETRIES};
use super::score::{Scorers, Scoring, score};
use crate::algo::rewards::{Parts, RewardOutput};
use crate::data::{Group, Sample, Scored};
use crate::flow::{AsyncIo, AsyncStage, RunContext, StageError, StageSpec};
use crate::judge::Service;
use crate::net::Tasks;
use crate::observe::logs::Failure;

/// Scores groups by services, alone or as parts of a reward.
pub struct RemoteScorer {
    services: Vec<(String, Service)>,
    /// If none, the response of the one service is the reward.
    parts: Option<Parts>,
    retries: u32,
}

/// Responses of all services for a group.
struct Responses {
    /// For each sample with all its values, in the group's order: a value of each service.
    values: Vec<Vec<RewardOutput>>,
    /// Samples without one of their values, with the reason.
    failures: Vec<(Sample, Failure)>,
    failed_calls: u64,
}

impl RemoteScorer {
    /// Takes the response of `service` as the reward.
    pub fn new(service: Service) -> Self {
        RemoteScorer { services: vec![("reward".to_owned(), service)], parts: None, retries: RETRIES }
    }

    /// Combines `parts`; those that are [remote](Parts::remote) come from the services of the same
    /// names. Parts in a service's own response are ignored.
    pub fn with_parts(parts: Parts, services: impl IntoIterator<Item = (String, Service)>) -> Self {
        RemoteScorer { services: services.into_iter().collect(), parts: Some(parts), retries: RETRIES }
    }

    /// Sets the retries of a service, and of a part that is computed here, for each sample.
    /// Default: 2.
    pub fn retries(self, retries: u32) -> Self {
        RemoteScorer { retries, ..self }
    }

    /// Sets the reward of every sample of `group`, or returns its failure. Services are asked one
    /// after the other. Of a rollout with several parts only the last is scored; the others get the
    /// same reward.
    pub async fn score(self: &Arc<Self>, mut group: Group) -> (Group, Scoring) {
        let earlier = group.set_earlier_parts_aside();
        let responses = self.request(&mut group).await;
        let this = Arc::clone(self);
        let (mut group, scoring) = match tokio::task::spawn_blocking(move || this.combine(group, responses)).await {
            Ok(scored) => scored,
            Err(error) => std::panic::resume_unwind(error.into_panic()),
        };
        group.put_parts_back(earlier);
        (group, scoring)
    }

    /// Does the same on the calling thread, which must not belong to a runtime.
    pub fn score_blocking(self: &Arc<Self>, group: Group) -> std::io::Result<(Group, Scoring)> {
        Ok(Tasks::new()?.block_on(self.score(group)))
    }

    async fn request(&self, group: &mut Group) -> Responses {
        let mut values: Vec<Vec<RewardOutput>> = vec![Vec::new(); group.samples.len()];
        let mut failures: Vec<Option<Failure>> = vec![None; group.samples.len()];
        let mut failed_calls = 0;
        for (_, service) in &self.services {
            let answers = service.score(group, self.retries).await;
            failed_calls += answers.failed_calls;
            for (place, answer) in answers.samples.into_iter().enumerate() {
                match answer {
                    Ok(output) => values[place].push(output),
                    Err(failure) => failures[place] = failures[place].take().or(Some(failure)),
                }
            }
        }
        let mut responses = Responses { values: Vec::new(), failures: Vec::new(), failed_calls };
        let mut whole = Vec::new();
        for ((sample, values), failure) in std::mem::take(&mut group.samples).into_iter().zip(values).zip(failures) {
            match failure {
                None => {
                    whole.push(sample);
                    responses.values.push(values);
                }
                Some(failure) => responses.failures.push((sample, failure)),
            }
        }
        group.samples = whole;
        responses
    }

    /// Computes rewards from the services' values.
    fn combine(&self, mut group: Group, responses: Responses) -> (Group, Scoring) {
        let places: Vec<u32> = group.samples.iter().map(|sample| sample.index).collect();
        let reward = |sample: &Sample| {
            let place = places.iter().position(|index| *index == sample.index).unwrap_or(usize::MAX);
            let values = responses.values.get(place).map_or(&[][..], Vec::as_slice);
            match (&self.parts, values) {
                (Some(parts), values) => {
                    let named = self.services.iter().map(|(name, _)| name.as_str());
                    parts.reward_with(sample, &named.zip(values.iter().map(|output| output.reward)).collect())
                }
                (None, [output]) => Ok(output.clone()),
                (None, _) => Err("no service was asked for this sample".to_owned()),
            }
        };
        let mut scoring = score(&mut group, reward, self.retries, Scorers::Caller);
        scoring.failed_calls += responses.failed_calls;
        for (mut sample, failure) in responses.failures {
            (sample.reward, sample.reward_parts) = Default::default();
            group.samples.push(sample);
            scoring.failures.push(failure);
        }
        group.samples.sort_by_key(|sample| sample.index);
        scoring.failures.sort_by_key(|failure| failure.sample);
        (group, scoring)
    }
}

/// Reward stage on a [`RemoteScorer`]: passes groups on in the order in which they are scored.
#[derive(Clone)]
pub struct RemoteReward {
    scorer: Arc<RemoteScorer>,
    failures: Arc<Mutex<FailureHandler>>,
    concurrency: usize,
}

impl RemoteReward {
    /// Scores up to eight groups at a time.
    pub fn new(scorer: impl Into<Arc<RemoteScorer>>) -> Self {
        RemoteReward { scorer: scorer.into(), failures: Arc::default(), concurrency: 8 }
    }

    /// Sets the largest number of groups in flight.
    pub fn concurrency(self, groups: usize) -> Self {
        RemoteReward { concurrency: groups.max(1), ..self }
    }

    /// Sets the policy for failures.
    pub fn failures(self, policy: FailurePolicy) -> Self {
        self.failures.lock().policy = policy;
        self
    }

    async fn score(&self, stage: &str, group: Group) -> Result<Scored, StageError> {
        let (group, scoring) = self.scorer.score(group).await;
        let (failures, stage) = (Arc::clone(&self.failures), stage.to_owned());
        let apply = move || failures.lock().apply(&stage, group, scoring);
        match tokio::task::spawn_blocking(apply).await {
            Ok(scored) => scored,
            Err(error) => std::panic::resume_unwind(error.into_panic()),
        }
    }
}

impl AsyncStage for RemoteReward {
    type In = Group;
    type Out = Scored;

    fn attach(&mut self, context: &mut RunContext) {
        context.fill(&mut self.failures.lock().policy.metrics);
    }

    async fn run(&mut self, io: &mut AsyncIo<Group, Scored>) -> Result<(), StageError> {
        while let Some(group) = io.recv().await? {
            let stage = io.stage().to_owned();
            let scored = tokio::select! {
                biased;
                () = io.stopped() => return Ok(()),
                scored = self.score(&stage, group) => scored?,
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

impl fmt::Debug for RemoteReward {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let services: Vec<&Service> = self.scorer.services.iter().map(|(_, service)| service).collect();
        f.debug_struct("RemoteReward")
            .field("services", &services)
            .field("concurrency", &self.concurrency)
            .finish_non_exhaustive()
    }
}
