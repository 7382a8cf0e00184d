//! Sync of one engine.

use std::future::Future;
use std::time::{Duration, Instant};

use futures_util::future::try_join_all;
use tokio::time::timeout;

use super::state::{Failure, Next, WeightSyncState};
use super::verify::{Checksums, check_changed};
use super::{CachePolicy, Phase, SyncConfig, Update, WrongWeights};
use crate::engine::remote::{FleetHandle, InferenceEngine, PauseMode, RemoteError, WeightControl};
use crate::net::{RetryPolicy, deadline};

/// Longest time to pause an engine that failed.
const LAST_WORDS: Duration = Duration::from_secs(5);

/// Pauses between attempts. [`WeightSyncState`] limits their number.
const TRIES: RetryPolicy = RetryPolicy {
    retries: u32::MAX,
    pause: Duration::from_millis(100),
    max_pause: Duration::from_secs(10),
    busy_timeout: Duration::from_secs(3600),
};

/// Error of a phase.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum StepError {
    /// Error of the engine or of the connection.
    #[error("{0}")]
    Engine(#[from] RemoteError),
    /// Timeout of the phase.
    #[error("timeout after {seconds} s; check whether the server hangs, or raise the timeout")]
    Late {
        /// The timeout.
        seconds: f64,
    },
    /// Other weights than the given ones.
    #[error("{0}")]
    Wrong(Box<WrongWeights>),
    /// Engine without weight control.
    #[error("it has no weight control: its weights are fixed")]
    Fixed,
    /// Panic of the engine's client.
    #[error("its client panicked: {0}")]
    Broke(String),
}

/// Engine that does not hold the given weights. It is paused if it is reachable.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{engine} failed to {}: {error}", phase.word())]
pub struct IsolatedEngine {
    /// Name of the engine.
    pub engine: String,
    /// Phase that failed.
    pub phase: Phase,
    /// Cause.
    pub error: StepError,
}

/// Engine that holds the given weights.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SyncedEngine {
    /// Duration of each phase, including failed attempts.
    pub times: Vec<(Phase, Duration)>,
    /// Checksums, if the engine has any.
    pub sums: Option<Checksums>,
    /// Number of retries.
    pub retries: u32,
}

impl IsolatedEngine {
    /// Returns true if the engine may only be unreachable or slow.
    pub fn is_away(&self) -> bool {
        self.error.failure() == Failure::Passing
    }
}

impl From<WrongWeights> for StepError {
    fn from(wrong: WrongWeights) -> Self {
        StepError::Wrong(Box::new(wrong))
    }
}

impl StepError {
    fn failure(&self) -> Failure {
        match self {
            StepError::Engine(error) if error.fault.passes() => Failure::Passing,
            StepError::Late { .. } | StepError::Broke(_) => Failure::Passing,
            // The server repeats this error.
            StepError::Wrong(wrong) if matches!(**wrong, WrongWeights::OldHead { .. }) => Failure::Lasting,
            StepError::Wrong(_) => Failure::WrongWeights,
            StepError::Engine(_) | StepError::Fixed => Failure::Lasting,
        }
    }
}

/// Brings the engine at `place` to the weights of `update`, or isolates it.
pub(super) async fn sync_engine(
    fleet: &FleetHandle,
    place: usize,
    update: &Update,
    config: &SyncConfig,
    before: Option<&Checksums>,
) -> Result<SyncedEngine, IsolatedEngine> {
    let engine = fleet.engines()[place].as_ref();
    let isolated = |phase, error| IsolatedEngine { engine: engine.name(), phase, error };
    let Some(control) = engine.weights() else { return Err(isolated(Phase::Load, StepError::Fixed)) };
    let (mut last, mut held) = (None, SyncedEngine::default());
    let mut state = match update.adapter {
        true => WeightSyncState::of_adapter(config.retries),
        false => WeightSyncState::new(config.cache == CachePolicy::Flush, config.retries),
    };
    loop {
        match state.next() {
            Next::Done => return Ok(held),
            Next::Isolated(phase) => {
                // Work in flight must not continue under unknown weights. An adapter that no
                // request names changes nothing.
                if !update.adapter {
                    timeout(LAST_WORDS, control.pause(PauseMode::Abort)).await.ok();
                }
                return Err(isolated(phase, last.unwrap_or(StepError::Fixed)));
            }
            Next::Do(phase) => {
                if phase == Phase::Resume {
                    fleet.start_trial(place);
                }
                let (limit, started) = (config.timeout(phase), Instant::now());
                let done = within(limit, step(engine, control, phase, update, config, before, &mut held.sums)).await;
                held.times.push((phase, started.elapsed()));
                match done {
                    Ok(()) => state.passed(),
                    Err(error) => {
                        state.failed(error.failure());
                        last = Some(error);
                        // Before the engine ends its work, so that the reason is known then.
                        if !matches!(state.next(), Next::Do(Phase::Resume | Phase::Probe)) && fleet.on_trial(place) {
                            fleet.mark_doubtful(place);
                        }
                        if matches!(state.next(), Next::Do(_)) {
                            held.retries += 1;
                            tokio::time::sleep(TRIES.pause(place as u64, held.retries)).await;
                        }
                    }
                }
            }
        }
    }
}

async fn within(limit: Duration, step: impl Future<Output = Result<(), StepError>>) -> Result<(), StepError> {
    timeout(limit, step).await.unwrap_or(Err(StepError::Late { seconds: limit.as_secs_f64() }))
}

async fn step(
    engine: &dyn InferenceEngine,
    control: &dyn WeightControl,
    phase: Phase,
    update: &Update,
    config: &SyncConfig,
    before: Option<&Checksums>,
    sums: &mut Option<Checksums>,
) -> Result<(), StepError> {
    let label = update.label();
    match phase {
        Phase::Pause => control.pause(config.pause).await?,
        Phase::Load if update.adapter => control.load_adapter(&label, update.release.path()).await?,
        Phase::Load => control.load(update.release.path(), &label).await?,
        Phase::Label => control.label(&label).await?,
        Phase::Check if update.adapter => {
            let has = control.adapters().await?;
            if !has.contains(&label) {
                return Err(WrongWeights::NoAdapter { given: label, has }.into());
            }
        }
        Phase::Check => {
            let says = control.served().await?;
            if says.as_deref() != Some(&label) {
                return Err(WrongWeights::Label { given: label, says }.into());
            }
            if config.checksums {
                *sums = control.checksums().await?;
                check_changed(before, sums.as_ref(), update.changed)?;
            }
        }
        Phase::Flush => control.flush_cache().await?,
        Phase::Resume => control.resume().await?,
        Phase::Probe => {
            let adapter = update.adapter.then_some(label.as_str());
            let texts = &update.probe.texts;
            // In parallel, because samples of that time depend on the result. For an adapter one by
            // one: several texts under one crash vLLM on CPUs.
            let at_once = if update.adapter { 1 } else { texts.len().max(1) };
            let mut found = Vec::with_capacity(texts.len());
            for texts in texts.chunks(at_once) {
                found.extend(try_join_all(texts.iter().map(|text| score(engine, text, adapter))).await?);
            }
            update.probe.judge(&found)?;
        }
    }
    Ok(())
}

/// Returns log-probabilities of a text. A server that has just resumed may reject requests for a
/// moment.
async fn score(engine: &dyn InferenceEngine, text: &[u32], adapter: Option<&str>) -> Result<Vec<f32>, RemoteError> {
    // The timeout of the phase ends it before.
    let policy = RetryPolicy { retries: 0, pause: Duration::from_millis(50), max_pause: Duration::from_millis(500), ..TRIES };
    policy.run(text.len() as u64, deadline(policy.busy_timeout), || engine.score(text, adapter)).await
}
