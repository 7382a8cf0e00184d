//! Reference policies and teachers on servers that return log-probabilities of given tokens.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::try_join_all;
use tokio::sync::Semaphore;

use super::{BoxError, Reference, Source};
use crate::data::{Sample, TopK, TopTokens};
use crate::engine::remote::InferenceEngine;
use crate::net::{Fault, RemoteError, RetryPolicy, Tasks};

/// A server that scores tokens, and how it is asked.
pub struct ServedReference {
    /// Client of the server.
    pub engine: Arc<dyn InferenceEngine>,
    /// Retries of a failed request.
    pub retry: RetryPolicy,
    /// Timeout of one sample's log-probabilities, retries included.
    pub timeout: Duration,
    /// Samples that are asked for at the same time.
    pub concurrency: usize,
}

impl<W: Send + Sync + 'static, M> Reference<W, M> {
    /// Scores by a server's log-probabilities, at temperature 1 and without truncation. The server's
    /// tokens must be the policy's. A sample that cannot be scored ends the run: without its teacher
    /// or reference a step would be another one.
    ///
    /// # Errors
    /// If the machine gives no threads for requests.
    pub fn served(of: ServedReference) -> std::io::Result<Self> {
        let tasks = Tasks::new()?;
        let score = move |samples: &mut [Sample], top_tokens: TopK| -> Result<(), BoxError> {
            let room = Semaphore::new(of.concurrency.max(1));
            let scored = tasks.block_on(try_join_all(samples.iter().map(|sample| of.score(sample, top_tokens, &room))))?;
            for (sample, (log_probs, top)) in samples.iter_mut().zip(scored) {
                (sample.ref_log_probs, sample.teacher) = (log_probs, top);
            }
            Ok(())
        };
        Ok(Reference::of(Source::Served(Box::new(score))).threads(0))
    }
}

impl ServedReference {
    /// Log-probabilities of the sample's trained tokens, 0 for all others, and the likeliest tokens in
    /// their places.
    async fn score(&self, sample: &Sample, top: TopK, room: &Semaphore) -> Result<(Vec<f32>, Option<TopTokens>), BoxError> {
        let mut log_probs = vec![0.0; sample.tokens.len()];
        let trained = (1..sample.tokens.len()).filter(|at| sample.loss_mask[*at] > 0.0);
        let Some(last) = trained.clone().next_back() else { return Ok((log_probs, None)) };
        if sample.temperature.is_some_and(|temperature| temperature != 1.0) {
            return Err(sample.problem("it was not sampled at temperature 1, which is the server's").into());
        }
        let _room = room.acquire().await?;
        let deadline = Instant::now() + self.timeout;
        let asked = self.retry.run(sample.group_index, deadline, || async {
            let left = deadline.saturating_duration_since(Instant::now());
            let late = || {
                RemoteError::new(
                    "the reference's server",
                    Fault::Late { what: "scoring".into(), seconds: self.timeout.as_secs_f64() },
                )
            };
            let tokens = &sample.tokens[..=last];
            let scored = async {
                match top.k {
                    0 => self.engine.score(tokens, None).await.map(|log_probs| (log_probs, None)),
                    _ => self.engine.score_top(tokens, top).await.map(|(log_probs, top)| (log_probs, Some(top))),
                }
            };
            tokio::time::timeout(left, scored).await.unwrap_or_else(|_| Err(late()))
        });
        let (found, top) = asked.await.map_err(|error| sample.problem(&error.to_string()))?;
        for at in trained {
            // The first token has none.
            log_probs[at] = found.get(at - 1).copied().ok_or_else(|| sample.problem("the server scored too few tokens"))?;
        }
        Ok((log_probs, top))
    }
}
