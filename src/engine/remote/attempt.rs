//! One attempt on one engine, as a task that validates, bounds and forwards the engine's tokens.

use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use super::in_flight::SampleKey;
use super::{Attempt, Chunk, Ending, Fault, InferenceEngine, RemoteError, Tokens};

/// Event of an attempt.
#[derive(Debug)]
pub(super) struct AttemptEvent {
    /// Sample of the attempt.
    pub(super) key: SampleKey,
    /// Number of the attempt.
    pub(super) number: u32,
    pub(super) update: AttemptUpdate,
}

#[derive(Debug)]
pub(super) enum AttemptUpdate {
    /// New tokens.
    Tokens(Chunk),
    /// End of the attempt, which every attempt reports once.
    Ended(Result<Ending, RemoteError>),
}

/// Limits of an attempt.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    /// Longest time without a token.
    pub(super) stall_timeout: Duration,
    /// Longest time of the attempt.
    pub(super) attempt_timeout: Duration,
    /// Number of token ids.
    pub(super) vocabulary: usize,
}

/// Runs an attempt and sends its events to `to`, the last always [`AttemptUpdate::Ended`].
pub(super) async fn run(engine: Arc<dyn InferenceEngine>, attempt: Attempt, bounds: Bounds, to: flume::Sender<AttemptEvent>) {
    let (key, number) = ((attempt.ordinal, attempt.index), attempt.number);
    let update = |update| AttemptEvent { key, number, update };
    let ended = follow(&*engine, &attempt, bounds, |chunk| {
        let event = to.send_async(update(AttemptUpdate::Tokens(chunk)));
        async { event.await.is_ok() }
    })
    .await;
    let ended = ended.map_err(|error| error.of_sample(&attempt.id()));
    // A dropped receiver needs no events.
    drop(to.send_async(update(AttemptUpdate::Ended(ended))).await);
}

async fn follow<F: Future<Output = bool>>(
    engine: &dyn InferenceEngine,
    attempt: &Attempt,
    bounds: Bounds,
    tell: impl Fn(Chunk) -> F,
) -> Result<Ending, RemoteError> {
    let (tokens, mut chunks) = Tokens::channel(8);
    let mut generate = engine.generate(attempt, &tokens);
    let whole = Instant::now() + bounds.attempt_timeout;
    let (mut made, mut last_token) = (0, Instant::now());
    let gone = || RemoteError::new(engine.name(), Fault::Broke { why: "the run no longer needs it".into() });
    let ending = loop {
        let ended = tokio::select! {
            biased;
            Some(chunk) = chunks.recv() => {
                check(engine, attempt, bounds, &chunk, &mut made)?;
                if !tell(chunk).await {
                    return Err(gone());
                }
                // Time in which the receiver blocked does not count.
                last_token = Instant::now();
                continue;
            }
            ended = unpanicked(&mut generate) => ended,
            () = sleep_until(whole.min(last_token + bounds.stall_timeout)) => {
                let (what, seconds) = if Instant::now() >= whole {
                    ("the whole sample".to_owned(), bounds.attempt_timeout.as_secs_f64())
                } else {
                    (format!("the request for token {}", attempt.answered + made), bounds.stall_timeout.as_secs_f64())
                };
                return Err(RemoteError::new(engine.name(), Fault::Late { what, seconds }));
            }
        };
        while let Ok(chunk) = chunks.try_recv() {
            check(engine, attempt, bounds, &chunk, &mut made)?;
            if !tell(chunk).await {
                return Err(gone());
            }
        }
        match ended {
            Some(ended) => break ended?,
            None => return Err(RemoteError::new(engine.name(), Fault::Broke { why: "it panicked".into() })),
        }
    };
    Ok(ending)
}

/// Awaits `work`; returns `None` if it panicked.
async fn unpanicked<T>(work: &mut super::Pending<'_, T>) -> Option<Result<T, RemoteError>> {
    poll_fn(|context| match catch_unwind(AssertUnwindSafe(|| work.as_mut().poll(context))) {
        Ok(Poll::Pending) => Poll::Pending,
        Ok(Poll::Ready(done)) => Poll::Ready(Some(done)),
        Err(_) => Poll::Ready(None),
    })
    .await
}

/// Rejects invalid tokens.
fn check(
    engine: &dyn InferenceEngine,
    attempt: &Attempt,
    bounds: Bounds,
    chunk: &Chunk,
    made: &mut usize,
) -> Result<(), RemoteError> {
    *made += chunk.tokens.len();
    let wrong = if chunk.tokens.len() != chunk.log_probs.len() {
        format!("{} tokens and {} log-probabilities", chunk.tokens.len(), chunk.log_probs.len())
    } else if *made > attempt.rest() {
        format!("{made} tokens, of which at most {} were asked for", attempt.rest())
    } else if let Some(token) = chunk.tokens.iter().find(|token| **token as usize >= bounds.vocabulary) {
        format!("token {token}, beyond the vocabulary of {}", bounds.vocabulary)
    } else if let Some(log_prob) = chunk.log_probs.iter().find(|log_prob| !(log_prob.is_finite() && **log_prob <= 1e-3)) {
        format!("a log-probability of {log_prob}")
    } else {
        return Ok(());
    };
    let begins = format!("tokens {:?}", &chunk.tokens[..chunk.tokens.len().min(8)]);
    Err(RemoteError::new(engine.name(), Fault::Nonsense { what: "the request".into(), why: wrong, begins }))
}
