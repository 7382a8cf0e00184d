//! Weights for remote engines: written to a folder, loaded, verified, and only then announced (laws
//! V2 and V4).
//!
//! Trained steps pass through immediately, and the sync runs alongside, so a slow engine delays the
//! trainer only through the staleness bound. Of the versions that arrive meanwhile, only the newest
//! is synced. Between syncs, engines that joined, failed or restarted get the newest version.
//!
//! Logs `Synced weights to 2 engines (version 12)` as a `tracing` event. The stage fails when no
//! engine holds a version.

use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio::task::JoinError;
use tokio_util::task::AbortOnDropHandle;

use super::{Announcer, log};
use crate::data::Version;
use crate::engine::EngineError;
use crate::engine::remote::Members;
use crate::engine::remote::sync::{SyncReport, Update, WeightSyncManager};
use crate::flow::{AsyncIo, AsyncStage, RunContext, Signal, StageError, StageSpec, WeightsTx};
use crate::net::{Outcome, RetryPolicy, Retryable, deadline};
use crate::observe::logs::Every;
use crate::stages::train::Trained;
use crate::stages::unblocked;
use crate::train::Snapshot;

/// Interval of the checks for engines without the newest weights.
const LOOK: Duration = Duration::from_secs(2);

/// Retries of a version that no engine loaded, because all are unavailable.
const TRIES: RetryPolicy = RetryPolicy {
    retries: u32::MAX,
    pause: Duration::from_secs(1),
    max_pause: Duration::from_secs(4),
    busy_timeout: Duration::ZERO,
};

type AnyError = Box<dyn Error + Send + Sync>;
type Export<W> = Arc<dyn Fn(Version, &Arc<W>) -> Result<Update, AnyError> + Send + Sync>;

/// Stage that syncs a training step's weights to remote engines, and passes the step on.
pub struct RemoteSync<W> {
    manager: WeightSyncManager,
    /// Engines that come and go, until the run begins.
    members: Option<Members>,
    export: Export<W>,
    to: WeightsTx<()>,
    /// Edge for stages of this process that read the weights themselves.
    also: Option<WeightsTx<W>>,
    hold: Option<EvaluationHold>,
    patience: Duration,
    announcer: Announcer,
    work: Work<W>,
    /// Step and weights that are synced next.
    next: Option<(u64, Snapshot<W>)>,
}

/// Task that ends when it is dropped.
type Job<T> = AbortOnDropHandle<Result<T, AnyError>>;

impl<W: Send + Sync + 'static> RemoteSync<W> {
    /// Syncs the files that `export` writes to the engines of `manager`, and announces each version
    /// on `to`.
    pub fn new<E>(
        manager: WeightSyncManager,
        export: impl Fn(Version, &Arc<W>) -> Result<Update, E> + Send + Sync + 'static,
        to: WeightsTx<()>,
    ) -> Self
    where
        E: Into<AnyError>,
    {
        RemoteSync {
            manager,
            members: None,
            export: Arc::new(move |version, weights| export(version, weights).map_err(Into::into)),
            to,
            also: None,
            hold: None,
            patience: Duration::from_secs(120),
            announcer: Announcer::default(),
            work: Work::idle(),
            next: None,
        }
    }

    /// Publishes the weights themselves on this edge too, at the same time.
    pub fn also(self, also: WeightsTx<W>) -> Self {
        RemoteSync { also: Some(also), ..self }
    }

    /// Keeps the version of a step on the engines until its evaluation is done.
    pub fn hold(self, hold: &EvaluationHold) -> Self {
        RemoteSync { hold: Some(hold.clone()), ..self }
    }

    /// Follows these members of the fleet while the run lasts.
    pub fn members(self, members: Members) -> Self {
        RemoteSync { members: Some(members), ..self }
    }

    /// Time limit of a version after its first failure, while all engines are unavailable; then the
    /// stage fails. Default: 120 seconds.
    pub fn patience(self, patience: Duration) -> Self {
        RemoteSync { patience, ..self }
    }

    /// Logs a sync at most once in `n` steps.
    pub fn log_every(mut self, n: impl Into<Every>) -> Self {
        self.announcer.log_every = n.into();
        self
    }

    /// Begins the sync of the next version, unless another is in progress. Engines that catch up go
    /// on by themselves.
    fn begin(&mut self) {
        if matches!(self.work, Work::Giving(..)) {
            return;
        }
        let Some((step, snapshot)) = self.next.take() else { return };
        let weights = snapshot.weights.clone();
        let (manager, export, patience) = (self.manager.clone(), self.export.clone(), self.patience);
        let job = tokio::spawn(async move {
            let started = Instant::now();
            let update = unblocked(move || export(snapshot.version, &snapshot.weights)).await?;
            let mut retries = None;
            let mut report = loop {
                let error = match manager.sync(update.clone()).await {
                    Ok(report) => break report,
                    Err(error) => error,
                };
                // The time counts from the first failure, because a load may take longer.
                let retries = retries.get_or_insert_with(|| TRIES.begin(step, deadline(patience)));
                match retries.after(error.outcome(), Instant::now()) {
                    Some(pause) => tokio::time::sleep(pause).await,
                    None => return Err(error.into()),
                }
            };
            report.time = started.elapsed();
            Ok(report)
        });
        self.work = Work::Giving(AbortOnDropHandle::new(job), step, weights);
    }

    /// Begins what is due, waits until the present work ends, and announces its result. Cancel-safe.
    async fn progress(&mut self) -> Result<(), StageError> {
        self.begin();
        match &mut self.work {
            Work::Idle(until) => {
                tokio::time::sleep_until(*until).await;
                let manager = self.manager.clone();
                let job = tokio::spawn(async move { Ok(manager.catch_up().await) });
                self.work = Work::CatchingUp(AbortOnDropHandle::new(job));
                return Ok(());
            }
            Work::Giving(job, step, weights) => {
                let report = joined(job.await)?;
                if let Some(also) = &self.also {
                    also.publish(report.version, weights.clone())?;
                }
                self.to.publish(report.version, Arc::new(()))?;
                self.announcer.announce(*step, report.version, report.held(), || report.time);
            }
            Work::CatchingUp(job) => {
                if let Some(report) = joined(job.await)?.filter(|report| report.held() > 0) {
                    log(report.held(), report.version);
                }
            }
        }
        self.work = Work::idle();
        Ok(())
    }

    /// Syncs the versions of all steps, and passes the steps on.
    async fn follow(&mut self, io: &mut AsyncIo<Trained<W>, Trained<W>>) -> Result<(), StageError> {
        self.work = Work::idle();
        let (hold, mut sent) = (self.hold.clone(), 0);
        loop {
            let trained = {
                let mut arrival = std::pin::pin!(io.recv());
                loop {
                    self.begin();
                    tokio::select! {
                        trained = &mut arrival => break trained?,
                        ended = self.progress() => ended?,
                    }
                }
            };
            let Some(trained) = trained else { break };
            if let Some(snapshot) = &trained.publish {
                self.next = Some((trained.step, snapshot.clone()));
            }
            let held = hold.as_ref().filter(|hold| trained.publish.is_some() && (hold.due)(trained.step));
            if held.is_some() {
                self.finish(io).await?;
            }
            io.send(trained).await?;
            sent += 1;
            // Engines that return meanwhile get this version.
            while let Some(hold) = held {
                tokio::select! {
                    () = hold.passed(sent) => break,
                    () = io.stopped() => break,
                    ended = self.progress() => ended?,
                }
            }
        }
        // The last version is synced, too, unless the run stops.
        self.finish(io).await
    }

    /// Syncs everything pending, unless the run stops.
    async fn finish(&mut self, io: &AsyncIo<Trained<W>, Trained<W>>) -> Result<(), StageError> {
        while io.signal() != Signal::Stop && (self.next.is_some() || matches!(self.work, Work::Giving(..))) {
            tokio::select! {
                () = io.stopped() => break,
                ended = self.progress() => ended?,
            }
        }
        Ok(())
    }
}

impl Retryable for EngineError {
    /// An unavailable engine may return, and another may join; one with wrong weights fails again.
    fn outcome(&self) -> Outcome {
        match self {
            EngineError::NoEngines => Outcome::Failed,
            EngineError::NoneHolds { failures, .. } if failures.iter().any(|failure| failure.is_away()) => Outcome::Failed,
            _ => Outcome::Final,
        }
    }
}

enum Work<W> {
    /// None, until the next check.
    Idle(tokio::time::Instant),
    /// Sync of a version.
    Giving(Job<SyncReport>, u64, Arc<W>),
    /// Sync of the newest version to engines without it.
    CatchingUp(Job<Option<SyncReport>>),
}

impl<W> Work<W> {
    fn idle() -> Self {
        Work::Idle(tokio::time::Instant::now() + LOOK)
    }
}

fn joined<T>(ended: Result<Result<T, AnyError>, JoinError>) -> Result<T, StageError> {
    match ended {
        Ok(done) => done.map_err(StageError::new),
        Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
        Err(_) => Err(StageError::closed()),
    }
}

impl<W: Send + Sync + 'static> AsyncStage for RemoteSync<W> {
    type In = Trained<W>;
    type Out = Trained<W>;

    async fn run(&mut self, io: &mut AsyncIo<Trained<W>, Trained<W>>) -> Result<(), StageError> {
        let members = self.members.take().map(|members| AbortOnDropHandle::new(tokio::spawn(members.follow())));
        let ended = self.follow(io).await;
        // No further sync begins. Those of engines end by themselves.
        self.work = Work::idle();
        self.manager.wake().await;
        drop(members);
        ended
    }

    fn attach(&mut self, context: &mut RunContext) {
        self.announcer.attach(context);
        if let Some(metrics) = &self.announcer.metrics {
            self.manager.fleet.observe(metrics);
        }
    }

    fn spec(&self) -> StageSpec {
        let spec = self.announcer.releases(StageSpec::default().advice(super::ADVICE).publishes(&self.to));
        match &self.also {
            // An edge without readers is not declared: none needs to read it.
            Some(also) if also.readers() > 0 => spec.publishes(also),
            _ => spec,
        }
    }
}

/// Hold of a version on engines that serve both training and evaluation, while an evaluation lasts.
/// The sync stage and the evaluation stage of the same engines share it: the sync passes a due step
/// on once its version is verified, and syncs no further version until the evaluation has passed
/// that step on.
#[derive(Clone)]
pub struct EvaluationHold {
    due: Arc<dyn Fn(u64) -> bool + Send + Sync>,
    /// Number of messages that the evaluation has passed on.
    passed: watch::Sender<u64>,
}

impl EvaluationHold {
    /// Returns a hold for evaluations at the steps that are `due`; step 0 is the message before the
    /// first step.
    pub fn new(due: impl Fn(u64) -> bool + Send + Sync + 'static) -> Self {
        EvaluationHold { due: Arc::new(due), passed: watch::Sender::new(0) }
    }

    /// Counts a message that the evaluation has passed on.
    pub(crate) fn pass(&self) {
        self.passed.send_modify(|count| *count += 1);
    }

    /// Waits until `count` messages were passed on. Cancel-safe.
    pub(super) async fn passed(&self, count: u64) {
        // Can't fail: the sender lives in `self`.
        drop(self.passed.subscribe().wait_for(|passed| *passed >= count).await);
    }
}
