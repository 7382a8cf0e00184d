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

use super::OnStale;
use super::critic::{Critic, CriticStep};
use super::gate::CheckpointGate;
use super::kl_reward::{KlCost, RewardKl};
use super::saving::{ExtraFiles, Resumed, Saving, Unsaved};
use super::step_config::{Minibatches, StepConfig, StepConfigError, StepConfigs};
use crate::algo::{Aggregation, Estimator, GapDiagnosis, GapLimits};
use crate::data::{Batch, Version};
use crate::flow::{Io, Message, RunContext, Stage, StageError, StageSpec};
use crate::rollout::{Admission, TokensMissing, Totals};
use crate::stages::pairs::Pairing;
use crate::train::{ForwardBackward, OptimStep, Snapshot, TrainError, TrainingBackend};

/// A batch after its step. A run's first message has step 0, an empty batch and the initial
/// weights.
#[derive(Debug)]
pub struct Trained<W> {
    /// Steps taken in this run, this one included.
    pub step: u64,
    /// The version whose weights were trained: the newest published before the step.
    pub version: Version,
    /// The trained batch, with rewards and advantages.
    pub batch: Batch,
    /// Result of the forward pass. With several updates: the first pass, with the loss's counts of
    /// all.
    pub forward: ForwardBackward,
    /// Result of the last update.
    pub optim: OptimStep,
    /// KL penalty in the rewards, if there is one.
    pub kl_cost: Option<KlCost>,
    /// Numbers of this step's config.
    pub settings: BTreeMap<String, f64>,
    /// Metrics of the critic, if there is one.
    pub critic: Option<CriticStep>,
    /// Fates of all prompts and tokens so far (law D4), if the trainer has an admission.
    pub totals: Option<Totals>,
    /// New weights, on steps that publish.
    pub publish: Option<Snapshot<W>>,
    /// Results of evaluations that have ended since the last step.
    pub evaluated: BTreeMap<String, f64>,
    /// Duration of the step in seconds, without waiting for parts of its batch.
    pub seconds: f64,
    /// Part of `seconds` after the last pass: update and copy for the publish.
    pub update_seconds: f64,
}

impl<W: Send + Sync + 'static> Message for Trained<W> {
    fn tokens(&self) -> usize {
        self.batch.tokens()
    }
}

/// Turns batches into optimizer steps on any [`TrainingBackend`].
pub struct Trainer<B> {
    pub(super) backend: B,
    pub(super) step_configs: StepConfigs,
    pub(super) critic: Option<Critic<B>>,
    pub(super) steps: Option<u64>,
    target_reward: Option<f64>,
    pub(super) sync_every: u64,
    pub(super) sync_last: bool,
    pub(super) gap_limits: GapLimits,
    save: Option<Saving>,
    extra_files: Option<ExtraFiles>,
    pub(super) admission: Option<Admission>,
    pub(super) on_stale: OnStale,
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
            backend,
            step_configs: StepConfigs::Same(Box::default()),
            critic: None,
            steps: None,
            target_reward: None,
            sync_every: 1,
            sync_last: false,
            gap_limits: GapLimits::default(),
            save: None,
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

    /// Changes the config that all steps have.
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
    /// [`PairwiseLoss`](crate::algo::PairwiseLoss). Each pair weighs the same, and the aggregation
    /// is ignored.
    pub fn pairs(self, pairing: &Pairing) -> Self {
        self.change(|config| config.pairs = Some(pairing.clone()))
    }

    /// Trains a critic in turn with the policy, and uses its advantages instead of
    /// [`Trainer::advantages`] (PPO). The penalty of [`Trainer::reward_kl`] then applies token by
    /// token.
    pub fn critic(self, critic: Critic<B>) -> Self {
        Trainer { critic: Some(critic), ..self }
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
        Trainer { gap_limits: limits, ..self }
    }

    /// Saves a checkpoint below `run_folder` after the last step, and after every `every` steps.
    pub fn checkpoints(self, run_folder: impl Into<PathBuf>, every: Option<u64>) -> Self {
        Trainer { save: Some(Saving::below(run_folder.into(), every)), ..self }
    }

    /// Keeps the newest `n` checkpoints, at least two. Default: all.
    pub fn keep(self, n: usize) -> Self {
        Trainer { save: self.save.map(|saving| saving.keep(n)), ..self }
    }

    /// Publishes a checkpoint only after the log with the same gate has written the rows of its
    /// step.
    pub fn gate(self, gate: &CheckpointGate) -> Self {
        Trainer { save: self.save.map(|saving| saving.gate(gate)), ..self }
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
        self.backend.load_checkpoint(checkpoint).wait()?;
        self.critic.as_ref().map_or(Ok(()), |critic| critic.load(checkpoint))?;
        self.save.as_ref().map_or(Ok(()), |saving| saving.prune(resumed.step))?;
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
            saving.write(&self.backend, self.critic.as_ref(), self.admission.as_ref(), self.extra_files.as_ref(), last)
        })
    }

    /// Steps until the input ends. `unsaved` holds the last step without a checkpoint.
    fn train(&self, io: &mut Io<Batch, Trained<B::Weights>>, unsaved: &mut Option<Unsaved>) -> Result<(), StageError> {
        let Resumed { mut step, mut recent, mut kl_coef, .. } = self.resumed.clone().unwrap_or_default();
        while self.steps.is_none_or(|steps| step < steps) && !self.has_reached_target(&recent) {
            let Some(gathered) = self.gather(step + 1, io)? else { break };
            step += 1;
            let trained = self.step(gathered, kl_coef)?;
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

/// `None` of nothing.
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
        let first = match &self.resumed {
            Some(_) => self.backend.current().wait()?,
            None => self.backend.snapshot().wait()?,
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
        // A batch that is refused leaves the weights as the last step left them.
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
        if let Some(admission) = &self.admission {
            admission.versions_of(self.sync_every, self.steps);
        }
    }

    fn spec(&self) -> StageSpec {
        StageSpec::thread().threads(self.threads).knob("threads, or smaller batches")
    }
}
