//! One attempt on one engine, as a task that validates, bounds and forwards the engine's tokens.

use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::sync::Arc;

use futures_util::FutureExt;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};

use super::in_flight::SampleKey;
use super::{Attempt, Ending, Fault, FleetConfig, FleetHandle, InferenceEngine, RemoteError};

#[derive(Debug)]
pub(super) struct AttemptEvent {
    pub(super) key: SampleKey,
    pub(super) number: u32,
    /// Place of the engine.
    pub(super) place: usize,
    pub(super) update: AttemptUpdate,
}

#[derive(Debug)]
pub(super) enum AttemptUpdate {
    Tokens(Vec<(u32, f32)>),
    /// End of the attempt, which every attempt reports once.
    Ended(Result<Ending, RemoteError>),
}

/// Runs an attempt and sends its events to `to`, the last always [`AttemptUpdate::Ended`].
pub(super) async fn run(
    handle: FleetHandle,
    engine: Arc<dyn InferenceEngine>,
    place: usize,
    attempt: Attempt,
    config: FleetConfig,
    to: flume::Sender<AttemptEvent>,
) {
    let (key, number) = ((attempt.ordinal, attempt.index), attempt.number);
    let update = |update| AttemptEvent { key, number, place, update };
    let synced_until = || handle.synced_until(place).map(Instant::from_std);
    let ended = follow(&*engine, &attempt, &config, synced_until, |chunk| {
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
    config: &FleetConfig,
    synced_until: impl Fn() -> Option<Instant>,
    tell: impl Fn(Vec<(u32, f32)>) -> F,
) -> Result<Ending, RemoteError> {
    let fault = |fault| RemoteError::new(engine.name(), fault);
    let gone = || fault(Fault::Broke("the run no longer needs it".into()));
    let (tokens, mut chunks) = mpsc::channel(8);
    let mut generate = pin!(AssertUnwindSafe(engine.generate(attempt, &tokens)).catch_unwind());
    let whole = Instant::now() + config.attempt_timeout;
    let (mut made, mut last_token) = (0, Instant::now());
    // Syncs that never end, or fail one after another, keep a sample waiting for so long.
    let mut synced_by = last_token + config.stall_timeout + config.sync_timeout;
    let ended = loop {
        tokio::select! {
            biased;
            Some(chunk) = chunks.recv() => {
                check(attempt, config.vocabulary, &chunk, &mut made).map_err(fault)?;
                if !tell(chunk).await {
                    return Err(gone());
                }
                // Time in which the receiver blocked does not count.
                last_token = Instant::now();
                synced_by = last_token + config.stall_timeout + config.sync_timeout;
            }
            ended = &mut generate => break ended,
            () = sleep_until(whole.min(last_token + config.stall_timeout)) => {
                // A paused engine sends nothing.
                if let Some(synced) = synced_until().filter(|synced| *synced > last_token && Instant::now() < whole.min(synced_by)) {
                    last_token = synced;
                    continue;
                }
                let (what, limit) = if Instant::now() >= whole {
                    ("the whole sample".to_owned(), config.attempt_timeout)
                } else {
                    (format!("the request for token {}", attempt.answered + made), config.stall_timeout)
                };
                return Err(fault(Fault::Late { what, seconds: limit.as_secs_f64() }));
            }
        }
    };
    while let Ok(chunk) = chunks.try_recv() {
        check(attempt, config.vocabulary, &chunk, &mut made).map_err(fault)?;
        if !tell(chunk).await {
            return Err(gone());
        }
    }
    ended.unwrap_or_else(|_| Err(fault(Fault::Broke("it panicked".into()))))
}

fn check(attempt: &Attempt, vocabulary: usize, chunk: &[(u32, f32)], made: &mut usize) -> Result<(), Fault> {
    *made += chunk.len();
    let why = if *made > attempt.rest() {
        format!("{made} tokens, of which at most {} were asked for", attempt.rest())
    } else if let Some((token, _)) = chunk.iter().find(|(token, _)| *token as usize >= vocabulary) {
        format!("token {token}, beyond the vocabulary of {vocabulary}")
    } else if let Some((_, log_prob)) = chunk.iter().find(|(_, log_prob)| !(log_prob.is_finite() && *log_prob <= 1e-3)) {
        format!("a log-probability of {log_prob}")
    } else {
        return Ok(());
    };
    let begins: Vec<u32> = chunk.iter().take(8).map(|(token, _)| *token).collect();
    Err(Fault::Nonsense { what: "the request".into(), why, begins: format!("tokens {begins:?}") })
}
