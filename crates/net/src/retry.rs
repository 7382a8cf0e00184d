//! Retries: exponential backoff with jitter, `Retry-After`, and always a budget and a deadline.

use std::time::{Duration, Instant};

use rollflow_util::rng::unit;

/// Policy for retries of a failed request: number, pauses and timeouts.
///
/// A server that answers 429 or 503 is *busy*: waiting for it costs none of the retries and is
/// bounded by `busy_timeout` instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetryPolicy {
    /// Most retries after failures. Default: 2.
    pub retries: u32,
    /// Pause before the first retry. Each further pause is twice as long, less up to half by
    /// chance. Default: 0.5 seconds.
    pub pause: Duration,
    /// Longest pause, unless the server asks for more by `Retry-After`. Default: 30 seconds.
    pub max_pause: Duration,
    /// Longest time that a busy server is waited for. Default: 5 minutes.
    pub busy_timeout: Duration,
}

impl Default for RetryPolicy {
    fn default() -> Self {
        RetryPolicy::DEFAULT
    }
}

/// Meaning of an error for a retry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The server has no room now, and may say in `Retry-After` for how long.
    Busy {
        /// The server's `Retry-After`.
        retry_after: Option<Duration>,
    },
    /// A later attempt may succeed.
    Failed,
    /// Every attempt would fail.
    Final,
}

/// Error of an attempt that may be repeated.
pub trait Retryable {
    /// Meaning for a retry.
    fn outcome(&self) -> Outcome;
}

/// Pause before the `nth` retry, from 1: doubles up to `longest`, less up to half by `key`, so that
/// requests which failed together do not return together.
pub fn backoff(first: Duration, longest: Duration, key: u64, nth: u32) -> Duration {
    let doubled = first.saturating_mul(1_u32.checked_shl(nth.saturating_sub(1)).unwrap_or(u32::MAX)).min(longest);
    doubled.mul_f64(0.5 + 0.5 * unit(key, nth))
}

impl RetryPolicy {
    /// The defaults, also those of recipes.
    pub const DEFAULT: RetryPolicy = RetryPolicy {
        retries: 2,
        pause: Duration::from_millis(500),
        max_pause: Duration::from_secs(30),
        busy_timeout: Duration::from_secs(300),
    };

    /// Pause before the `nth` retry, from 1, of what `key` names.
    pub fn pause(&self, key: u64, nth: u32) -> Duration {
        backoff(self.pause, self.max_pause, key, nth)
    }

    /// Begins a sequence of attempts that ends by `deadline`. `key` spreads the pauses.
    pub fn begin(self, key: u64, deadline: Instant) -> Retries {
        Retries { policy: self, key, deadline, failures: 0, refusals: 0, busy_since: None }
    }

    /// Makes attempts until one succeeds, fails permanently, or budget or deadline are used up;
    /// then returns the last error. Dropping the future ends the attempt under way.
    pub async fn run<T, E: Retryable, F: Future<Output = Result<T, E>>>(
        self,
        key: u64,
        deadline: Instant,
        mut attempt: impl FnMut() -> F,
    ) -> Result<T, E> {
        let mut retries = self.begin(key, deadline);
        loop {
            let error = match attempt().await {
                Ok(done) => return Ok(done),
                Err(error) => error,
            };
            match retries.after(error.outcome(), Instant::now()) {
                Some(pause) => tokio::time::sleep(pause).await,
                None => return Err(error),
            }
        }
    }
}

/// A sequence of attempts under a [`RetryPolicy`]: pure, with the clock as an argument.
#[derive(Clone, Debug)]
pub struct Retries {
    policy: RetryPolicy,
    key: u64,
    deadline: Instant,
    failures: u32,
    /// Busy answers in a row.
    refusals: u32,
    busy_since: Option<Instant>,
}

impl Retries {
    /// The pause before the next attempt, or `None` if there is none: the error is final, the
    /// budget is used up, or the pause would pass the deadline.
    pub fn after(&mut self, outcome: Outcome, now: Instant) -> Option<Duration> {
        let (pause, deadline) = match outcome {
            Outcome::Final => return None,
            Outcome::Failed => {
                (self.refusals, self.busy_since) = (0, None);
                self.failures += 1;
                if self.failures > self.policy.retries {
                    return None;
                }
                (self.policy.pause(self.key, self.failures), self.deadline)
            }
            Outcome::Busy { retry_after } => {
                self.refusals += 1;
                let since = *self.busy_since.get_or_insert(now);
                // At least our own pause, so that a server which asks for none is not asked in a
                // loop.
                let pause = self.policy.pause(self.key, self.refusals).max(retry_after.unwrap_or_default());
                let busy = since.checked_add(self.policy.busy_timeout).unwrap_or(self.deadline);
                (pause, self.deadline.min(busy))
            }
        };
        now.checked_add(pause).filter(|then| *then < deadline).map(|_| pause)
    }
}

#[cfg(test)]
mod tests {
    use std::future::ready;

    use super::*;

    impl Retryable for Outcome {
        fn outcome(&self) -> Outcome {
            *self
        }
    }

    const BUSY: Outcome = Outcome::Busy { retry_after: None };

    #[test]
    fn pauses_double_up_to_a_bound_and_spread_over_half_of_it() {
        let policy = RetryPolicy { pause: Duration::from_secs(1), ..RetryPolicy::default() };
        for nth in [1, 2, 5, 6, 40, u32::MAX] {
            let longest = f64::from(2_u32.checked_pow(nth - 1).unwrap_or(u32::MAX)).min(30.0);
            let pauses: Vec<f64> = (0..200).map(|key| policy.pause(key, nth).as_secs_f64()).collect();
            assert!(pauses.iter().all(|pause| (longest / 2.0..=longest).contains(pause)), "{nth}: {pauses:?}");
            let spread =
                |low: f64| pauses.iter().filter(|pause| **pause >= low * longest && **pause < (low + 0.1) * longest).count();
            assert!([0.5, 0.6, 0.7, 0.8, 0.9].into_iter().all(|low| spread(low) > 20), "{nth}: {pauses:?}");
        }
    }

    #[test]
    fn failures_use_the_budget_and_a_busy_server_does_not() {
        let now = Instant::now();
        let mut retries = RetryPolicy::default().begin(7, now + Duration::from_secs(3600));
        assert!((0..8).all(|_| retries.after(BUSY, now).is_some()));
        assert!(retries.after(Outcome::Failed, now).is_some() && retries.after(BUSY, now).is_some());
        assert!(retries.after(Outcome::Failed, now).is_some());
        assert_eq!(retries.after(Outcome::Failed, now), None);
        assert_eq!(RetryPolicy::default().begin(7, now + Duration::from_secs(9)).after(Outcome::Final, now), None);
    }

    #[test]
    fn every_wait_ends_by_its_deadline() {
        let now = Instant::now();
        let mut retries = RetryPolicy::default().begin(7, now + Duration::from_secs(3600));
        let asks_for = |seconds| Outcome::Busy { retry_after: Some(Duration::from_secs(seconds)) };
        assert_eq!(retries.after(asks_for(100), now), Some(Duration::from_secs(100)), "the server's own pause counts");
        assert_eq!(retries.after(asks_for(100), now + Duration::from_secs(250)), None, "busy for more than five minutes");
        let mut retries = RetryPolicy::default().begin(7, now + Duration::from_millis(100));
        assert_eq!(retries.after(Outcome::Failed, now), None, "the pause would pass the deadline");
    }

    #[tokio::test]
    async fn attempts_are_made_until_one_succeeds() {
        let policy = RetryPolicy { pause: Duration::from_millis(1), ..RetryPolicy::default() };
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut left = vec![Outcome::Failed, BUSY, BUSY, Outcome::Failed];
        let made = policy.run(1, deadline, || ready(left.pop().map_or(Ok("done"), Err))).await;
        assert_eq!(made, Ok("done"));
        let mut asked = 0;
        let lost: Result<(), Outcome> = policy
            .run(1, deadline, || {
                asked += 1;
                ready(Err(Outcome::Failed))
            })
            .await;
        assert_eq!((lost, asked), (Err(Outcome::Failed), 3));
    }
}
