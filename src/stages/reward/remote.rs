//! Rewards that other processes compute: one request per group, several groups in flight.
//!
//! A tokio task waits for each request, so no thread is blocked. Parts that are computed here, and
//! dead letters, run off the runtime's threads. A stop cancels the wait immediately. Law F6 holds as for
//! [`Reward`](super::Reward).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;

use super::each::{Scoring, scoring};
use super::failures::{FailureHandler, FailurePolicy, RETRIES};
use crate::algo::rewards::{Parts, RewardOutput};
use crate::data::{Group, Sample, Scored};
use crate::flow::{AsyncIo, AsyncStage, RunContext, StageError, StageSpec};
use crate::judge::Service;
use crate::net::Tasks;
use crate::observe::logs::Failure;
use crate::stages::unblocked;

/// Reward stage that asks services, alone or for parts of a reward. It passes groups on in the order
/// in which they are scored, up to eight at a time.
#[derive(Clone)]
pub struct RemoteReward {
    services: Arc<[(String, Service)]>,
    /// If none, the response of the one service is the reward.
    parts: Option<Arc<Parts>>,
    retries: u32,
    failures: Arc<Mutex<FailureHandler>>,
    concurrency: usize,
}

const NOT_APPLICABLE: &str =
    "the reward does not apply to this sample (None); only one of several parts may have no value: reward.kind = \"parts\"";

/// The values of each sample by its index, one of each service, or its first failure.
type Responses = BTreeMap<u32, Result<Vec<Option<RewardOutput>>, Failure>>;

impl RemoteReward {
    /// Takes the response of `service` as the reward.
    pub fn new(service: Service) -> Self {
        let services = Arc::new([("reward".to_owned(), service)]);
        RemoteReward { services, parts: None, retries: RETRIES, failures: Arc::default(), concurrency: 8 }
    }

    /// Combines `parts`; those that are [remote](Parts::remote) come from the services of the same
    /// names. Parts in a service's own response are ignored.
    pub fn with_parts(parts: Parts, services: impl IntoIterator<Item = (String, Service)>) -> Self {
        let (services, parts) = (services.into_iter().collect(), Some(Arc::new(parts)));
        RemoteReward { services, parts, retries: RETRIES, failures: Arc::default(), concurrency: 8 }
    }

    /// Sets the retries of a service, and of a part that is computed here, for each sample.
    /// Default: 2.
    pub fn retries(self, retries: u32) -> Self {
        RemoteReward { retries, ..self }
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

    /// Sets the reward of every sample of `group`, or returns its failure. Services are asked one
    /// after the other. Of a rollout with several parts only the last is scored; the others get the
    /// same reward.
    async fn score(&self, mut group: Group) -> (Group, Scoring) {
        let earlier = group.set_earlier_parts_aside();
        let (mut responses, mut failed_calls): (Responses, u64) = Default::default();
        responses.extend(group.samples.iter().map(|sample| (sample.index, Ok(Vec::new()))));
        for (_, service) in &*self.services {
            let answers = service.score(&group, self.retries).await;
            failed_calls += answers.failed_calls;
            for (sample, answer) in group.samples.iter().zip(answers.samples) {
                let Some(response) = responses.get_mut(&sample.index) else { continue };
                match (response.as_mut(), answer) {
                    (Ok(values), Ok(output)) => values.push(output),
                    (Ok(_), Err(failure)) => *response = Err(failure),
                    (Err(_), _) => {}
                }
            }
        }
        let this = self.clone();
        let (mut group, mut scoring) = unblocked(move || this.combine(group, responses)).await;
        scoring.failed_calls += failed_calls;
        group.put_parts_back(earlier);
        (group, scoring)
    }

    /// Scores a group on the calling thread, which must not belong to a runtime. Returns it with the
    /// failures of its samples.
    pub fn score_blocking(&self, group: Group) -> std::io::Result<(Group, Vec<Failure>)> {
        let (group, scoring) = Tasks::new()?.block_on(self.score(group));
        Ok((group, scoring.failures))
    }

    /// Computes rewards from the services' values.
    fn combine(&self, mut group: Group, mut responses: Responses) -> (Group, Scoring) {
        let is_whole = |sample: &Sample| responses.get(&sample.index).is_some_and(Result::is_ok);
        let (whole, failed): (Vec<Sample>, Vec<Sample>) = std::mem::take(&mut group.samples).into_iter().partition(is_whole);
        group.samples = whole;
        let reward = |sample: &Sample| match (&self.parts, responses.get(&sample.index)) {
            (Some(parts), Some(Ok(values))) => {
                let named = self.services.iter().map(|(name, _)| name.as_str());
                parts.reward_with(
                    sample,
                    &named.zip(values.iter().map(|output| output.as_ref().map(|output| output.reward))).collect(),
                )
            }
            (None, Some(Ok(values))) if values.len() == 1 => values[0].clone().ok_or_else(|| NOT_APPLICABLE.to_owned()),
            _ => Err("no service was asked for this sample".to_owned()),
        };
        let mut scoring = scoring(&mut group, reward, self.retries, false);
        for mut sample in failed {
            scoring.failures.extend(responses.remove(&sample.index).and_then(Result::err));
            (sample.reward, sample.reward_parts) = Default::default();
            group.samples.push(sample);
        }
        group.samples.sort_by_key(|sample| sample.index);
        scoring.failures.sort_by_key(|failure| failure.sample);
        (group, scoring)
    }

    async fn scored(&self, stage: String, group: Group) -> Result<Scored, StageError> {
        let asked = Instant::now();
        let (group, scoring) = self.score(group).await;
        let scoring = Scoring { time: asked.elapsed(), ..scoring };
        let failures = Arc::clone(&self.failures);
        unblocked(move || failures.lock().apply(&stage, group, scoring)).await
    }
}

impl AsyncStage for RemoteReward {
    type In = Group;
    type Out = Scored;

    fn attach(&mut self, context: &mut RunContext) {
        context.fill(&mut self.failures.lock().policy.metrics);
    }

    async fn run(&mut self, io: &mut AsyncIo<Group, Scored>) -> Result<(), StageError> {
        self.failures.lock().begin(io.stage());
        while let Some(group) = io.recv().await? {
            let stage = io.stage().to_owned();
            let scored = tokio::select! {
                biased;
                () = io.stopped() => return Ok(()),
                scored = self.scored(stage, group) => scored?,
            };
            io.send(scored).await?;
        }
        Ok(())
    }

    fn spec(&self) -> StageSpec {
        StageSpec::default().workers(self.concurrency).knob("concurrency")
    }

    fn replica(&self) -> Option<Self> {
        Some(self.clone())
    }
}
