//! A reward that another process computes and serves over HTTP.
//!
//! A group's samples go as one request; to a [`Judge`] that does not compare them they go one by one. What breaks, comes too late or makes no sense
//! is asked again after a pause that doubles each time; samples that have their reward are not asked for again. An answer of 429 or 503 says that
//! the service is busy, not that it failed: it is waited for, up to a bound. Every call ends: an attempt takes a pause, `timeout` and `patience` at
//! most, and one more `timeout`.

mod error;
mod exchange;
mod judge;
mod protocol;
mod verdicts;

use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use hyper::{StatusCode, Uri};
use tokio::time::{Instant, sleep};

use crate::algo::rewards::Earnings;
use crate::data::Group;
pub use crate::engine::remote::Token;
use crate::observe::logs::{Failure, FailureKind};
pub use error::ServiceError;
use exchange::{Reply, post};
use hyper::body::Bytes;
pub use judge::{Judge, JudgeConfig, JudgeError, PROMPT, SCORE};

/// No pause is longer, unless the service asks for it.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// Where a reward is served, and how patiently it is asked.
#[derive(Clone, Debug, PartialEq)]
pub struct ServiceConfig {
    /// `http://host:port/path`.
    pub url: String,
    /// Longest time for one request, from connecting to the last byte of the answer.
    pub timeout: Duration,
    /// The pause before the first retry; each further one is twice as long, 30 seconds at most, less up to half of it by chance.
    pub pause: Duration,
    /// How long a service that says it is busy is waited for, in one attempt.
    pub patience: Duration,
    /// What the service knows its callers by.
    pub token: Option<Token>,
}

impl ServiceConfig {
    /// With 30 seconds for a request, pauses from half a second on and five minutes of patience.
    pub fn new(url: impl Into<String>) -> Self {
        ServiceConfig {
            url: url.into(),
            timeout: Duration::from_secs(30),
            pause: Duration::from_millis(500),
            patience: Duration::from_secs(300),
            token: None,
        }
    }
}

/// A reward service that can be asked.
#[derive(Clone, Debug)]
pub struct Service {
    config: ServiceConfig,
    uri: Uri,
    /// Without one, the service speaks the protocol of docs/reward_service.md.
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
        let refuse = |why: String| ServiceError::Url { url: config.url.clone(), why };
        let uri = Uri::from_str(&config.url).map_err(|error| refuse(error.to_string()))?;
        match (uri.scheme_str(), uri.host()) {
            // It would stand in recipes, logs and reports.
            (Some("http"), Some(_)) if uri.authority().is_some_and(|authority| authority.as_str().contains('@')) => {
                let why =
                    "it has a name or a password in it; put a token into an environment variable, and name that as token_env";
                let url = config.url.split_once('@').map_or_else(String::new, |(_, rest)| format!("http://…@{rest}"));
                return Err(ServiceError::Url { url, why: why.to_owned() });
            }
            (Some("http"), Some(host)) if !host.is_empty() => {}
            (Some("https"), _) => return Err(refuse("it asks for TLS, which a proxy on this machine can add".to_owned())),
            (Some("http"), _) => return Err(refuse("it has no host".to_owned())),
            _ => return Err(refuse("it does not begin with http://".to_owned())),
        }
        Ok(Service { config, uri, judge: None })
    }

    /// A language model grades each answer by itself; the address is that of its chat completions.
    pub fn judge(self, judge: Judge) -> Self {
        Service { judge: Some(Arc::new(judge)), ..self }
    }

    /// Asks for all samples of `group`, again up to `retries` times for those that have no reward yet.
    pub async fn score(&self, group: &Group, retries: u32) -> Answers {
        let mut answers = Answers { samples: Vec::with_capacity(group.samples.len()), failed_calls: 0 };
        answers.samples.extend(group.samples.iter().map(|sample| Err(failure(sample.index, 0, String::new()))));
        for attempt in 1..=retries.saturating_add(1) {
            let missing: Vec<usize> = (0..answers.samples.len()).filter(|place| answers.samples[*place].is_err()).collect();
            if missing.is_empty() {
                break;
            }
            if attempt > 1 {
                sleep(self.pause(group.id(), attempt - 1)).await;
            }
            match self.ask(group, &missing).await {
                Ok(given) => {
                    for (place, earned) in missing.into_iter().zip(given) {
                        answers.failed_calls += u64::from(earned.is_err());
                        answers.samples[place] = earned.map_err(|why| failure(group.samples[place].index, attempt, why));
                    }
                }
                Err(error) => {
                    answers.failed_calls += 1;
                    for place in missing {
                        answers.samples[place] = Err(failure(group.samples[place].index, attempt, error.to_string()));
                    }
                    if !error.may_pass() {
                        break;
                    }
                }
            }
        }
        answers
    }

    /// What the samples at `places` earned.
    async fn ask(&self, group: &Group, places: &[usize]) -> Result<Vec<Result<Earnings, String>>, ServiceError> {
        let url = &self.config.url;
        let Some(judge) = &self.judge else {
            let question = protocol::question(group, places)
                .map_err(|error| ServiceError::Question { url: url.clone(), why: error.to_string() })?;
            return protocol::answers(url, &self.tell(group.id(), question).await?, places.len());
        };
        // Answers that are compared are compared with all others, whichever of them still lack a grade.
        let each = |place: &usize| std::slice::from_ref(&group.samples[*place]);
        let questions = if judge.compares() { vec![&group.samples[..]] } else { places.iter().map(each).collect() };
        let mut grades: Vec<Result<Earnings, String>> = Vec::with_capacity(group.samples.len());
        for asked in questions {
            let said = match judge.question(asked) {
                Ok(question) => self.verdict(judge, group.id(), question, asked.len()).await?,
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
        let said = judge.reply(&self.config.url, &body);
        if let Ok(said) = &said
            && judge.grades(said, answers).is_ok()
            && let Err(error) = judge.verdicts().keep(question, said)
        {
            return Ok(Err(format!("the judge's cache can't be written: {error}")));
        }
        Ok(said)
    }

    /// One answer to one question, however often the service says that it is busy.
    async fn tell(&self, group: u64, question: Vec<u8>) -> Result<Bytes, ServiceError> {
        let url = &self.config.url;
        let mut busy_since = None;
        for turned_away in 1.. {
            let Reply { status, retry_after, body } =
                post(&self.uri, self.config.token.as_ref(), question.clone(), self.config.timeout).await?;
            match status {
                StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => {
                    let waited = busy_since.get_or_insert_with(Instant::now).elapsed();
                    // No shorter than its own, lest a service that asks for none be asked without end.
                    let pause = self.pause(group, turned_away).max(retry_after.unwrap_or_default());
                    if waited + pause > self.config.patience {
                        let (status, seconds) = (status.as_u16(), waited.as_secs_f64());
                        return Err(ServiceError::Busy { url: url.clone(), status, seconds });
                    }
                    sleep(pause).await;
                }
                status if status.is_success() => return Ok(body),
                status => {
                    let (status, begins) = (status.as_u16(), protocol::begins(&body));
                    return Err(ServiceError::Status { url: url.clone(), status, begins });
                }
            }
        }
        unreachable!("patience ends")
    }

    /// Before the `nth` retry, from 1: between half of a doubling pause and the whole, by the group, so that groups which failed together
    /// do not come back together.
    fn pause(&self, group: u64, nth: u32) -> Duration {
        let longest = self.config.pause.saturating_mul(1_u32.checked_shl(nth - 1).unwrap_or(u32::MAX)).min(LONGEST_PAUSE);
        longest.mul_f64(0.5 + 0.5 * chance(group, nth))
    }
}

/// In [0, 1), the same for the same arguments (splitmix64).
fn chance(group: u64, nth: u32) -> f64 {
    let mut bits = group.wrapping_add(u64::from(nth).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((bits ^ (bits >> 31)) >> 11) as f64 / (1_u64 << 53) as f64
}

fn failure(sample: u32, attempts: u32, text: String) -> Failure {
    Failure { sample, attempts, kind: FailureKind::Refused, text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_http_with_a_host_or_refused_with_the_reason() {
        for url in ["http://127.0.0.1:9000/score", "http://judge", "http://[::1]:80/a?b=c"] {
            Service::new(ServiceConfig::new(url)).unwrap();
        }
        for (url, why) in [
            ("https://judge/score", "TLS"),
            ("judge:9000/score", "invalid"),
            ("/score", "does not begin with http://"),
            ("ftp://judge", "does not begin with http://"),
            ("", "empty"),
        ] {
            let error = Service::new(ServiceConfig::new(url)).unwrap_err().to_string();
            assert!(error.contains(why) && error.contains("write it as http://host:port/path"), "{error}");
        }
    }

    #[test]
    fn pauses_double_up_to_a_bound_and_groups_spread_over_half_of_them() {
        let service =
            Service::new(ServiceConfig { pause: Duration::from_secs(1), ..ServiceConfig::new("http://judge") }).unwrap();
        for nth in [1, 2, 5, 6, 40, u32::MAX] {
            let longest = f64::from(2_u32.checked_pow(nth - 1).unwrap_or(u32::MAX)).min(30.0);
            let pauses: Vec<f64> = (0..200).map(|group| service.pause(group, nth).as_secs_f64()).collect();
            assert!(pauses.iter().all(|pause| (longest / 2.0..=longest).contains(pause)), "{nth}: {pauses:?}");
            let spread =
                |low: f64| pauses.iter().filter(|pause| **pause >= low * longest && **pause < (low + 0.1) * longest).count();
            assert!([0.5, 0.6, 0.7, 0.8, 0.9].into_iter().all(|low| spread(low) > 20), "{nth}: {pauses:?}");
        }
    }
}
