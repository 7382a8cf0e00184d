//! One optimizer step a batch.
//!
//! Law V1: the trainer alone makes versions. Law V4: the first thing it sends is the untrained weights, before any batch came.
//! Law C1: checkpoints are taken between steps, and the last step is saved however the run ends, unless it was the trainer that
//! failed. They are written after the step was sent on, so that generators get their weights first (`saving.rs` says how). Law N3: where
//! trainer and generator disagree by more than [`GapLimits::halt`], the run ends before the update is made.

use std::collections::{BTreeMap, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use super::kl_reward::{KlCost, RewardKl};
use super::saving::{Beside, Resumed, Saving, Unsaved};
use super::stale::{OnStale, within_bound};
use crate::algo::{AdvantageConfig, Aggregation, Estimator, GapDiagnosis, GapLimits, GapVerdict};
use crate::data::{Batch, Version};
use crate::flow::{Io, Message, Stage, StageError, StageSpec};
use crate::stages::pairs::Pairing;
use crate::stages::{Admission, Totals};
use crate::train::{
    ForwardBackward, OptimStep, Snapshot, TrainBatch, TrainError, TrainingBackend, assign_advantages, assign_advantages_of,
    collate,
};

/// A batch after its step. The first message of a run has step 0 and an empty batch, and brings the first weights.
#[derive(Debug)]
pub struct Trained<W> {
    /// Steps taken in this run, this one included.
    pub step: u64,
    /// The version whose weights were trained: the newest published before the step.
    pub version: Version,
    /// What was trained, with rewards and advantages.
    pub batch: Batch,
    /// What the forward pass saw: of several updates the first, with the loss's counts of all.
    pub forward: ForwardBackward,
    /// What the update did, of several the last.
    pub optim: OptimStep,
    /// What distance from the reference policy cost in the rewards, where it costs anything.
    pub kl_cost: Option<KlCost>,
    /// What became of every prompt and token so far (law D4), where the trainer was given the admission.
    pub totals: Option<Totals>,
    /// New weights, on steps that publish.
    pub publish: Option<Snapshot<W>>,
    /// How long the step took, in seconds.
    pub seconds: f64,
}

impl<W: Send + Sync + 'static> Message for Trained<W> {
    fn tokens(&self) -> usize {
        self.batch.tokens()
    }
}

/// Turns batches into optimizer steps on any [`TrainingBackend`].
pub struct Trainer<B> {
    backend: B,
    aggregation: Aggregation,
    advantages: Option<Box<dyn Estimator>>,
    reward_kl: Option<RewardKl>,
    pairs: Option<Pairing>,
    steps: Option<u64>,
    target_reward: Option<f64>,
    sync_every: u64,
    updates: u64,
    score_first: bool,
    gap_limits: GapLimits,
    save: Option<Saving>,
    beside: Option<Beside>,
    admission: Option<Admission>,
    on_stale: OnStale,
    resumed: Option<Resumed>,
    threads: usize,
}

/// Steps over which a target reward must hold: fewer would stop at a lucky batch.
const TARGET_STEPS: usize = 20;

impl<B: TrainingBackend> Trainer<B> {
    /// Trains on the samples as they are, every token alike, and publishes after every step.
    pub fn new(backend: B) -> Self {
        let aggregation = Aggregation::default();
        Trainer {
            backend,
            aggregation,
            advantages: None,
            reward_kl: None,
            pairs: None,
            steps: None,
            target_reward: None,
            sync_every: 1,
            updates: 1,
            score_first: false,
            gap_limits: GapLimits::default(),
            save: None,
            beside: None,
            admission: None,
            on_stale: OnStale::default(),
            resumed: None,
            threads: 1,
        }
    }

    /// Compares rewards first, in this way: one of [`Advantage`](crate::algo::Advantage), or a closure.
    pub fn advantages(self, estimator: impl Estimator + 'static) -> Self {
        Trainer { advantages: Some(Box::new(estimator)), ..self }
    }

    /// Compares rewards with the mean of their group (GRPO).
    pub fn group_relative(self, config: AdvantageConfig) -> Self {
        self.advantages(config)
    }

    /// Takes what distance from the reference policy costs off the rewards before they are compared.
    pub fn reward_kl(self, kl: RewardKl) -> Self {
        Trainer { reward_kl: Some(kl), ..self }
    }

    /// Trains on pairs, chosen and rejected one behind the other, for a loss that reads them so
    /// ([`PairwiseLoss`](crate::algo::PairwiseLoss)); all pairs of a step count alike, whatever the aggregation.
    pub fn pairs(self, pairing: &Pairing) -> Self {
        Trainer { pairs: Some(pairing.clone()), ..self }
    }

    /// How tokens weigh against each other.
    pub fn aggregation(self, aggregation: Aggregation) -> Self {
        Trainer { aggregation, ..self }
    }

    /// Ends the run after so many steps.
    pub fn steps(self, steps: u64) -> Self {
        Trainer { steps: Some(steps), ..self }
    }

    /// Ends the run sooner, once the mean reward of the last 20 steps (over all that was scored, dropped groups included) reaches this.
    pub fn target_reward(self, reward: f64) -> Self {
        Trainer { target_reward: Some(reward), ..self }
    }

    /// Publishes weights after every `n` steps.
    pub fn sync_every(self, n: u64) -> Self {
        Trainer { sync_every: n.max(1), ..self }
    }

    /// Updates made from each batch, that is optimizer steps a step (PPO's epochs, μ in GRPO); 1 unless told otherwise.
    pub fn updates(self, n: u64) -> Self {
        Trainer { updates: n.max(1), ..self }
    }

    /// Scores each batch before the first of several updates, for a loss whose trust region is centred there (`Proximal::Recompute`). A
    /// single update's own forward pass is that score already.
    pub fn score_first(self, scores: bool) -> Self {
        Trainer { score_first: scores, ..self }
    }

    /// How far trainer and generator may be apart (law N3).
    pub fn gap_limits(self, limits: GapLimits) -> Self {
        Trainer { gap_limits: limits, ..self }
    }

    /// Saves a checkpoint below `run_folder` after the last step, and after every `every` steps.
    pub fn checkpoints(self, run_folder: impl Into<PathBuf>, every: Option<u64>) -> Self {
        Trainer { save: Some(Saving::below(run_folder.into(), every)), ..self }
    }

    /// Of those checkpoints, keeps the newest `n`, at least two. All are kept unless told otherwise.
    pub fn keep(self, n: usize) -> Self {
        Trainer { save: self.save.map(|saving| saving.keep(n)), ..self }
    }

    /// Puts these files into every checkpoint too, by name: what other stages must go on from.
    pub fn checkpoint_files(
        self,
        files: impl Fn() -> Result<BTreeMap<String, Vec<u8>>, Box<dyn std::error::Error + Send + Sync>> + Send + 'static,
    ) -> Self {
        Trainer { beside: Some(Box::new(files)), ..self }
    }

    /// Settles trained groups there, asserts its bound on staleness for every token (law V2), and puts it into checkpoints.
    pub fn admission(self, admission: &Admission) -> Self {
        Trainer { admission: Some(admission.clone()), ..self }
    }

    /// What becomes of tokens older than that bound.
    pub fn on_stale(self, on_stale: OnStale) -> Self {
        Trainer { on_stale, ..self }
    }

    /// Goes on after a checkpoint that [`Trainer`] wrote: loads it, counts steps on, and announces its weights under the version they had.
    pub fn resume(self, checkpoint: &Path, resumed: Resumed) -> Result<Self, TrainError> {
        self.backend.load_checkpoint(checkpoint).wait()?;
        Ok(Trainer { resumed: Some(resumed), ..self })
    }

    /// Cores that the backend computes with, for the thread budget.
    pub fn threads(self, threads: usize) -> Self {
        Trainer { threads, ..self }
    }

    /// The batch as law V2 lets it be trained.
    fn fresh(&self, batch: Batch) -> Result<Batch, StageError> {
        let Some((admission, bound)) = self.admission.as_ref().and_then(|admission| Some((admission, admission.bound()?))) else {
            return Ok(batch);
        };
        let (batch, given_up) = within_bound(batch, self.backend.state().weight_version, bound, self.on_stale)?;
        if given_up > 0 {
            admission.gave_up(given_up);
        }
        Ok(batch)
    }

    /// Compares rewards. `coef`: what distance from the reference cost in the next step, as the last one left it.
    fn compare(&self, batch: &mut Batch, coef: Option<f64>) -> Result<Option<KlCost>, StageError> {
        let Some(advantages) = self.advantages.as_deref() else { return Ok(None) };
        let Some(kl) = &self.reward_kl else {
            assign_advantages(batch, advantages)?;
            return Ok(None);
        };
        let (rewards, cost) = kl.charge(batch, coef)?;
        assign_advantages_of(rewards, batch, advantages)?;
        Ok(Some(cost))
    }

    fn step(&self, step: u64, mut batch: Batch, kl_coef: Option<f64>) -> Result<Trained<B::Weights>, StageError> {
        let started = Instant::now();
        let version = self.backend.state().weight_version;
        let kl_cost = self.compare(&mut batch, kl_coef)?;
        let prepared = match &self.pairs {
            Some(pairing) => collate(&pairing.laid_out(&batch.groups), Aggregation::SeqMeanTokenMean)?.in_pairs(),
            None => collate(&batch.samples().collect::<Vec<_>>(), self.aggregation)?,
        };
        let mut prepared = Arc::new(prepared.at_version(version));
        if self.score_first && self.updates > 1 {
            let scores = self.backend.score(prepared.clone()).wait()?;
            prepared = Arc::new(TrainBatch::clone(&prepared).with_proximal(scores));
        }
        // Waited for, so that no update is made from a batch that is beyond the limit.
        let mut forward = self.backend.forward_backward(prepared.clone()).wait()?;
        self.judge(step, &forward)?;
        let mut optim = self.backend.optim_step();
        for _ in 1..self.updates {
            let next = self.backend.forward_backward(prepared.clone());
            optim = self.backend.optim_step();
            let next = next.wait()?;
            forward.metrics.merge(&next.metrics);
            forward.skipped = forward.skipped.or(next.skipped);
        }
        let publish = step.is_multiple_of(self.sync_every).then(|| self.backend.snapshot());
        let optim = optim.wait()?;
        let publish = publish.map(|snapshot| snapshot.wait()).transpose()?;
        let totals = self.admission.as_ref().map(|admission| admission.settle(&batch));
        debug_assert!(totals.as_ref().is_none_or(|totals| totals.imbalance() == (0, 0)), "law D4: {totals:?}");
        let seconds = started.elapsed().as_secs_f64();
        Ok(Trained { step, version, batch, forward, optim, kl_cost, totals, publish, seconds })
    }

    fn is_synchronous(&self) -> bool {
        self.admission.as_ref().is_some_and(|admission| admission.bound() == Some(0))
    }

    /// Law N3. What a batch that is skipped anyway measured is not whole.
    fn judge(&self, step: u64, forward: &ForwardBackward) -> Result<(), StageError> {
        if forward.skipped.is_some() {
            return Ok(());
        }
        match self.gap_limits.judge(step, &forward.gap) {
            GapVerdict::Fine => Ok(()),
            GapVerdict::Warn(diagnosis) => {
                tracing::warn!("{diagnosis}");
                Ok(())
            }
            GapVerdict::Halt(diagnosis) => Err(diagnosis.into()),
        }
    }

    fn has_reached_target(&self, recent: &VecDeque<f64>) -> bool {
        let reached = |target| recent.len() == TARGET_STEPS && mean(recent.iter().copied()).is_some_and(|mean| mean >= target);
        self.target_reward.is_some_and(reached)
    }

    /// Whether a checkpoint is due after `step`.
    fn saves_at(&self, step: u64) -> bool {
        self.steps == Some(step) || self.save.as_ref().is_some_and(|saving| saving.is_due(step))
    }

    fn save(&self, last: Unsaved) -> Result<(), StageError> {
        self.save
            .as_ref()
            .map_or(Ok(()), |saving| saving.write(&self.backend, self.admission.as_ref(), self.beside.as_ref(), last))
    }

    /// Steps until there is nothing more to train on, leaving in `unsaved` what no checkpoint holds.
    fn train(&self, io: &mut Io<Batch, Trained<B::Weights>>, unsaved: &mut Option<Unsaved>) -> Result<(), StageError> {
        let Resumed { mut step, mut recent, mut kl_coef, .. } = self.resumed.clone().unwrap_or_default();
        let mut given_up = Vec::new();
        while self.steps != Some(step) && !self.has_reached_target(&recent) {
            let Some(batch) = io.recv()? else { break };
            let mut batch = self.fresh(batch)?;
            batch.dropped.append(&mut given_up);
            if batch.groups.is_empty() {
                given_up = batch.dropped;
                continue;
            }
            step += 1;
            let trained = self.step(step, batch, kl_coef)?;
            kl_coef = trained.kl_cost.map(|cost| cost.next);
            recent.extend(mean(trained.batch.rewards()));
            if recent.len() > TARGET_STEPS {
                recent.pop_front();
            }
            *unsaved = Some(Unsaved::after(&trained, &recent));
            // A synchronous run is cut before the generators go on, so that there is nothing under way to be made again.
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
            totals: None,
            publish: Some(first),
            seconds: 0.0,
        })?;
        let mut unsaved = None;
        let ended = self.train(io, &mut unsaved);
        // A batch that is refused for its gap leaves the weights as the last step left them.
        let whole = |error: &StageError| error.is_closed() || error.is::<GapDiagnosis>();
        if let Some(last) = unsaved
            && ended.as_ref().err().is_none_or(whole)
        {
            self.save(last)?;
        }
        ended
    }

    fn spec(&self) -> StageSpec {
        StageSpec::thread().threads(self.threads).knob("threads, or smaller batches")
    }
}
