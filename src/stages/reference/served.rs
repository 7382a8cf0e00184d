//! Reference policies and teachers on servers that return log-probabilities of given tokens.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::try_join_all;
use tokio::sync::Semaphore;

use super::{BoxError, Reference, Source};
use crate::data::{Sample, TopK, TopTokens};
use crate::engine::remote::InferenceEngine;
use crate::flow::StageError;
use crate::net::{Fault, RemoteError, RetryPolicy, Tasks};

/// A server that scores tokens, and how it is asked.
pub struct ServedReference {
    /// Client of the server.
    pub engine: Arc<dyn InferenceEngine>,
    /// Retries of a failed request.
    pub retry: RetryPolicy,
    /// Timeout of one sample's log-probabilities, retries included.
    pub timeout: Duration,
    /// Samples that are asked for at the same time, of all groups in flight together.
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
        let scorer = ServedScorer { tasks: Tasks::new()?, room: Semaphore::new(of.concurrency.max(1)), of };
        Ok(Reference::of(Source::Served(Arc::new(scorer))).threads(0))
    }
}

/// A server with the tasks of its requests, which the workers of a stage share.
pub(super) struct ServedScorer {
    of: ServedReference,
    tasks: Tasks,
    /// Requests that may be made.
    room: Semaphore,
}

impl ServedScorer {
    /// Samples that are asked for at the same time, at least 1.
    pub(super) fn concurrency(&self) -> usize {
        self.of.concurrency.max(1)
    }

    /// Writes log-probabilities into samples. Abandons all requests once the run has `stopped`.
    pub(super) fn score(
        &self,
        samples: Vec<&mut Sample>,
        top: TopK,
        stopped: impl Future<Output = ()>,
    ) -> Result<(), StageError> {
        let asked = try_join_all(samples.iter().map(|sample| self.of.score(sample, top, &self.room)));
        let scored = self.tasks.block_on(async {
            tokio::select! {
                biased;
                () = stopped => Err(StageError::closed()),
                scored = asked => scored.map_err(StageError::new),
            }
        })?;
        for (sample, (log_probs, likeliest)) in samples.into_iter().zip(scored) {
            sample.ref_log_probs = log_probs;
            if top.k > 0 {
                sample.teacher = likeliest;
            }
        }
        Ok(())
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

#[cfg(test)]
mod tests {
    use async_trait::async_trait;
    use parking_lot::Mutex;
    use tokio::sync::Barrier;
    use tokio::sync::mpsc::Sender;

    use super::super::Scorable;
    use super::*;
    use crate::data::{Batch, Group, Prompt, Scored};
    use crate::engine::remote::{Attempt, Ending};
    use crate::flow::{Ended, Flow, Stage, Until, from_iter};

    /// Answers requests once enough of them have arrived.
    struct Together {
        enough: Barrier,
        arrived: Box<dyn Fn() + Send + Sync>,
    }

    #[async_trait]
    impl InferenceEngine for Together {
        fn name(&self) -> String {
            "together".to_owned()
        }

        async fn generate(&self, _: &Attempt, _: &Sender<Vec<(u32, f32)>>) -> Result<Ending, RemoteError> {
            Ok(Ending::default())
        }

        async fn score(&self, tokens: &[u32], _: Option<&str>) -> Result<Vec<f32>, RemoteError> {
            (self.arrived)();
            self.enough.wait().await;
            Ok(vec![-1.0; tokens.len() - 1])
        }
    }

    fn reference<M>(enough: usize, arrived: impl Fn() + Send + Sync + 'static) -> Reference<(), M> {
        let engine = Arc::new(Together { enough: Barrier::new(enough), arrived: Box::new(arrived) });
        let (retry, timeout) = (RetryPolicy::default(), Duration::from_secs(20));
        Reference::served(ServedReference { engine, retry, timeout, concurrency: 16 }).unwrap()
    }

    /// A group of which another teacher has listed tokens.
    fn group(id: u64, size: u32) -> Group {
        let prompt = Prompt { ordinal: id, ..Prompt::default() };
        let sample = |index| {
            let mut sample = Sample::begin(&prompt, index, &[1]);
            sample.push(2, -0.5, 1);
            Sample { teacher: Some(TopTokens::new(1, 2, 1)), ..sample }
        };
        Group { samples: (0..size).map(sample).collect(), prompt: Arc::new(prompt), ..Group::default() }
    }

    /// Checks that these messages are scored by 16 requests at the same time, in their order.
    fn assert_together<M: Scorable>(messages: Vec<M>, samples: impl Fn(&M) -> Vec<Sample>) {
        let sent: Vec<Sample> = messages.iter().flat_map(&samples).collect();
        let seen: Arc<Mutex<Vec<M>>> = Arc::default();
        let mut flow = Flow::new("reference");
        let source = flow.source("messages", from_iter(messages));
        let scored = flow.stage("reference", source, reference::<M>(16, || {}));
        let took = seen.clone();
        flow.sink("seen", scored, move |message: M| took.lock().push(message));
        flow.run(Until::finished()).unwrap();
        let seen: Vec<Sample> = seen.lock().iter().flat_map(samples).collect();
        let scored = |sample| Sample { ref_log_probs: vec![0.0, -1.0], ..sample };
        assert_eq!(seen, sent.into_iter().map(scored).collect::<Vec<_>>());
    }

    #[test]
    fn a_server_gets_the_groups_of_a_batch_and_several_scored_groups_at_the_same_time() {
        let groups = (0..8).map(|id| group(id, 2)).collect();
        assert_together(vec![Batch { groups, ..Batch::default() }], |batch| batch.samples().cloned().collect());
        let scored = (0..16).map(|id| Scored::unrewarded(group(id, 1))).collect();
        assert_together(scored, |scored: &Scored| scored.group().samples.clone());
    }

    #[test]
    fn f5_a_stop_abandons_requests_to_a_server_that_never_answers() {
        let mut flow = Flow::new("reference");
        let handle = flow.handle();
        let source = flow.source("groups", from_iter([Scored::unrewarded(group(0, 1))]));
        let scored = flow.stage("reference", source, reference::<Scored>(2, move || handle.stop()));
        flow.sink("seen", scored, |_: Scored| {});
        assert_eq!(flow.run(Until::finished()).unwrap().ended, Ended::Stopped);
    }

    #[test]
    fn servers_are_named_as_what_to_raise_and_threads_otherwise() {
        let (served, frozen) = (|| reference::<Scored>(1, || {}), Reference::frozen(|_, _| Ok(()), Arc::new(())));
        let all = |reference| vec![(vec!["sums".to_owned()], served()), (Vec::new(), reference)];
        let cases = [served(), Reference::by_source(all(served())), Reference::by_source(all(frozen))];
        let named = cases.map(|reference| (reference.spec().knob.unwrap(), reference.spec().workers));
        let [one, several, mixed] = named.each_ref().map(|(knob, workers)| (knob.as_str(), *workers));
        assert_eq!([one, several], [("concurrency, or servers", 16); 2], "as many workers as samples that servers are asked for");
        assert_eq!(mixed, ("threads", 1));
    }
}
