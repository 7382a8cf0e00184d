//! Training stage: one optimizer step per batch.
//!
//! Law V1: only the trainer creates versions. Law V4: it publishes the initial weights before the first
//! batch. Law C1: checkpoints are taken between steps, after the step was sent on, so that generators get
//! their weights first, and are written while the next steps train. The last step is saved however the run
//! ends, unless the trainer failed. Law N3: a gap between trainer and generator above the limit
//! ([`Trainer::gap_limits`]) ends the run before the update.

use std::collections::BTreeMap;
use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::checkpoints::{Resumed, Saving};
use super::critic::Critic;
use super::gate::CheckpointGate;
use super::orders::Orders;
use super::stale::OnStale;
use super::step_config::StepConfig;
use super::trained::Trained;
use crate::algo::{Aggregation, Estimator, GapDiagnosis, GapLimits};
use crate::data::Batch;
use crate::flow::{Io, RunContext, Signal, Stage, StageError, StageSpec};
use crate::rollout::{Admission, TokensMissing, mean};
use crate::train::{TrainError, TrainingBackend};

type BoxError = Box<dyn Error + Send + Sync>;
type ByStep = Box<dyn Fn(u64) -> Result<StepConfig, BoxError> + Send>;

/// Turns batches into optimizer steps on any [`TrainingBackend`].
pub struct Trainer<B> {
    pub(super) backend: B,
    pub(super) critic: Option<Critic<B>>,
    pub(super) gap_limits: GapLimits,
    config: StepConfig,
    /// Replaces `config`.
    by_step: Option<ByStep>,
    pub(super) steps: Option<u64>,
    target_reward: Option<f64>,
    pub(super) sync_every: u64,
    pub(super) sync_last: bool,
    saving: Saving,
    pub(super) admission: Option<Admission>,
    pub(super) on_stale: OnStale,
    pub(super) mask_truncated: bool,
    resumed: Option<Resumed>,
    orders: Orders,
    threads: usize,
}

/// Steps over which the mean reward must reach its target. Fewer would stop at a lucky batch.
const TARGET_STEPS: usize = 20;

impl<B: TrainingBackend> Trainer<B> {
    /// Trains on the samples as they are, every token alike, and publishes after every step.
    pub fn new(backend: B) -> Self {
        Trainer {
            backend,
            critic: None,
            gap_limits: GapLimits::default(),
            config: StepConfig::default(),
            by_step: None,
            steps: None,
            target_reward: None,
            sync_every: 1,
            sync_last: false,
            saving: Saving::default(),
            admission: None,
            on_stale: OnStale::default(),
            mask_truncated: false,
            resumed: None,
            orders: Orders::default(),
            threads: 0,
        }
    }

    /// Sets each step's settings by a closure of the step's number, from 1. Replaces the settings
    /// made before. The result must depend on the number only, because a resumed run calls the
    /// closure again.
    pub fn per_step(self, by_step: impl Fn(u64) -> Result<StepConfig, BoxError> + Send + 'static) -> Self {
        Trainer { by_step: Some(Box::new(by_step)), config: StepConfig::default(), ..self }
    }

    /// Changes the settings of all steps, such as [`StepConfig::ppo_epochs`]. Replaces
    /// [`Trainer::per_step`].
    pub fn configure(mut self, change: impl FnOnce(&mut StepConfig)) -> Self {
        change(&mut self.config);
        Trainer { by_step: None, ..self }
    }

    /// Sets the advantage estimator: an [`Advantage`](crate::algo::Advantage), or a closure.
    pub fn advantages(self, estimator: impl Estimator + 'static) -> Self {
        self.configure(|config| config.advantages = Some(Arc::new(estimator)))
    }

    /// Sets the weights of tokens in the loss.
    pub fn aggregation(self, aggregation: Aggregation) -> Self {
        self.configure(|config| config.aggregation = aggregation)
    }

    /// Trains a critic in turn with the policy, and uses its advantages instead of
    /// [`Trainer::advantages`] (PPO).
    pub fn critic(self, critic: Critic<B>) -> Self {
        Trainer { critic: Some(critic), ..self }
    }

    /// Ends the run after so many steps.
    pub fn steps(self, steps: u64) -> Self {
        Trainer { steps: Some(steps), ..self }
    }

    /// Ends the run early, once the mean reward of the last 20 steps reaches `reward`. Dropped
    /// groups count.
    pub fn target_reward(self, reward: f64) -> Self {
        Trainer { target_reward: Some(reward), ..self }
    }

    /// Publishes weights after every `n` steps.
    pub fn sync_every(self, n: u64) -> Self {
        Trainer { sync_every: n.max(1), ..self }
    }

    /// Also publishes the weights of the last step, in a run without a bound on staleness. If such a
    /// run is continued with more steps, it has one version more than an uninterrupted run: with a
    /// bound, groups that were in flight may be too old then.
    pub fn sync_last(self) -> Self {
        Trainer { sync_last: true, ..self }
    }

    /// Sets the limits of the mean gap between trainer and generator over a step's sampled tokens, in
    /// nats (law N3): above `warn` a step warns, above `halt` the run ends before the update. Default 1
    /// and 3.
    pub fn gap_limits(self, warn: f64, halt: f64) -> Self {
        Trainer { gap_limits: GapLimits { warn, halt }, ..self }
    }

    /// Saves a checkpoint below `run_folder` after the last step, and after every `every` steps.
    /// Default: after the last step, if the flow has a run folder.
    pub fn checkpoints(mut self, run_folder: impl Into<PathBuf>, every: Option<u64>) -> Self {
        (self.saving.run_folder, self.saving.every) = (Some(run_folder.into()), every);
        self
    }

    /// Keeps the newest `n` checkpoints, at least two. Default: all.
    pub fn keep(mut self, n: usize) -> Self {
        self.saving.keep = Some(n);
        self
    }

    /// Publishes a checkpoint only after the log with the same gate has written the rows of its
    /// step.
    pub fn gate(mut self, gate: &CheckpointGate) -> Self {
        self.saving.gate = Some(gate.clone());
        self
    }

    /// Adds files to every checkpoint, by name, such as the state of other stages.
    pub fn checkpoint_files(mut self, files: impl Fn() -> Result<BTreeMap<String, Vec<u8>>, BoxError> + Send + 'static) -> Self {
        self.saving.extra_files.push(Box::new(files));
        self
    }

    /// Takes orders while it runs.
    pub fn ordered_by(self, orders: &Orders) -> Self {
        Trainer { orders: orders.clone(), ..self }
    }

    /// Sets the policy for tokens older than the bound on staleness.
    pub fn on_stale(self, on_stale: OnStale) -> Self {
        Trainer { on_stale, ..self }
    }

    /// Leaves truncated completions out of the loss (the overlong filtering of DAPO, arXiv:2503.14476;
    /// TRL's `mask_truncated_completions`). Their rewards are compared with those of their groups. A batch
    /// of nothing else is an error: drop such groups by
    /// [`filters::any_completed`](crate::algo::filters::any_completed).
    pub fn mask_truncated(self, mask_truncated: bool) -> Self {
        Trainer { mask_truncated, ..self }
    }

    /// Continues from a checkpoint that a [`Trainer`] wrote, and publishes its weights under their
    /// version. The flow's admission continues with its groups: open ones are generated again, partial
    /// completions included, and settled ones never.
    pub fn resume(self, checkpoint: &Path, resumed: Resumed) -> Result<Self, TrainError> {
        self.backend.load_checkpoint(checkpoint).wait()?;
        self.critic.as_ref().map_or(Ok(()), |critic| critic.load(checkpoint))?;
        Ok(Trainer { resumed: Some(resumed), ..self })
    }

    /// Cores that the backend computes with, for the thread budget; 0, the default, counts none.
    pub fn threads(self, threads: usize) -> Self {
        Trainer { threads, ..self }
    }

    /// Settings of a step; steps start at 1.
    pub(super) fn config(&self, step: u64) -> Result<StepConfig, StageError> {
        self.by_step.as_ref().map_or_else(|| Ok(self.config.clone()), |by_step| by_step(step)).map_err(StageError::new)
    }

    fn has_reached_target(&self, recent: &[f64]) -> bool {
        let reached = |target| recent.len() == TARGET_STEPS && mean(recent.iter().copied()).is_some_and(|mean| mean >= target);
        self.target_reward.is_some_and(reached)
    }

    fn save(&self, state: &Resumed, metrics: BTreeMap<String, f64>) -> Result<(), StageError> {
        self.saving.write(&self.backend, self.critic.as_ref(), self.admission.as_ref(), state, metrics)
    }

    /// Saves the last step, if a checkpoint is due after it and it is not saved.
    fn save_if_due(&self, state: &Resumed, unsaved: &mut Option<BTreeMap<String, f64>>) -> Result<(), StageError> {
        self.saving.check()?;
        let is_due = self.steps == Some(state.step) || self.saving.every.is_some_and(|every| self.saves_at(state.step, every));
        let is_due = is_due || unsaved.is_some() && self.orders.takes_save();
        unsaved.take_if(|_| is_due).map_or(Ok(()), |metrics| self.save(state, metrics))
    }

    /// Returns true if `step` is the first that publishes weights since a checkpoint was due: the version
    /// that a resume publishes again then names the same weights (laws C2, V1). The last step and ordered
    /// saves may lie between two versions. Training on given data saves at every due step.
    fn saves_at(&self, step: u64, every: u64) -> bool {
        let spacing = if self.admission.is_some() { self.sync_every } else { 1 };
        step.is_multiple_of(spacing) && step % every < spacing
    }

    /// Waits for the end of a pause, and saves if that is ordered meanwhile.
    fn pause(
        &self,
        io: &mut Io<Batch, Trained<B::Weights>>,
        state: &Resumed,
        unsaved: &mut Option<BTreeMap<String, f64>>,
    ) -> Result<(), StageError> {
        let mut pauses = self.orders.pauses();
        while *pauses.borrow_and_update() && io.signal() == Signal::Run {
            self.save_if_due(state, unsaved)?;
            io.hold(async { drop(pauses.changed().await) });
        }
        Ok(())
    }

    /// Steps until the input ends. `state` is that after the last step, and `unsaved` holds metrics of
    /// the last step until a checkpoint is saved.
    fn train(
        &self,
        io: &mut Io<Batch, Trained<B::Weights>>,
        state: &mut Resumed,
        unsaved: &mut Option<BTreeMap<String, f64>>,
    ) -> Result<(), StageError> {
        let is_synchronous = self.admission.as_ref().is_some_and(|admission| admission.bound() == Some(0));
        while self.steps.is_none_or(|steps| state.step < steps) && !self.has_reached_target(&state.recent) {
            self.pause(io, state, unsaved)?;
            let Some(batch) = self.gather(state.step + 1, io)? else { break };
            let trained = self.step(batch, state.kl_coef)?;
            let reward = mean(trained.batch.rewards());
            (state.step, state.kl_coef) = (trained.step, trained.kl_cost.map(|cost| cost.next));
            state.recent.extend(reward);
            if state.recent.len() > TARGET_STEPS {
                state.recent.remove(0);
            }
            let metrics = [("loss", Some(trained.forward.loss)), ("reward_mean", reward)];
            *unsaved = Some(metrics.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))).collect());
            // A synchronous run saves before generators continue, so that nothing is in flight.
            if is_synchronous {
                self.save_if_due(state, unsaved)?;
            }
            io.send(trained)?;
            self.save_if_due(state, unsaved)?;
        }
        Ok(())
    }
}

/// The first failure, or else the first cancellation. Logs the other failures.
fn first_error(all: impl IntoIterator<Item = Result<(), StageError>>) -> Result<(), StageError> {
    let mut first = Ok(());
    for error in all.into_iter().filter_map(Result::err) {
        match &first {
            Err(failure) if !StageError::is_closed(failure) => tracing::error!("{error}"),
            Err(_) if error.is_closed() => {}
            _ => first = Err(error),
        }
    }
    first
}

impl<B: TrainingBackend + 'static> Stage for Trainer<B> {
    type In = Batch;
    type Out = Trained<B::Weights>;

    fn run(&mut self, io: &mut Io<Batch, Trained<B::Weights>>) -> Result<(), StageError> {
        let resumed = self.resumed.take();
        let first = match &resumed {
            None => self.backend.snapshot().wait()?,
            Some(Resumed { step: taken, .. }) => {
                if let Some(steps) = self.steps.filter(|steps| steps < taken) {
                    return Err(StageError::new(format!(
                        "the run is to take {steps} steps, and its checkpoint has taken {taken} already: raise the number of steps \
                         (train.steps) above {taken}"
                    )));
                }
                self.saving.prune(*taken)?;
                self.backend.current().wait()?
            }
        };
        io.send(Trained { publish: Some(first), ..Trained::default() })?;
        let mut state = Resumed { progress: Default::default(), ..resumed.unwrap_or_default() };
        let mut unsaved = None;
        let ended = self.train(io, &mut state, &mut unsaved);
        // A rejected batch leaves the weights of the last step unchanged.
        let whole = |error: &StageError| error.is_closed() || error.is::<GapDiagnosis>() || error.is::<TokensMissing>();
        let unsaved = unsaved.filter(|_| ended.as_ref().err().is_none_or(whole));
        let saved = unsaved.map_or(Ok(()), |metrics| self.save(&state, metrics));
        first_error([ended, saved, self.saving.wait().map_err(StageError::from)])
    }

    fn attach(&mut self, context: &mut RunContext) {
        context.fill(&mut self.admission);
        context.fill(&mut self.saving.metrics);
        if self.saving.run_folder.is_none() {
            self.saving.run_folder = context.folder().map(Path::to_owned);
        }
        if let Some(admission) = &self.admission {
            if let Some(resumed) = &self.resumed {
                admission.restore(resumed.progress.clone());
            }
            admission.versions_of(self.sync_every, self.steps);
        }
    }

    fn spec(&self) -> StageSpec {
        StageSpec::default().threads(self.threads).knob("threads, or smaller batches")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_save_is_reported_after_a_cancellation_and_after_no_other_failure() {
        let failure = |text: &str| Err(StageError::new(text.to_owned()));
        let first = |all: [Result<(), StageError>; 3]| first_error(all).map_err(|error| error.to_string());
        let closed = || Err(StageError::closed());
        assert_eq!(first([closed(), Ok(()), failure("save")]), Err("save".to_owned()));
        assert_eq!(first([closed(), failure("save"), closed()]), Err("save".to_owned()));
        assert_eq!(first([failure("step"), Ok(()), failure("save")]), Err("step".to_owned()));
        assert!(first_error([Ok(()), closed(), Ok(())]).is_err_and(|error| error.is_closed()));
        assert!(first_error([Ok(()), Ok(())]).is_ok());
    }
}
