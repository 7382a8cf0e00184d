//! Sync of one engine.
//!
//! ```text
//! pause → load → label → check → (flush) → resume → probe → done
//!   ↑ wrong weights in check or probe load once more      any other failure retries its phase
//! ```
//!
//! The probe follows the resume, because a paused server answers nothing. Until the probe succeeds,
//! no version is committed; if it fails, tokens sampled since the resume are discarded.
//!
//! An adapter needs no pause, because no request names it before its probe: load → check → probe.

use std::time::{Duration, Instant};

use futures_util::future::try_join_all;
use tokio::time::timeout;

use super::verify::{Checksums, check_changed};
use super::{CachePolicy, SyncConfig, Update};
use crate::algo::Disagreement;
use crate::engine::remote::{FleetHandle, InferenceEngine, PauseMode, RemoteError, WeightControl};
use crate::net::{RetryPolicy, deadline};

/// Longest time to pause an engine that failed.
const LAST_WORDS: Duration = Duration::from_secs(5);

/// Pauses between attempts. [`after`] limits their number.
const TRIES: RetryPolicy = RetryPolicy {
    retries: u32::MAX,
    pause: Duration::from_millis(100),
    max_pause: Duration::from_secs(10),
    busy_timeout: Duration::from_secs(3600),
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Pause,
    Load,
    Label,
    /// Reads label and checksums back.
    Check,
    /// Clears the cache of finished work.
    Flush,
    Resume,
    /// Compares log-probabilities with the trainer's.
    Probe,
}

impl Phase {
    pub(super) fn word(self) -> &'static str {
        match self {
            Phase::Pause => "pause",
            Phase::Load => "load",
            Phase::Label => "label",
            Phase::Check => "check",
            Phase::Flush => "flush",
            Phase::Resume => "resume",
            Phase::Probe => "probe",
        }
    }
}

/// All phases of a sync, in order.
fn phases(adapter: bool, cache: CachePolicy) -> &'static [Phase] {
    use Phase::{Check, Flush, Label, Load, Pause, Probe, Resume};
    match (adapter, cache) {
        (true, _) => &[Load, Check, Probe],
        (false, CachePolicy::Flush) => &[Pause, Load, Label, Check, Flush, Resume, Probe],
        (false, _) => &[Pause, Load, Label, Check, Resume, Probe],
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Failure {
    /// Retried in the same phase.
    Passing,
    /// Other weights than the given ones: loaded again.
    WrongWeights,
    /// Not retried.
    Lasting,
}

/// Place of the next phase after the one at `place`; `None` isolates the engine. `retries` counts
/// over all phases.
fn after(place: usize, failed: Option<Failure>, retries: &mut u32) -> Option<usize> {
    let Some(how) = failed else { return Some(place + 1) };
    *retries = retries.checked_sub(1).filter(|_| how != Failure::Lasting)?;
    Some(if how == Failure::WrongWeights { 0 } else { place })
}

#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub(super) enum StepError {
    #[error("{0}")]
    Engine(#[from] RemoteError),
    #[error("timeout after {seconds} s; check whether the server hangs, or raise the timeout")]
    Late { seconds: f64 },
    #[error("it has no weight control: its weights are fixed")]
    Fixed,
    #[error("its client panicked: {0}")]
    Broke(String),
    #[error(
        "it serves the new weights under the output head that it was started with ({mean:.4} nats off on average). The model's head is its \
         embedding, and this server reloads one without the other and reports success. Set engine.untie = true and start the server \
         from a folder that was exported so (`rollflow engine launch` does both)"
    )]
    OldHead { mean: f64 },
    #[error(
        "its log-probabilities of {} tokens differ from the trainer's by {:.5} nats on average and {:.5} at most; {} are allowed. \
         Either it did not load the weights, or it computes in another precision: then raise engine.tolerance",
        .0.tokens, .0.mean, .0.max, .0.tolerance
    )]
    Differs(Disagreement),
    #[error("it scored {scored} tokens where there are {tokens}")]
    Misaligned { tokens: usize, scored: usize },
    #[error("it was labelled {given:?} and reports {:?}: does another run load weights into it?", says.as_deref().unwrap_or("nothing"))]
    Label { given: String, says: Option<String> },
    #[error(
        "it was given the adapter {given:?} and has {has:?}: its limit of adapters is too low, or another client unloads them"
    )]
    NoAdapter { given: String, has: Vec<String> },
    #[error("its checksums are those from before, though the weights changed: it loaded nothing, or another folder")]
    Unchanged,
    #[error("its checksum of {tensor} differs from that of the other engines, which loaded the same weights")]
    Unlike { tensor: String },
}

impl StepError {
    fn failure(&self) -> Failure {
        match self {
            StepError::Engine(error) if error.fault.passes() => Failure::Passing,
            StepError::Late { .. } | StepError::Broke(_) => Failure::Passing,
            // The server repeats the error of the old head.
            StepError::Engine(_) | StepError::Fixed | StepError::OldHead { .. } => Failure::Lasting,
            _ => Failure::WrongWeights,
        }
    }
}

/// Engine that does not hold the given weights. It is paused if it is reachable.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{engine} failed to {}: {error}", phase.word())]
pub struct IsolatedEngine {
    /// Name of the engine.
    pub engine: String,
    pub(super) phase: Phase,
    pub(super) error: StepError,
}

impl IsolatedEngine {
    /// Returns true if the engine may only be unreachable or slow.
    pub fn is_away(&self) -> bool {
        self.error.failure() == Failure::Passing
    }
}

/// Engine that holds the given weights.
#[derive(Clone, Debug, Default)]
pub(super) struct SyncedEngine {
    /// Duration of each phase, including failed attempts.
    pub(super) times: Vec<(&'static str, Duration)>,
    pub(super) sums: Option<Checksums>,
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
    let (phases, mut at, mut retries, mut held) =
        (phases(update.adapter, config.cache), 0, config.retries, SyncedEngine::default());
    while let Some(&phase) = phases.get(at) {
        if phase == Phase::Resume {
            fleet.start_trial(place);
        }
        let (limit, started) = (config.timeout(phase), Instant::now());
        let late = Err(StepError::Late { seconds: limit.as_secs_f64() });
        let done = timeout(limit, step(engine, control, phase, update, config, before, &mut held.sums)).await.unwrap_or(late);
        held.times.push((phase.word(), started.elapsed()));
        let next = after(at, done.as_ref().err().map(StepError::failure), &mut retries);
        if let Err(error) = done {
            // Before the engine ends its work, so that the reason is known then.
            let stays = next.is_some_and(|next| matches!(phases[next], Phase::Resume | Phase::Probe));
            if !stays && fleet.on_trial(place) {
                fleet.mark_doubtful(place);
            }
            if next.is_none() {
                // Work in flight must not continue under unknown weights. An adapter that no
                // request names changes nothing.
                if !update.adapter {
                    timeout(LAST_WORDS, control.pause(PauseMode::Abort)).await.ok();
                }
                return Err(isolated(phase, error));
            }
            tokio::time::sleep(TRIES.pause(place as u64, config.retries - retries)).await;
        }
        at = next.unwrap_or(at);
    }
    Ok(held)
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
        Phase::Load if update.adapter => control.load_adapter(&label, &update.folder).await?,
        Phase::Load => control.load(&update.folder, &label).await?,
        Phase::Label => control.label(&label).await?,
        Phase::Check if update.adapter => {
            let has = control.adapters().await?;
            if !has.contains(&label) {
                return Err(StepError::NoAdapter { given: label, has });
            }
        }
        Phase::Check => {
            let says = control.served().await?;
            if says.as_deref() != Some(&label) {
                return Err(StepError::Label { given: label, says });
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
            // In parallel, because samples of that time depend on the result. For an adapter one by
            // one: several texts under one crash vLLM on CPUs.
            let at_once = if update.adapter { 1 } else { update.texts.len().max(1) };
            let mut found = Vec::with_capacity(update.texts.len());
            for texts in update.texts.chunks(at_once) {
                found.extend(try_join_all(texts.iter().map(|text| score(engine, text, adapter))).await?);
            }
            update.judge(&found)?;
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::Phase::*;
    use super::*;

    /// Phases of a sync whose phases fail so, and the one that isolated the engine.
    fn walk(phases: &[Phase], mut retries: u32, mut fails: impl FnMut(Phase) -> Option<Failure>) -> (Vec<Phase>, Option<Phase>) {
        let (mut done, mut at) = (Vec::new(), 0);
        while let Some(&phase) = phases.get(at) {
            done.push(phase);
            match after(at, fails(phase), &mut retries) {
                Some(next) => at = next,
                None => return (done, Some(phase)),
            }
        }
        (done, None)
    }

    #[test]
    fn nothing_resumes_before_its_weights_are_loaded_and_named_and_nothing_is_held_before_a_probe() {
        let flushed = phases(false, CachePolicy::Flush);
        assert_eq!(phases(false, CachePolicy::Keep), [Pause, Load, Label, Check, Resume, Probe]);
        assert_eq!(flushed, [Pause, Load, Label, Check, Flush, Resume, Probe]);
        assert_eq!(phases(true, CachePolicy::Flush), [Load, Check, Probe]);
        assert_eq!(walk(flushed, 0, |_| None), (flushed.to_vec(), None));
    }

    #[test]
    fn wrong_weights_are_loaded_again_and_other_failures_tried_again_where_they_were() {
        let phases = phases(false, CachePolicy::Keep);
        for (retries, at, how, expected, isolated) in [
            (1, Probe, Failure::WrongWeights, &[Pause, Load, Label, Check, Resume, Probe, Pause, Load][..], None),
            (1, Load, Failure::Passing, &[Pause, Load, Load, Label], None),
            (9, Load, Failure::Lasting, &[Pause, Load], Some(Load)),
            (0, Load, Failure::Passing, &[Pause, Load], Some(Load)),
        ] {
            let mut left = 1;
            let (done, end) = walk(phases, retries, |phase| (phase == at && std::mem::take(&mut left) > 0).then_some(how));
            assert_eq!((&done[..expected.len()], end), (expected, isolated));
        }
    }

    proptest! {
        #[test]
        fn every_sync_ends(draws in proptest::collection::vec(0u8..5, 200), retries in 0u32..6, flushes: bool) {
            let mut draws = draws.into_iter();
            let phases = phases(false, if flushes { CachePolicy::Flush } else { CachePolicy::Keep });
            let (done, isolated) = walk(phases, retries, |_| match draws.next() {
                Some(0) => Some(Failure::Passing),
                Some(1) => Some(Failure::WrongWeights),
                Some(2) => Some(Failure::Lasting),
                _ => None,
            });
            prop_assert!(done.len() <= 7 * (retries as usize + 1));
            prop_assert!(isolated.is_some() || done.last() == Some(&Probe));
        }
    }
}
