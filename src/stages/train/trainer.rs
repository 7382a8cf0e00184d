//! Training stage: one optimizer step per batch.
//!
//! Law V1: only the trainer creates versions. Law V4: it publishes the initial weights before the
//! first batch. Law C1: checkpoints are taken between steps, after the step was sent on, so that
//! generators get their weights first. The last step is saved however the run ends, unless the
//! trainer failed. Law N3: a gap between trainer and generator above [`GapLimits::halt`] ends the
//! run before the update.

use std::collections::{BTreeMap, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::task::Poll;
use std::time::Instant;

use super::critic::Critic;
use super::gate::CheckpointGate;
use super::kl_reward::RewardKl;
use super::learner::{Learned, Learner, StepBatch};
use super::minibatches::Minibatches;
use super::saving::{ExtraFiles, Resumed, Saving, Unsaved};
use super::stale::{OnStale, within_bound};
use super::step_config::{StepConfig, StepConfigError, StepConfigs};
use super::trained::Trained;
use crate::algo::{Aggregation, Estimator, GapDiagnosis, GapLimits};
use crate::data::Batch;
use crate::flow::{Io, RunContext, Stage, StageError, StageSpec};
use crate::observe::Metric;
use crate::rollout::{Admission, TokensMissing};
use crate::stages::pairs::Pairing;
use crate::train::{ForwardBackward, OptimStep, TrainError, TrainingBackend};

/// Turns batches into optimizer steps on any [`TrainingBackend`].
pub struct Trainer<B> {
    learner: Learner<B>,
    step_configs: StepConfigs,
    steps: Option<u64>,
    target_reward: Option<f64>,
    sync_every: u64,
    sync_last: bool,
    save: Option<Saving>,
    keep: Option<usize>,
    gate: Option<CheckpointGate>,
    extra_files: Option<ExtraFiles>,
    admission: Option<Admission>,
    on_stale: OnStale,
    resumed: Option<Resumed>,
    threads: usize,
}

/// Checkpoint with more steps than the run is to take. Nothing was trained.
#[derive(Clone, Copy, Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "the run is to take {steps} steps, and its checkpoint has taken {taken} already: raise the number of steps (train.steps) above {taken}"
)]
pub struct FewerSteps {
    /// Steps that the checkpoint has taken.
    pub taken: u64,
    /// Steps that the run is to take.
    pub steps: u64,
}

/// Steps over which the mean reward must reach its target. Fewer would stop at a lucky batch.
const TARGET_STEPS: usize = 20;

impl<B: TrainingBackend> Trainer<B> {
    /// Trains on the samples as they are, every token alike, and publishes after every step.
    pub fn new(backend: B) -> Self {
        Trainer {
            learner: Learner { backend, critic: None, gap_limits: GapLimits::default() },
            step_configs: StepConfigs::Same(Box::default()),
            steps: None,
            target_reward: None,
            sync_every: 1,
            sync_last: false,
            save: None,
            keep: None,
            gate: None,
            extra_files: None,
            admission: None,
            on_stale: OnStale::default(),
            resumed: None,
            threads: 1,
        }
    }

    /// Sets each step's settings by a closure of the step's number, from 1. Replaces the settings
    /// made before. The result must depend on the number only, because a resumed run calls the
    /// closure again.
    pub fn per_step(self, by_step: impl Fn(u64) -> Result<StepConfig, StepConfigError> + Send + 'static) -> Self {
        Trainer { step_configs: StepConfigs::ByStep(Box::new(by_step)), ..self }
    }

    /// Changes the settings of all steps.
    fn change(self, change: impl FnOnce(&mut StepConfig)) -> Self {
        let mut config = match self.step_configs {
            StepConfigs::Same(config) => config,
            StepConfigs::ByStep(_) => Box::default(),
        };
        change(&mut config);
        Trainer { step_configs: StepConfigs::Same(config), ..self }
    }

    /// Sets the advantage estimator: an [`Advantage`](crate::algo::Advantage), or a closure.
    pub fn advantages(self, estimator: impl Estimator + 'static) -> Self {
        self.change(|config| config.advantages = Some(Arc::new(estimator)))
    }

    /// Subtracts a KL penalty from rewards before advantages are estimated.
    pub fn reward_kl(self, kl: RewardKl) -> Self {
        self.change(|config| config.reward_kl = Some(Arc::new(kl)))
    }

    /// Trains on pairs, chosen and rejected alternating, with a
    /// [`Preference`](crate::algo::Preference). Each pair weighs the same, and the aggregation
    /// is ignored.
    pub fn pairs(self, pairing: &Pairing) -> Self {
        self.change(|config| config.pairs = Some(pairing.clone()))
    }

    /// Trains a critic in turn with the policy, and uses its advantages instead of
    /// [`Trainer::advantages`] (PPO). The penalty of [`Trainer::reward_kl`] then applies token by
    /// token.
    pub fn critic(self, critic: Critic<B>) -> Self {
        Trainer { learner: Learner { critic: Some(critic), ..self.learner }, ..self }
    }

    /// Sets the weights of tokens in the loss.
    pub fn aggregation(self, aggregation: Aggregation) -> Self {
        self.change(|config| config.aggregation = aggregation)
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

    /// Also publishes the weights of the last step. If such a run is continued with more steps, it
    /// has one version more than an uninterrupted run.
    pub fn sync_last(self) -> Self {
        Trainer { sync_last: true, ..self }
    }

    /// Sets the PPO epochs (μ in GRPO): passes over each batch, with one update per minibatch.
    /// Default: 1.
    pub fn ppo_epochs(self, n: u64) -> Self {
        self.change(|config| config.ppo_epochs = n)
    }

    /// Splits each pass into `count` minibatches of groups, drawn by `seed` for every pass.
    pub fn minibatches(self, count: usize, seed: u64) -> Self {
        self.change(|config| config.minibatches = Minibatches { count, seed })
    }

    /// If true, batches with several updates are scored before the first, for a loss whose trust
    /// region is centred there (`Proximal::Recompute`). With a single update, its forward pass is
    /// that score.
    pub fn score_first(self, scores: bool) -> Self {
        self.change(|config| config.score_first = scores)
    }

    /// Sets the largest gap between trainer and generator (law N3).
    pub fn gap_limits(self, limits: GapLimits) -> Self {
        Trainer { learner: Learner { gap_limits: limits, ..self.learner }, ..self }
    }

    /// Saves a checkpoint below `run_folder` after the last step, and after every `every` steps.
    pub fn checkpoints(self, run_folder: impl Into<PathBuf>, every: Option<u64>) -> Self {
        Trainer { save: Some(Saving::below(run_folder.into(), every)), ..self }
    }

    /// Keeps the newest `n` checkpoints, at least two. Default: all.
    pub fn keep(self, n: usize) -> Self {
        Trainer { keep: Some(n), ..self }
    }

    /// Publishes a checkpoint only after the log with the same gate has written the rows of its
    /// step.
    pub fn gate(self, gate: &CheckpointGate) -> Self {
        Trainer { gate: Some(gate.clone()), ..self }
    }

    /// Adds files to every checkpoint, by name, such as the state of other stages.
    pub fn checkpoint_files(
        self,
        files: impl Fn() -> Result<BTreeMap<String, Vec<u8>>, Box<dyn std::error::Error + Send + Sync>> + Send + 'static,
    ) -> Self {
        Trainer { extra_files: Some(Box::new(files)), ..self }
    }

    /// Sets the policy for tokens older than that bound.
    pub fn on_stale(self, on_stale: OnStale) -> Self {
        Trainer { on_stale, ..self }
    }

    /// Continues from a checkpoint that a [`Trainer`] wrote, and publishes its weights under their
    /// version. Call [`Trainer::checkpoints`] and [`Trainer::keep`] first.
    pub fn resume(self, checkpoint: &Path, resumed: Resumed) -> Result<Self, TrainError> {
        self.learner.backend.load_checkpoint(checkpoint).wait()?;
        self.learner.critic.as_ref().map_or(Ok(()), |critic| critic.load(checkpoint))?;
        Ok(Trainer { resumed: Some(resumed), ..self })
    }

    /// Cores that the backend computes with, for the thread budget.
    pub fn threads(self, threads: usize) -> Self {
        Trainer { threads, ..self }
    }

    fn is_synchronous(&self) -> bool {
        self.admission.as_ref().is_some_and(|admission| admission.bound() == Some(0))
    }

    fn has_reached_target(&self, recent: &VecDeque<f64>) -> bool {
        let reached = |target| recent.len() == TARGET_STEPS && mean(recent.iter().copied()).is_some_and(|mean| mean >= target);
        self.target_reward.is_some_and(reached)
    }

    /// Returns true if a checkpoint is due after `step`.
    fn saves_at(&self, step: u64) -> bool {
        self.steps == Some(step) || self.save.as_ref().is_some_and(|saving| saving.is_due(step))
    }

    fn save(&self, last: Unsaved) -> Result<(), StageError> {
        self.save.as_ref().map_or(Ok(()), |saving| {
            saving.write(
                &self.learner.backend,
                self.learner.critic.as_ref(),
                self.admission.as_ref(),
                self.extra_files.as_ref(),
                last,
            )
        })
    }

    /// Receives the next batch with trainable groups. `None` at the end of the input; an incomplete
    /// batch is dropped then.
    fn gather(&self, step: u64, io: &mut Io<Batch, Trained<B::Weights>>) -> Result<Option<StepBatch>, StageError> {
        let mut batch = StepBatch::new(step, self.step_configs.of(step).map_err(StageError::new)?);
        loop {
            let Some(part) = io.recv()? else { return Ok(None) };
            batch.rest.append(part);
            while batch.rest.more
                && let Poll::Ready(Some(part)) = io.try_recv()
            {
                batch.rest.append(part);
            }
            batch.rest = self.admitted(std::mem::take(&mut batch.rest))?;
            if batch.rest.more {
                self.learner.train_early(&mut batch)?;
            } else if !batch.is_empty() {
                return Ok(Some(batch));
            }
        }
    }

    /// Checks the ledger (law D4), and applies the bound on staleness (law V2).
    fn admitted(&self, batch: Batch) -> Result<Batch, StageError> {
        let Some(admission) = &self.admission else { return Ok(batch) };
        admission.verify(&batch)?;
        let Some(bound) = admission.bound() else { return Ok(batch) };
        let (batch, given_up) = within_bound(batch, self.learner.version(), bound, self.on_stale)?;
        if given_up > 0 {
            admission.gave_up(given_up);
        }
        Ok(batch)
    }

    /// Trains on a batch, and publishes if the step is due.
    fn step(&self, batch: StepBatch, kl_coef: Option<f64>) -> Result<Trained<B::Weights>, StageError> {
        let started = Instant::now();
        let (step, worked, mut settings) = (batch.step, batch.worked, batch.config.settings.clone());
        let version = self.learner.version();
        let Learned { batch, kl_cost, critic, forward, mixed, optim } = self.learner.train(batch, kl_coef)?;
        let passed = Instant::now();
        settings.extend(mixed.map(|loss| (Metric::MixedLoss.key().to_owned(), loss)));
        let last = self.sync_last && self.steps == Some(step);
        let publish = (last || step.is_multiple_of(self.sync_every)).then(|| self.learner.backend.snapshot());
        let optim = optim.wait()?;
        let publish = publish.map(|snapshot| snapshot.wait()).transpose()?;
        let update_seconds = passed.elapsed().as_secs_f64();
        // Law D4: a step that leaves the ledger unbalanced ends the run, and is not saved.
        let totals = self.admission.as_ref().map(|admission| admission.settle(&batch)).transpose()?;
        let seconds = (worked + started.elapsed()).as_secs_f64();
        let evaluated = BTreeMap::new();
        Ok(Trained {
            step,
            version,
            batch,
            forward,
            optim,
            kl_cost,
            critic,
            settings,
            totals,
            publish,
            evaluated,
            seconds,
            update_seconds,
        })
    }

    /// Steps until the input ends. `unsaved` holds the last step without a checkpoint.
    fn train(&self, io: &mut Io<Batch, Trained<B::Weights>>, unsaved: &mut Option<Unsaved>) -> Result<(), StageError> {
        let Resumed { mut step, mut recent, mut kl_coef, .. } = self.resumed.clone().unwrap_or_default();
        while self.steps.is_none_or(|steps| step < steps) && !self.has_reached_target(&recent) {
            let Some(batch) = self.gather(step + 1, io)? else { break };
            step += 1;
            let trained = self.step(batch, kl_coef)?;
            kl_coef = trained.kl_cost.map(|cost| cost.next);
            recent.extend(mean(trained.batch.rewards()));
            if recent.len() > TARGET_STEPS {
                recent.pop_front();
            }
            *unsaved = Some(Unsaved::after(&trained, &recent));
            // A synchronous run saves before generators continue, so that nothing is in flight.
            if self.is_synchronous() && self.saves_at(step) {
                unsaved.take().map_or(Ok(()), |last| self.save(last))?;
            }
            io.send(trained)?;
            if self.saves_at(step) {
                unsaved.take().map_or(Ok(()), |last| self.save(last))?;
            }
        }
        Ok(())
    }
}

/// Mean; `None` if there are no values.
pub(super) fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (count, sum) = values.fold((0, 0.0), |(count, sum), value| (count + 1, sum + value));
    (count > 0).then(|| sum / f64::from(count))
}

impl<B: TrainingBackend + 'static> Stage for Trainer<B> {
    type In = Batch;
    type Out = Trained<B::Weights>;

    fn run(&mut self, io: &mut Io<Batch, Trained<B::Weights>>) -> Result<(), StageError> {
        let taken = self.resumed.as_ref().map_or(0, |resumed| resumed.step);
        if let Some(steps) = self.steps.filter(|steps| *steps < taken) {
            return Err(FewerSteps { taken, steps }.into());
        }
        if let (Some(saving), Some(resumed)) = (&self.save, &self.resumed) {
            saving.prune(resumed.step)?;
        }
        let first = match &self.resumed {
            Some(_) => self.learner.backend.current().wait()?,
            None => self.learner.backend.snapshot().wait()?,
        };
        io.send(Trained {
            step: 0,
            version: 0,
            batch: Batch::default(),
            forward: ForwardBackward::default(),
            optim: OptimStep::default(),
            kl_cost: None,
            settings: BTreeMap::new(),
            critic: None,
            totals: None,
            publish: Some(first),
            evaluated: BTreeMap::new(),
            seconds: 0.0,
            update_seconds: 0.0,
        })?;
        let mut unsaved = None;
        let ended = self.train(io, &mut unsaved);
        // A rejected batch leaves the weights of the last step unchanged.
        let whole = |error: &StageError| error.is_closed() || error.is::<GapDiagnosis>() || error.is::<TokensMissing>();
        if let Some(last) = unsaved
            && ended.as_ref().err().is_none_or(whole)
        {
            self.save(last)?;
        }
        ended
    }

    fn attach(&mut self, context: &mut RunContext) {
        context.fill(&mut self.admission);
        if let (None, Some(folder)) = (&self.save, context.folder()) {
            self.save = Some(Saving::below(folder.to_owned(), None));
        }
        self.save = self.save.take().map(|saving| saving.limited(self.keep, self.gate.take()));
        if let Some(admission) = &self.admission {
            admission.versions_of(self.sync_every, self.steps);
        }
    }

    fn spec(&self) -> StageSpec {
        StageSpec::default().threads(self.threads).knob("threads, or smaller batches")
    }
}
