//! Sync of one engine.
//!
//! ```text
//! (fetch or send) → (wake) → prepare → pause → load → label → check → (flush) → (wake) → resume → probe → done
//!       ↑ wrong weights in check or probe load once more      any other failure retries its phase
//! ```
//!
//! Weights that come through a store, or are sent over HTTP, are on the engine's host before the
//! pause. `rollflow serve` reads them and computes their checksums before it, too.
//!
//! The probe follows the resume, because a paused server answers nothing. Until the probe succeeds,
//! no version is committed; if it fails, tokens sampled since the resume are discarded.
//!
//! An engine that sleeps takes memory for its weights before it loads, and for keys and values after it,
//! when the trainer's step has freed more. One that can sleep may do so since a run that was killed: its
//! first sync wakes it.
//!
//! An adapter needs no pause, because no request names it before its probe: (send) → load → check → probe.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::try_join_all;
use tokio::time::timeout;

use super::verify::{Checksums, check_changed};
use super::{CachePolicy, Carry, SyncConfig, Update};
use crate::algo::Disagreement;
use crate::data::Version;
use crate::engine::remote::handle::EngineState;
use crate::engine::remote::{EngineMemory, FleetHandle, InferenceEngine, PauseMode, RemoteError, WeightControl};
use crate::net::{RetryPolicy, deadline};

/// Longest time for an engine to report what it serves, or what it can do.
const LOOK: Duration = Duration::from_secs(1);

/// Phases of a sync in which an engine generates.
pub(super) const BEFORE_THE_PAUSE: [&str; 3] = ["fetch", "send", "prepare"];

/// Longest time to pause an engine that failed.
const LAST_WORDS: Duration = Duration::from_secs(5);

/// Pauses between attempts. [`SyncConfig::retries`] limits their number.
const TRIES: RetryPolicy = RetryPolicy {
    retries: u32::MAX,
    pause: Duration::from_millis(100),
    max_pause: Duration::from_secs(10),
    busy_timeout: Duration::from_secs(3600),
};

#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub(super) enum StepError {
    #[error("{0}")]
    Engine(#[from] RemoteError),
    #[error("timeout after {seconds} s; check whether the server hangs, or raise the timeout")]
    Late { seconds: f64 },
    #[error("it has no weight control: its weights are fixed")]
    Fixed,
    #[error("it has left")]
    Left,
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
    #[error(
        "version {version} did not arrive on {host} within {seconds} s (engine.load_timeout): {reported}. On that host, run \
         `rollflow weights pull {store} FOLDER --follow --host {host}`"
    )]
    NotArrived { host: String, version: Version, seconds: f64, reported: String, store: String },
    #[error("its host, {host}, holds version {holds} already, which is newer")]
    Skipped { host: String, holds: Version },
    #[error("{0}")]
    Store(String),
    #[error("its checksum of {tensor} differs from that of the other engines, which loaded the same weights")]
    Unlike { tensor: String },
}

impl StepError {
    /// Returns true if the same step may succeed later.
    fn passes(&self) -> bool {
        match self {
            StepError::Engine(error) => error.fault.passes(),
            StepError::Late { .. } | StepError::Broke(_) => true,
            _ => false,
        }
    }

    /// Returns true if the weights are to be loaded again. A server repeats the error of the old
    /// head.
    pub(super) fn wrong_weights(&self) -> bool {
        let elsewhere = matches!(self, StepError::NotArrived { .. } | StepError::Skipped { .. } | StepError::Store(_));
        let about_weights =
            !matches!(self, StepError::Engine(_) | StepError::Fixed | StepError::Left | StepError::OldHead { .. });
        !self.passes() && about_weights && !elsewhere
    }
}

/// Engine that does not hold the given weights. It is paused if it is reachable, unless it was given others
/// before and failed while it still generated under them.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{engine} failed to {phase}: {error}")]
pub struct IsolatedEngine {
    /// Name of the engine.
    pub engine: String,
    pub(super) phase: &'static str,
    pub(super) error: StepError,
}

impl IsolatedEngine {
    /// Returns true if the engine may only be unreachable or slow.
    pub fn is_away(&self) -> bool {
        self.error.passes()
            || matches!(self.error, StepError::NotArrived { .. } | StepError::Skipped { .. } | StepError::Store(_))
    }

    /// Returns true if the engine at `place` is awake, and works on under the weights that it had before.
    /// One that an earlier attempt paused is in doubt.
    pub(super) fn leaves_its_weights(&self, fleet: &FleetHandle, place: usize) -> bool {
        let had_weights = fleet.served(place).is_some() && !fleet.is_doubtful(place);
        BEFORE_THE_PAUSE.contains(&self.phase) && had_weights && !fleet.may_sleep(place)
    }
}

/// Durations of the phases of a sync, including failed attempts, and the checksums of the weights.
pub(super) type Synced = (Vec<(&'static str, Duration)>, Option<Checksums>);

/// Asks the engine at `place` whether it still serves what it was given, unless a sync of it is in progress.
/// No sync waits for the answer: one that begins meanwhile changes its weights, and asks for itself.
pub(in crate::engine::remote) fn look_for_restart(fleet: FleetHandle, place: usize) -> impl Future<Output = ()> + Send {
    let looking = fleet.begin_look(place);
    async move {
        let _looking = looking;
        let (Some(served), Some(last)) = (fleet.served(place), fleet.last_sync(place)) else { return };
        if last.try_lock().is_err() {
            return;
        }
        let Err(error) = still_serves(&fleet, place, &served).await else { return };
        if let Ok(_free) = last.try_lock()
            && fleet.served(place).is_some_and(|now| Arc::ptr_eq(&now, &served))
        {
            mark_restarted(&fleet, place, &error);
        }
    }
}

/// Records an engine that has restarted: what it samples is invalid.
fn mark_restarted(fleet: &FleetHandle, place: usize, error: &StepError) {
    if fleet.state(place) == EngineState::Serving {
        tracing::warn!("{}: {error}; it has restarted, and its work of that time is repeated", fleet.name(place));
    }
    fleet.mark_restarted(place);
}

/// Error if the engine at `place` says that it serves other weights than `update`. An engine that does not
/// answer within a second stands as before.
pub(super) async fn still_serves(fleet: &FleetHandle, place: usize, update: &Update) -> Result<(), StepError> {
    let Some(engine) = fleet.engine(place) else { return Ok(()) };
    let Some(control) = engine.weights() else { return Ok(()) };
    match timeout(LOOK, check_label(control, update)).await {
        Ok(Err(error)) if error.wrong_weights() => Err(error),
        _ => Ok(()),
    }
}

/// Records it if the engine at `place` says that it serves other weights than it was given.
async fn look(fleet: &FleetHandle, place: usize) {
    if let Some(served) = fleet.served(place)
        && let Err(error) = still_serves(fleet, place, &served).await
    {
        mark_restarted(fleet, place, &error);
    }
}

/// Brings the engine at `place` to the weights of `update`, or isolates it. `before` are its last
/// checksums.
pub(super) async fn sync_engine(
    fleet: &FleetHandle,
    place: usize,
    update: &Update,
    config: &SyncConfig,
    before: Option<&Checksums>,
) -> Result<Synced, IsolatedEngine> {
    let Some(engine) = fleet.engine(place) else {
        return Err(IsolatedEngine { engine: fleet.name(place).to_string(), phase: "load", error: StepError::Left });
    };
    look(fleet, place).await;
    let engine = engine.as_ref();
    let Some(control) = engine.weights() else {
        return Err(IsolatedEngine { engine: engine.name(), phase: "load", error: StepError::Fixed });
    };
    let unknown = fleet.served(place).is_none();
    let sleeps = config.sleep || unknown && matches!(timeout(LOOK, engine.probe()).await, Ok(Ok(found)) if found.sleeps);
    let mut sync =
        EngineSync { fleet, place, engine, control, update, config, sleeps, retries: config.retries, times: Vec::new() };
    loop {
        let isolated = match sync.attempt(before).await {
            Ok(sums) => return Ok((sync.times, sums)),
            Err(isolated) => isolated,
        };
        // Before the engine ends its work, so that the reason is known then.
        if fleet.on_trial(place) || sync.times.iter().any(|(phase, _)| *phase == "pause") {
            fleet.mark_doubtful(place);
        }
        if !(isolated.error.wrong_weights() && sync.retry().await) {
            if isolated.leaves_its_weights(fleet, place) {
                // It may have restarted meanwhile.
                look(fleet, place).await;
            }
            // Work in flight must not continue under unknown weights. An adapter that no request
            // names changes nothing.
            if !(update.adapter || isolated.leaves_its_weights(fleet, place)) {
                timeout(LAST_WORDS, control.pause(PauseMode::Abort)).await.ok();
            }
            return Err(isolated);
        }
    }
}

struct EngineSync<'a> {
    fleet: &'a FleetHandle,
    place: usize,
    engine: &'a dyn InferenceEngine,
    control: &'a dyn WeightControl,
    update: &'a Update,
    config: &'a SyncConfig,
    /// If true, it may sleep.
    sleeps: bool,
    /// Retries that are left, of all phases.
    retries: u32,
    times: Vec<(&'static str, Duration)>,
}

impl EngineSync<'_> {
    async fn attempt(&mut self, before: Option<&Checksums>) -> Result<Option<Checksums>, IsolatedEngine> {
        let EngineSync { engine, control, update, config, sleeps, .. } = *self;
        let (label, limit) = (&update.label(), config.step_timeout);
        let folder = &match (update.carried.as_ref().zip(engine.address()), config.carry) {
            (Some((carried, address)), _) => {
                // It has a separate deadline, whose error says more.
                self.phase("fetch", f64::MAX, || carried.folder(address, update, config.load_timeout)).await?.to_path_buf()
            }
            (None, Carry::Stream) => self.phase("send", config.load_timeout, || control.upload(&update.folder)).await?,
            (None, _) => update.folder.to_path_buf(),
        };
        if sleeps {
            // Until it has resumed: at the end of a run that stops meanwhile, it is woken.
            self.fleet.mark_asleep(self.place, true);
            self.phase("wake", config.load_timeout, || control.wake(EngineMemory::Weights)).await?;
        }
        if update.adapter {
            if sleeps {
                self.phase("wake", config.load_timeout, || control.wake(EngineMemory::Cache)).await?;
                self.phase("resume", limit, || control.resume()).await?;
                self.fleet.mark_asleep(self.place, false);
            }
            self.phase("load", config.load_timeout, || control.load_adapter(label, folder)).await?;
            self.phase("check", limit, || check_label(control, update)).await?;
            self.phase("probe", limit, || probe(engine, update)).await?;
            return Ok(None);
        }
        let prepare = async || match &update.tensors {
            Some(tensors) => control.prepare_tensors(tensors).await,
            None => control.prepare(folder, label).await,
        };
        self.phase("prepare", config.load_timeout, prepare).await?;
        self.phase("pause", config.pause_timeout, || control.pause(config.pause)).await?;
        let load = async || match &update.tensors {
            Some(tensors) => control.load_tensors(tensors, config.carry).await,
            None => control.load(folder, label).await,
        };
        self.phase("load", config.load_timeout, load).await?;
        self.phase("label", limit, || control.label(label)).await?;
        let sums = self.phase("check", limit, || check(control, update, config.checksums, before)).await?;
        if config.cache == CachePolicy::Flush {
            self.phase("flush", limit, || control.flush_cache()).await?;
        }
        self.fleet.start_trial(self.place);
        if sleeps {
            self.phase("wake", config.load_timeout, || control.wake(EngineMemory::Cache)).await?;
        }
        self.phase("resume", limit, || control.resume()).await?;
        if sleeps {
            self.fleet.mark_asleep(self.place, false);
        }
        self.phase("probe", limit, || probe(engine, update)).await?;
        Ok(sums)
    }

    /// Runs a phase, and retries it after failures that may pass. `seconds` limits each try.
    async fn phase<T, E: Into<StepError>, F: Future<Output = Result<T, E>>>(
        &mut self,
        phase: &'static str,
        seconds: f64,
        work: impl Fn() -> F,
    ) -> Result<T, IsolatedEngine> {
        // A number that no duration holds is no limit.
        let limit = Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX);
        loop {
            let started = Instant::now();
            let done = timeout(limit, work()).await;
            let time = started.elapsed();
            self.times.push((phase, time));
            self.fleet.record(self.place, |meter, name| meter.sync_phase(name, phase, time));
            let error = match done {
                Ok(Ok(done)) => return Ok(done),
                Ok(Err(error)) => error.into(),
                Err(_) => StepError::Late { seconds },
            };
            if !(error.passes() && self.retry().await) {
                return Err(IsolatedEngine { engine: self.engine.name(), phase, error });
            }
        }
    }

    /// Pauses before a retry; false if none is left.
    async fn retry(&mut self) -> bool {
        let Some(left) = self.retries.checked_sub(1) else { return false };
        self.retries = left;
        tokio::time::sleep(TRIES.pause(self.place as u64, self.config.retries - left)).await;
        true
    }
}

/// Checks that the engine reports the weights of `update`.
pub(super) async fn check_label(control: &dyn WeightControl, update: &Update) -> Result<(), StepError> {
    let given = update.label();
    if update.adapter {
        let has = control.adapters().await?;
        return if has.contains(&given) { Ok(()) } else { Err(StepError::NoAdapter { given, has }) };
    }
    let says = control.served().await?;
    if says.as_ref() == Some(&given) { Ok(()) } else { Err(StepError::Label { given, says }) }
}

async fn check(
    control: &dyn WeightControl,
    update: &Update,
    checksums: bool,
    before: Option<&Checksums>,
) -> Result<Option<Checksums>, StepError> {
    check_label(control, update).await?;
    let sums = if checksums { control.checksums().await? } else { None };
    check_changed(before, sums.as_ref(), update.changed)?;
    Ok(sums)
}

async fn probe(engine: &dyn InferenceEngine, update: &Update) -> Result<(), StepError> {
    let label = update.label();
    let adapter = update.adapter.then_some(label.as_str());
    // In parallel, because samples of that time depend on the result.
    let found = try_join_all(update.texts.iter().map(|text| score(engine, text, adapter))).await?;
    update.judge(&found)
}

/// Returns log-probabilities of a text. A server that has just resumed may reject requests for a
/// moment.
async fn score(engine: &dyn InferenceEngine, text: &[u32], adapter: Option<&str>) -> Result<Vec<f32>, RemoteError> {
    // The timeout of the phase ends it before.
    let policy = RetryPolicy { retries: 0, pause: Duration::from_millis(50), max_pause: Duration::from_millis(500), ..TRIES };
    policy.run(text.len() as u64, deadline(policy.busy_timeout), || engine.score(text, adapter)).await
}
