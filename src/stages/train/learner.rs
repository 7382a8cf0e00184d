//! Learner: from a batch to updates of policy and critic.
//!
//! If a batch arrives in parts, the learner computes the gradient of the parts that are there
//! whenever it is free, and updates after the last part. Law N1: the step is the same. If the
//! step's settings do not allow this, parts are collected first, and the whole batch is trained
//! on: PPO epochs, each cut into minibatches.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::critic::{Critic, CriticStep, Valued};
use super::kl_reward::KlCost;
use super::minibatches::{Minibatches, minibatch};
use super::step_config::StepConfig;
use crate::algo::{Aggregation, GapLimits, GapVerdict};
use crate::data::{Batch, Sample, Version};
use crate::flow::StageError;
use crate::train::{
    BatchError, ForwardBackward, OptimStep, PackedColumns, TrainBatch, TrainFuture, TrainingBackend, Update, assign_advantages,
    assign_advantages_of, collate, collate_part,
};

/// Backends of policy and critic, and the largest gap between trainer and generator.
pub(super) struct Learner<B> {
    pub backend: B,
    pub critic: Option<Critic<B>>,
    pub gap_limits: GapLimits,
}

/// A batch on its way through a step: parts may have passed before the rest arrives.
pub(super) struct StepBatch {
    pub step: u64,
    pub config: StepConfig,
    /// Parts already trained on.
    done: Batch,
    /// Parts not yet trained on.
    pub rest: Batch,
    passes: Option<Passes>,
    /// Time of the passes so far.
    pub worked: Duration,
}

impl StepBatch {
    pub fn new(step: u64, config: StepConfig) -> Self {
        let (done, rest) = (Batch::default(), Batch::default());
        StepBatch { step, config, done, rest, passes: None, worked: Duration::ZERO }
    }

    /// Returns true if no group has arrived.
    pub fn is_empty(&self) -> bool {
        self.done.groups.is_empty() && self.rest.groups.is_empty()
    }
}

/// Passes over parts of a batch.
#[derive(Default)]
struct Passes {
    seen: ForwardBackward,
    weight_sum: f64,
}

/// A batch after its passes.
pub(super) struct Learned {
    pub batch: Batch,
    pub kl_cost: Option<KlCost>,
    pub critic: Option<CriticStep>,
    pub forward: ForwardBackward,
    /// Loss of the mixed-in samples.
    pub mixed: Option<f64>,
    /// The last update, in progress.
    pub optim: TrainFuture<OptimStep>,
}

/// Result of a step's updates.
struct Updated {
    /// The first pass, with the loss's counts of all.
    forward: ForwardBackward,
    /// Loss of the samples mixed into the last update.
    mixed: Option<f64>,
    /// The last update, in progress.
    optim: TrainFuture<OptimStep>,
}

impl<B: TrainingBackend> Learner<B> {
    /// Estimates advantages, unless a critic does. `coef`: adaptive KL coefficient after the
    /// previous step.
    fn assign_advantages(&self, config: &StepConfig, batch: &mut Batch, coef: Option<f64>) -> Result<Option<KlCost>, StageError> {
        let Some(advantages) = config.advantages.as_deref().filter(|_| self.critic.is_none()) else { return Ok(None) };
        let Some(kl) = &config.reward_kl else {
            assign_advantages(batch, advantages)?;
            return Ok(None);
        };
        let (rewards, cost) = kl.charge(batch, coef)?;
        assign_advantages_of(rewards, batch, advantages)?;
        Ok(Some(cost))
    }

    /// Trains on the parts that have arrived, if the step's settings allow it.
    pub fn train_early(&self, batch: &mut StepBatch) -> Result<(), StageError> {
        if self.critic.is_none() && batch.config.takes_parts(self.backend.takes_parts()) {
            let started = Instant::now();
            self.train_rest(batch)?;
            batch.worked += started.elapsed();
        }
        Ok(())
    }

    /// Trains on the rest of a complete batch, and starts the last update. `kl_coef`: adaptive KL
    /// coefficient after the previous step.
    pub fn train(&self, batch: StepBatch, kl_coef: Option<f64>) -> Result<Learned, StageError> {
        match batch.passes {
            Some(_) => self.finish_parts(batch),
            None => self.train_whole(batch, kl_coef),
        }
    }

    /// Newest published version.
    pub fn version(&self) -> Version {
        self.backend.state().weight_version
    }

    /// Trains on the parts that are not yet trained on.
    fn train_rest(&self, pending: &mut StepBatch) -> Result<(), StageError> {
        let (mut part, config) = (std::mem::take(&mut pending.rest), &pending.config);
        self.assign_advantages(config, &mut part, None)?;
        let samples: Vec<&Sample> = part.samples().collect();
        let (batch, weight_sum) = collate_part(&samples, config.aggregation)?;
        let passes = pending.passes.get_or_insert_default();
        passes.weight_sum += weight_sum;
        if let Some(batch) = batch {
            let batch = batch.at_version(self.version()).by(config.algorithm.clone());
            let batch = Arc::new(batch);
            passes.seen.merge(self.backend.forward_backward(batch).wait()?);
        }
        pending.done.append(part);
        Ok(())
    }

    /// Trains on the last part, and updates.
    fn finish_parts(&self, mut pending: StepBatch) -> Result<Learned, StageError> {
        self.train_rest(&mut pending)?;
        let StepBatch { step, config, done: mut batch, passes, .. } = pending;
        let Passes { seen, weight_sum } = passes.unwrap_or_default();
        if seen.tokens + seen.saved_tokens == 0 {
            return Err(BatchError::NothingToTrain { samples: batch.len() }.into());
        }
        batch.sort();
        let forward = seen.scaled(1.0 / weight_sum);
        self.check_gap(step, &forward)?;
        // The final scale divides it again.
        let mixed = self.mix_in(&config, weight_sum)?;
        let optim = self.backend.update(Update { scale: 1.0 / weight_sum, schedule: config.schedule });
        Ok(Learned { batch, kl_cost: None, critic: None, forward, mixed, optim })
    }

    /// Makes all passes and updates over a whole batch.
    fn train_whole(&self, pending: StepBatch, kl_coef: Option<f64>) -> Result<Learned, StageError> {
        let StepBatch { step, config, rest: mut batch, .. } = pending;
        batch.sort();
        let mut kl_cost = self.assign_advantages(&config, &mut batch, kl_coef)?;
        config.pairs.iter().for_each(|pairing| pairing.mask_others(&mut batch));
        let prepared = match &config.pairs {
            Some(pairing) => collate(&pairing.laid_out(&batch.groups), Aggregation::SeqMeanTokenMean)?.in_pairs(),
            None => collate(&batch.samples().collect::<Vec<_>>(), config.aggregation)?,
        };
        let mut prepared = prepared.at_version(self.version()).by(config.algorithm.clone());
        let mut valued = None;
        if let Some(critic) = &self.critic {
            let mut found = critic.value(&mut batch, prepared, config.reward_kl.as_deref(), kl_coef)?;
            (prepared, kl_cost) = (std::mem::take(&mut found.policy), found.kl_cost);
            valued = Some(found);
        }
        if config.score_first && config.optimizer_steps() > 1 {
            let scores = self.backend.score(Arc::new(prepared.clone())).wait()?;
            prepared = prepared.with_proximal(scores);
        }
        let Updated { forward, mixed, optim } = self.update(step, &config, &batch, prepared, valued.as_mut())?;
        Ok(Learned { batch, kl_cost, critic: valued.map(|valued| valued.step), forward, mixed, optim })
    }

    /// Adds the gradient of the mixed-in samples, times `weight_sum`, to the next update. Returns
    /// their loss.
    fn mix_in(&self, config: &StepConfig, weight_sum: f64) -> Result<Option<f64>, StageError> {
        let Some(mixed) = &config.mixed else { return Ok(None) };
        let batch = if weight_sum == 1.0 { mixed.clone() } else { Arc::new(TrainBatch::clone(mixed).scaled(weight_sum)) };
        let seen = self.backend.forward_backward(batch).wait()?;
        Ok(Some(seen.loss / weight_sum))
    }

    /// Law N3. The measurement of a skipped batch is incomplete.
    fn check_gap(&self, step: u64, forward: &ForwardBackward) -> Result<(), StageError> {
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

    /// Makes all updates of a step, the critic's included. The policy's first pass is checked
    /// before any weight changes (law N3).
    fn update(
        &self,
        step: u64,
        config: &StepConfig,
        batch: &Batch,
        policy: TrainBatch,
        valued: Option<&mut Valued>,
    ) -> Result<Updated, StageError> {
        let samples: Vec<&Sample> = batch.samples().collect();
        let policy = Arc::new(policy);
        let rests = self.critic.as_ref().is_some_and(|critic| critic.warms_up(step));
        let (mut forward, mut optim) =
            if rests { (Some(self.measure_gap(step, &policy)?), Some(self.no_update())) } else { (None, None) };
        let mut mixed = None;
        let mut critic = self.critic.as_ref().zip(valued).map(|(critic, valued)| {
            let whole = Arc::new(std::mem::take(&mut valued.critic));
            (critic, whole, &mut valued.step)
        });
        let (passes, schedule) = (config.ppo_epochs.max(1), config.schedule);
        // Pairs are laid out over the batch, and are not cut.
        let minibatches = if config.pairs.is_some() { Minibatches::default() } else { config.minibatches };
        for pass in 0..passes {
            let stream = step.wrapping_mul(passes).wrapping_add(pass);
            for places in minibatches.draw(batch.groups.iter().map(|group| group.samples.len()), stream) {
                let part = |whole: &Arc<TrainBatch>| minibatch(whole, &samples, &places, config.aggregation);
                if !rests && let Some(part) = part(&policy)? {
                    let seen = self.backend.forward_backward(part).wait()?;
                    match &mut forward {
                        None => {
                            self.check_gap(step, &seen)?;
                            forward = Some(seen);
                        }
                        Some(forward) => {
                            forward.metrics.merge(&seen.metrics);
                            forward.skipped = forward.skipped.take().or(seen.skipped);
                        }
                    }
                    mixed = self.mix_in(config, 1.0)?;
                    optim = Some(self.backend.update(Update { schedule, ..Update::default() }));
                }
                if let Some((critic, whole, step)) = &mut critic
                    && let Some(part) = part(whole)?
                {
                    critic.learn(part, step)?;
                }
            }
        }
        let nothing = || BatchError::NothingToTrain { samples: samples.len() };
        let (forward, optim) = forward.zip(optim).ok_or_else(nothing)?;
        Ok(Updated { forward, mixed, optim })
    }

    /// Measures the gap of a batch that the policy is not trained on.
    fn measure_gap(&self, step: u64, batch: &Arc<TrainBatch>) -> Result<ForwardBackward, StageError> {
        let scores = self.backend.score(batch.clone()).wait()?;
        let all: Vec<usize> = (0..batch.sequences.len()).collect();
        let gap = PackedColumns::new(batch, &all).gap(&scores.concat());
        let seen = ForwardBackward { gap, ..ForwardBackward::default() };
        self.check_gap(step, &seen)?;
        Ok(seen)
    }

    fn no_update(&self) -> TrainFuture<OptimStep> {
        TrainFuture::ready(Ok(OptimStep { step: self.backend.state().step, ..OptimStep::default() }))
    }
}
