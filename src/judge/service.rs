//! Client of a reward service, over HTTP or in Python processes of this run.
//!
//! A group's samples are one request; a judge that does not compare them gets one request for each
//! distinct completion. If it fails, the other completions keep their grades. A Python function that
//! takes no lists gets one for each completion, so that its timeout is that of a call.
//! Failed, late and malformed responses are retried with backoff, for the samples that still have no
//! reward. The last retry asks for each sample alone, so that one bad sample costs no other its
//! reward. A Python function that takes lists may compare completions: it always gets the whole
//! group. Status 429 or 503 means busy: waiting costs no retry and is bounded by `busy_timeout`.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tokio::time::sleep;

use super::language_model::Judge;
use super::protocol::{self, Answer};
use super::{JudgeConfig, ServiceError};
use crate::algo::rewards::RewardOutput;
use crate::data::Group;
use crate::net::{Client, Endpoint, Fault, Outcome, RemoteError, RetryPauses, RetryPolicy, Retryable, URL, deadline};
use crate::observe::logs::{Failure, FailureKind};
use crate::python::Workers;
use crate::settings::declare::section;
use crate::settings::setting::{POSITIVE, SOME};

section! {
    /// Reward of a service.
    pub struct HttpRule {
        /// Address that takes a group's completions by POST.
        url: String = String::new(), URL;
        /// Environment variable with a token, sent as `Authorization: Bearer …`. The token itself
        /// is never written.
        token_env: Option<String> = None;
        /// Timeout of one request, in seconds, from connecting to the end of the response.
        timeout: f64 = 30.0, POSITIVE;
        /// Most groups in flight to the service, and most requests to a judge. With several services
        /// the smallest number counts.
        concurrency: usize = 8, SOME;
        last retry: RetryPauses;
    }
}

impl HttpRule {
    /// Makes the client of the service at `endpoint`, with this timeout and backoff. Sends nothing.
    ///
    /// # Errors
    /// If the address is not usable, or a number of seconds exceeds the range of a `Duration`.
    pub fn service(&self, endpoint: Endpoint) -> Result<Service, ServiceError> {
        Service::new(endpoint, Duration::try_from_secs_f64(self.timeout)?, self.retry.policy(0)?)
    }
}

/// Client of a reward service.
#[derive(Clone)]
pub struct Service {
    kind: Kind,
    timeout: Duration,
    retry: RetryPolicy,
}

#[derive(Clone)]
enum Kind {
    /// A server of the protocol of `docs/reference/protocols.md`.
    Http(Client),
    /// A server of chat completions.
    Judge(Client, Arc<Judge>),
    /// A function in Python, by the same protocol.
    Python(Workers),
}

/// Rewards of a group.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Answers {
    /// Reward of each sample, none if the reward does not apply to it, or the reason why it failed; in
    /// the group's order.
    pub samples: Vec<Result<Option<RewardOutput>, Failure>>,
    /// Failed requests and rejected samples, including those that a retry recovered.
    pub failed_calls: u64,
}

impl Service {
    /// Makes the client of a service that a group's samples are posted to. `timeout` is that of one
    /// request, from connecting to the end of the response. `retry` has the backoff between attempts,
    /// and the longest wait for a busy service in one of them; the reward stage sets the number of
    /// attempts. Checks the address; sends nothing.
    pub fn new(endpoint: impl Into<Endpoint>, timeout: Duration, retry: RetryPolicy) -> Result<Self, ServiceError> {
        let mut endpoint = endpoint.into();
        if !endpoint.url.starts_with("https:") {
            // A closed idle connection would look like a failure, and connecting is cheap compared
            // with such a reward.
            endpoint.idle_connections = 0;
        }
        Ok(Service { kind: Kind::Http(Client::new("reward service", endpoint)?), timeout, retry })
    }

    /// Takes the rewards of a Python function, each call within `timeout`. A failed call is retried
    /// without a pause.
    pub fn python(workers: Workers, timeout: Duration) -> Self {
        let retry = RetryPolicy { pause: Duration::ZERO, ..RetryPolicy::DEFAULT };
        Service { kind: Kind::Python(workers), timeout, retry }
    }

    /// Makes the service a judge model; the address is that of its chat completions. Checks the
    /// settings and reads the cache file.
    pub fn judge(self, config: JudgeConfig) -> Result<Self, ServiceError> {
        let judge = Arc::new(Judge::new(config)?);
        let kind = match self.kind {
            Kind::Http(client) | Kind::Judge(client, _) => Kind::Judge(client, judge),
            Kind::Python(_) => return Err(ServiceError::Judge("service is a Python function; it must be a server".to_owned())),
        };
        Ok(Service { kind, ..self })
    }

    /// Requests the rewards of all samples of `group`, with up to `retries` retries for those
    /// without one.
    ///
    /// The last retry asks for each sample alone, and so does any retry after the service rejected
    /// a request with a final error. A Python function that takes lists gets the whole group again.
    pub async fn score(&self, group: &Group, retries: u32) -> Answers {
        let unasked = group.samples.iter().map(|sample| Err(failure(sample.index, 0, String::new())));
        let mut answers = Answers { samples: unasked.collect(), failed_calls: 0 };
        let (attempts, mut rejects) = (retries.saturating_add(1), false);
        let mut rejected = vec![false; group.samples.len()];
        for attempt in 1..=attempts {
            let missing: Vec<usize> =
                (0..answers.samples.len()).filter(|place| answers.samples[*place].is_err() && !rejected[*place]).collect();
            if missing.is_empty() {
                break;
            }
            if attempt > 1 {
                sleep(self.retry.pause(group.id(), attempt - 1)).await;
            }
            // A judge has one request per completion already, or compares all of them.
            let judged = matches!(self.kind, Kind::Judge(..));
            let alone = !judged && !self.takes_groups() && attempt > 1 && (attempt == attempts || rejects);
            let requests = self.requests(group, missing, alone);
            let responses = join_all(requests.iter().map(|places| self.request(group, places))).await;
            for (places, response) in requests.into_iter().zip(responses) {
                match response {
                    Ok(given) => {
                        for (place, earned) in places.into_iter().zip(given) {
                            answers.failed_calls += u64::from(earned.is_err());
                            answers.samples[place] = earned.map_err(|why| failure(group.samples[place].index, attempt, why));
                        }
                    }
                    Err(error) => {
                        answers.failed_calls += 1;
                        let is_final = error.outcome() == Outcome::Final;
                        rejects |= is_final;
                        for place in places {
                            answers.samples[place] = Err(failure(group.samples[place].index, attempt, error.to_string()));
                            rejected[place] = is_final && (alone || judged);
                        }
                    }
                }
            }
        }
        answers
    }

    /// Returns true for a Python function that takes lists.
    fn takes_groups(&self) -> bool {
        matches!(&self.kind, Kind::Python(workers) if workers.takes_groups())
    }

    /// Divides samples among requests.
    fn requests(&self, group: &Group, places: Vec<usize>, alone: bool) -> Vec<Vec<usize>> {
        match &self.kind {
            Kind::Judge(_, judge) if !judge.compares() => {
                let mut alike: BTreeMap<(&str, Option<&str>), Vec<usize>> = BTreeMap::new();
                for place in places {
                    let sample = &group.samples[place];
                    alike.entry((sample.response.as_str(), sample.answer())).or_default().push(place);
                }
                alike.into_values().collect()
            }
            _ if self.takes_groups() => vec![(0..group.samples.len()).collect()],
            _ if alone || matches!(self.kind, Kind::Python(_)) => places.into_iter().map(|place| vec![place]).collect(),
            _ => vec![places],
        }
    }

    /// Requests the rewards of the samples at `places`, once.
    async fn request(&self, group: &Group, places: &[usize]) -> Result<Vec<Answer>, ServiceError> {
        match &self.kind {
            Kind::Http(client) => {
                let body = protocol::request(group, places, false).to_string().into_bytes();
                protocol::parse(client.name(), &self.send(client, group.id(), body).await?, places.len())
            }
            Kind::Python(workers) => {
                let question = protocol::request(group, places, workers.takes_tokens());
                protocol::rewards(workers.name(), &workers.ask(question, self.timeout).await?, places.len())
            }
            Kind::Judge(client, judge) => self.judged(client, judge, group, places).await,
        }
    }

    /// Asks a judge about the samples at `places`, once. If it does not compare, they are the same
    /// completion.
    async fn judged(&self, client: &Client, judge: &Judge, group: &Group, places: &[usize]) -> Result<Vec<Answer>, ServiceError> {
        let asked = match places {
            [first, ..] if !judge.compares() => std::slice::from_ref(&group.samples[*first]),
            // A comparison needs all completions, whichever of them still lack a grade.
            _ => &group.samples[..],
        };
        let reply = match judge.request(asked) {
            Ok(request) => self.reply(client, judge, group.id(), request, asked.len()).await?,
            Err(why) => Err(why),
        };
        let grades = reply.and_then(|reply| judge.grades(&reply, asked.len()));
        let grade = |place: &usize| -> Answer {
            let reward = grades.as_ref().map_err(String::clone)?[if judge.compares() { *place } else { 0 }];
            Ok(Some(RewardOutput { reward, ..RewardOutput::default() }))
        };
        Ok(places.iter().map(grade).collect())
    }

    /// Returns the judge's reply, from the cache if possible. Only replies with a score for each
    /// completion are cached.
    async fn reply(
        &self,
        client: &Client,
        judge: &Judge,
        group: u64,
        request: String,
        answers: usize,
    ) -> Result<Result<String, String>, ServiceError> {
        if let Some(reply) = judge.cache.find(&request) {
            return Ok(Ok(reply));
        }
        // The semaphore is never closed.
        let _permit = judge.requests.acquire().await;
        let body = self.send(client, group, request.clone().into_bytes()).await?;
        let reply = judge.reply(client.name(), &body);
        if let Ok(reply) = &reply
            && judge.grades(reply, answers).is_ok()
            && let Err(error) = judge.cache.insert(request, reply)
        {
            return Ok(Err(format!("the judge's cache can't be written: {error}")));
        }
        Ok(reply)
    }

    /// Sends one request and waits while the service is busy. Failures are not retried here, since
    /// the next attempt asks for fewer samples.
    async fn send(&self, client: &Client, group: u64, request: Vec<u8>) -> Result<Vec<u8>, ServiceError> {
        let policy = RetryPolicy { retries: 0, ..self.retry };
        let (started, deadline) = (Instant::now(), deadline(policy.busy_timeout.saturating_add(self.timeout)));
        let response = policy.run(group, deadline, || client.post_bytes("", request.clone(), self.timeout));
        response.await.map_err(|error| match error {
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
