//! A reward that another process computes and serves over HTTP.
//!
//! A group's samples go as one request; to a [`Judge`] that does not compare them they go one by one. What breaks, comes too late or makes no sense
//! is asked again after a pause that doubles each time; samples that have their reward are not asked for again. The last retry asks for each sample
//! by itself, so that a sample on which the service fails costs no other its reward. An answer of 429 or 503 says that
//! the service is busy, not that it failed: it is waited for, up to a bound. Every call ends: an attempt takes a pause, `timeout` and `busy_timeout` at
//! most, and one more `timeout`.

mod error;
mod judge;
mod protocol;
mod verdicts;

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tokio::time::sleep;

use crate::algo::rewards::Earnings;
use crate::data::Group;
use crate::net::{Client, Endpoint, Fault, Outcome, RemoteError, RetryPolicy, Retryable, deadline};
use crate::observe::logs::{Failure, FailureKind};
pub use error::ServiceError;
pub use judge::{Judge, JudgeConfig, JudgeError, PROMPT, SCORE};

/// The address of a reward service, and how it is retried.
#[derive(Clone, Debug, PartialEq)]
pub struct ServiceConfig {
    /// The address that a group's samples are posted to, its token and certificates.
    pub endpoint: Endpoint,
    /// Longest time for one request, from connecting to the last byte of the answer. Default: 30 seconds.
    pub timeout: Duration,
    /// Pauses between attempts, and how long a busy service is waited for in one of them. How many
    /// attempts a sample gets is the reward stage's setting.
    pub retry: RetryPolicy,
}

impl ServiceConfig {
    /// A service at `url` with the defaults.
    pub fn new(url: impl Into<String>) -> Self {
        ServiceConfig { endpoint: Endpoint::new(url), timeout: Duration::from_secs(30), retry: RetryPolicy::default() }
    }
}

/// A reward service that can be asked.
#[derive(Clone, Debug)]
pub struct Service {
    config: ServiceConfig,
    client: Client,
    /// Without one, the service speaks the protocol of docs/reference/protocols.md.
    judge: Option<Arc<Judge>>,
}

/// What a service said of a group.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Answers {
    /// What each sample earned, or why it has no reward, in the group's order.
    pub samples: Vec<Result<Earnings, Failure>>,
    /// Requests that failed and samples that were refused, those that a retry made good included.
    pub failed_calls: u64,
}

impl Service {
    /// Looks at the address; asks nothing yet.
    pub fn new(config: ServiceConfig) -> Result<Self, ServiceError> {
        let mut endpoint = config.endpoint.clone();
        if !endpoint.url.starts_with("https:") {
            // A service that closes an idle connection would look like one that broke, and next to a
            // reward that is worth a process of its own a connection costs nothing.
            endpoint.idle_connections = 0;
        }
        let client = Client::new("reward service", endpoint)?;
        Ok(Service { config, client, judge: None })
    }

    /// A language model grades each answer by itself; the address is that of its chat completions.
    pub fn judge(self, judge: Judge) -> Self {
        Service { judge: Some(Arc::new(judge)), ..self }
    }

    /// Asks for all samples of `group`, again up to `retries` times for those that have no reward yet.
    ///
    /// A sample on which the service fails must not cost its group the rewards. So a retry asks for each sample by itself if it is the
    /// last one, or if the service rejected the request for good.
    pub async fn score(&self, group: &Group, retries: u32) -> Answers {
        let mut answers = Answers { samples: Vec::with_capacity(group.samples.len()), failed_calls: 0 };
        answers.samples.extend(group.samples.iter().map(|sample| Err(failure(sample.index, 0, String::new()))));
        let (attempts, mut rejects) = (retries.saturating_add(1), false);
        let mut rejected = vec![false; group.samples.len()];
        for attempt in 1..=attempts {
            let missing: Vec<usize> =
                (0..answers.samples.len()).filter(|place| answers.samples[*place].is_err() && !rejected[*place]).collect();
            if missing.is_empty() {
                break;
            }
            if attempt > 1 {
                sleep(self.config.retry.pause(group.id(), attempt - 1)).await;
            }
            // A judge gets one sample a request already, or compares all of them.
            let alone = self.judge.is_none() && attempt > 1 && (attempt == attempts || rejects);
            let requests: Vec<&[usize]> = if alone { missing.chunks(1).collect() } else { vec![&missing] };
            let said = join_all(requests.iter().map(|places| self.ask(group, places))).await;
            for (places, said) in requests.into_iter().zip(said) {
                match said {
                    Ok(given) => {
                        for (&place, earned) in places.iter().zip(given) {
                            answers.failed_calls += u64::from(earned.is_err());
                            answers.samples[place] = earned.map_err(|why| failure(group.samples[place].index, attempt, why));
                        }
                    }
                    Err(error) => {
                        answers.failed_calls += 1;
                        let is_final = error.outcome() == Outcome::Final;
                        rejects |= is_final;
                        for &place in places {
                            answers.samples[place] = Err(failure(group.samples[place].index, attempt, error.to_string()));
                            rejected[place] = is_final && (alone || self.judge.is_some());
                        }
                    }
                }
            }
        }
        answers
    }

    /// What the samples at `places` earned.
    async fn ask(&self, group: &Group, places: &[usize]) -> Result<Vec<Result<Earnings, String>>, ServiceError> {
        let url = self.client.name();
        let Some(judge) = &self.judge else {
            let question = protocol::question(group, places)
                .map_err(|error| ServiceError::Question { url: url.to_owned(), why: error.to_string() })?;
            return protocol::answers(url, &self.tell(group.id(), question).await?, places.len());
        };
        // Answers that are compared are compared with all others, whichever of them still lack a grade.
        let each = |place: &usize| std::slice::from_ref(&group.samples[*place]);
        let questions = if judge.compares() { vec![&group.samples[..]] } else { places.iter().map(each).collect() };
        let mut grades: Vec<Result<Earnings, String>> = Vec::with_capacity(group.samples.len());
        for asked in questions {
            let said = match judge.question(asked) {
                Ok(question) => match self.verdict(judge, group.id(), question, asked.len()).await {
                    // The others may be answered all the same.
                    Err(error) if error.is_about_one() => Err(error.to_string()),
                    said => said?,
                },
                Err(why) => Err(why),
            };
            match said.and_then(|said| judge.grades(&said, asked.len())) {
                Ok(all) => grades.extend(all.into_iter().map(|reward| Ok(Earnings { reward, ..Earnings::default() }))),
                Err(why) => grades.extend(asked.iter().map(|_| Err(why.clone()))),
            }
        }
        Ok(if judge.compares() { places.iter().map(|place| grades[*place].clone()).collect() } else { grades })
    }

    /// What the judge says, or said when it was asked the same before. Only replies with a score for each answer are remembered.
    async fn verdict(
        &self,
        judge: &Judge,
        group: u64,
        question: String,
        answers: usize,
    ) -> Result<Result<String, String>, ServiceError> {
        if let Some(said) = judge.verdicts().find(&question) {
            return Ok(Ok(said));
        }
        let body = self.tell(group, question.clone().into_bytes()).await?;
        let said = judge.reply(self.client.name(), &body);
        if let Ok(said) = &said
            && judge.grades(said, answers).is_ok()
            && let Err(error) = judge.verdicts().keep(question, said)
        {
            return Ok(Err(format!("the judge's cache can't be written: {error}")));
        }
        Ok(said)
    }

    /// One answer to one question, after waiting for a busy service. Failures are not retried here,
    /// since the samples that a next attempt needs are fewer.
    async fn tell(&self, group: u64, question: Vec<u8>) -> Result<Vec<u8>, ServiceError> {
        let policy = RetryPolicy { retries: 0, ..self.config.retry };
        let (started, deadline) = (Instant::now(), deadline(policy.busy_timeout.saturating_add(self.config.timeout)));
        let asked = policy.run(group, deadline, || self.client.post_bytes("", question.clone(), self.config.timeout));
        asked.await.map_err(|error| match error {
            RemoteError { server, fault: Fault::Busy { status, .. }, .. } => {
                ServiceError::Busy { url: server, status, seconds: started.elapsed().as_secs_f64() }
            }
            error => error.into(),
        })
    }
}

fn failure(sample: u32, attempts: u32, text: String) -> Failure {
    Failure { sample, attempts, kind: FailureKind::Refused, text }
}
