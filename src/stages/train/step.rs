//! One training step: from a batch to updates of policy and critic.
//!
//! If a batch arrives in parts, the trainer computes the gradient of the parts that are there
//! whenever it is free, and updates after the last part. Law N1: the step is the same. If the
//! step's settings do not allow this, parts are collected first, and the whole batch is trained
//! on: PPO epochs, each cut into minibatches.

use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use super::critic::{CriticStep, Valued};
use super::kl_reward::KlCost;
use super::minibatches::{draw, minibatch};
use super::stale::within_bound;
use super::step_config::StepConfig;
use super::trained::Trained;
use super::trainer::Trainer;
use crate::algo::{Aggregation, GapDiagnosis};
use crate::data::{Batch, Sample};
use crate::flow::{Io, StageError};
use crate::observe::Metric;
use crate::rollout::{Admission, Census};
use crate::train::{
    ForwardBackward, OptimStep, TrainBatch, TrainError, TrainFuture, TrainingBackend, assign_advantages, assign_advantages_of,
    collate, collate_part,
};

/// A batch on its way through a step: parts may have passed before the rest arrives.
pub(super) struct StepBatch {
    step: u64,
    config: StepConfig,
    /// Parts already trained on.
    done: Batch,
    /// Parts not yet trained on.
    rest: Batch,
    /// Result of the passes over `done`, and the sum of its weights.
    passes: Option<(ForwardBackward, f64)>,
    /// Time of the passes so far.
    worked: Duration,
}

/// The first pass of a step, the loss of what was mixed in, and the step's updates.
type Updates = (ForwardBackward, Option<f64>, Vec<TrainFuture<OptimStep>>);

/// A batch after its passes.
struct Learned {
    batch: Batch,
    kl_cost: Option<KlCost>,
    /// Divergence from the teacher, if there is one.
    distilled: Option<f64>,
    critic: Option<CriticStep>,
    /// The first pass, with the loss's counts of all.
    forward: ForwardBackward,
    /// Loss of the samples mixed into the last update.
    mixed: Option<f64>,
    /// The updates, in progress.
    updates: Vec<TrainFuture<OptimStep>>,
}

impl<B: TrainingBackend> Trainer<B> {
    /// Receives the next batch with trainable groups. `None` at the end of the input; an incomplete
    /// batch is dropped then.
    pub(super) fn gather(&self, step: u64, io: &mut Io<Batch, Trained<B::Weights>>) -> Result<Option<StepBatch>, StageError> {
        let (done, rest) = (Batch::default(), Batch::default());
        let mut batch = StepBatch { step, config: self.config(step)?, done, rest, passes: None, worked: Duration::ZERO };
        loop {
            let Some(part) = io.recv()? else { return Ok(None) };
            batch.rest.append(part);
            while batch.rest.more
                && let Poll::Ready(Some(part)) = io.try_recv()
            {
                batch.rest.append(part);
            }
            batch.rest = self.admitted(std::mem::take(&mut batch.rest))?;
            if !batch.rest.more {
                if !batch.done.groups.is_empty() || !batch.rest.groups.is_empty() {
                    return Ok(Some(batch));
                }
            } else if self.critic.is_none()
                && batch.config.takes_parts(self.backend.takes_parts(batch.config.algorithm.as_deref()))
            {
                let started = Instant::now();
                self.train_rest(&mut batch)?;
                batch.worked += started.elapsed();
            }
        }
    }

    /// Checks the ledger (law D4), masks truncated completions, and applies the bound on staleness (law V2).
    fn admitted(&self, mut batch: Batch) -> Result<Batch, StageError> {
        if self.mask_truncated {
            batch.groups.iter_mut().flat_map(|group| &mut group.samples).for_each(Sample::mask_truncated);
        }
        let Some(admission) = &self.admission else { return Ok(batch) };
        admission.ledger().verify(&batch)?;
        let Some(bound) = admission.bound() else { return Ok(batch) };
        let version = self.backend.state().weight_version;
        let (batch, given_up) = within_bound(batch, version, bound, self.on_stale).map_err(StageError::new)?;
        if given_up > 0 {
            admission.gave_up(given_up);
        }
        Ok(batch)
    }

    /// Trains on a complete batch, and publishes if the step is due. `kl_coef`: adaptive KL
    /// coefficient after the previous step.
    pub(super) fn step(&self, batch: StepBatch, kl_coef: Option<f64>) -> Result<Trained<B::Weights>, StageError> {
        let started = Instant::now();
        let (step, worked, mut settings) = (batch.step, batch.worked, batch.config.settings.clone());
        let ppo_epochs = batch.config.ppo_epochs.max(1);
        let version = self.backend.state().weight_version;
        let Learned { batch, kl_cost, distilled, critic, forward, mixed, updates } = match batch.passes {
            Some(_) => self.finish_parts(batch)?,
            None => self.train_whole(batch, kl_coef)?,
        };
        let passed = Instant::now();
        settings.extend(mixed.map(|loss| (Metric::MixedLoss.key().to_owned(), loss)));
        settings.extend(distilled.map(|kl| (Metric::TeacherKl.key().to_owned(), kl)));
        settings.extend(self.admission.as_ref().and_then(Admission::census).iter().flat_map(Census::row));
        let last = self.sync_last && self.steps == Some(step);
        let publish = (last || step.is_multiple_of(self.sync_every)).then(|| self.backend.snapshot());
        let mut updates = updates.iter().map(TrainFuture::wait).collect::<Result<Vec<OptimStep>, _>>()?;
        let of_critic = critic.as_ref().map_or(0, |critic: &CriticStep| critic.updates_skipped);
        let updates_skipped = of_critic + updates.iter().filter(|update| update.skipped.is_some()).count() as u64;
        let count = updates.len() as u64;
        let optim = updates.pop().unwrap_or_default();
        let publish = publish.map(|snapshot| snapshot.wait()).transpose()?;
        let update_seconds = passed.elapsed().as_secs_f64();
        // Law D4: a step that leaves the ledger unbalanced ends the run, and is not saved.
        let totals = self.admission.as_ref().map(|admission| admission.settle(&batch)).transpose().map_err(StageError::new)?;
        let seconds = (worked + started.elapsed()).as_secs_f64();
        let trained = Trained { step, version, batch, forward, optim, kl_cost, critic, settings, ..Trained::default() };
        Ok(Trained { ppo_epochs, updates: count, updates_skipped, totals, publish, seconds, update_seconds, ..trained })
    }

    /// Estimates advantages, unless a critic does.
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

    fn train_rest(&self, pending: &mut StepBatch) -> Result<(), StageError> {
        let (mut part, config) = (std::mem::take(&mut pending.rest), &pending.config);
        self.assign_advantages(config, &mut part, None)?;
        let samples: Vec<&Sample> = part.samples().collect();
        let (batch, weight_sum) = collate_part(&samples, config.aggregation)?;
        let (seen, sum) = pending.passes.get_or_insert_default();
        *sum += weight_sum;
        if let Some(batch) = batch {
            let (version, algorithm) = (self.backend.state().weight_version, config.algorithm.clone());
            let batch = TrainBatch { version, algorithm, scored: config.scored, ..batch };
            seen.merge(self.backend.forward_backward(Arc::new(batch)).wait()?);
        }
        pending.done.append(part);
        Ok(())
    }

    fn finish_parts(&self, mut pending: StepBatch) -> Result<Learned, StageError> {
        self.train_rest(&mut pending)?;
        let StepBatch { step, config, done: mut batch, passes, .. } = pending;
        let (seen, weight_sum) = passes.unwrap_or_default();
        if seen.tokens + seen.saved_tokens == 0 {
            return Err(TrainError::NothingToTrain(batch.len()).into());
        }
        batch.sort();
        let forward = seen.scaled(1.0 / weight_sum);
        self.check_gap(step, &forward)?;
        // The final scale divides it again.
        let mixed = self.mix_in(&config, weight_sum)?;
        let updates = vec![self.backend.update(1.0 / weight_sum, config.rate(config.schedule, step - 1, 0))];
        Ok(Learned { batch, kl_cost: None, distilled: None, critic: None, forward, mixed, updates })
    }

    /// Makes all passes and updates over a whole batch.
    fn train_whole(&self, pending: StepBatch, kl_coef: Option<f64>) -> Result<Learned, StageError> {
        let StepBatch { step, config, rest: mut batch, .. } = pending;
        batch.sort();
        let mut kl_cost = self.assign_advantages(&config, &mut batch, kl_coef)?;
        config.pairs.as_ref().map_or(Ok(()), |pairing| pairing.mask_others(&mut batch))?;
        let prepared = match &config.pairs {
            Some(pairing) => collate(&pairing.laid_out(&batch.groups), Aggregation::SeqMeanTokenMean)?,
            None => collate(&batch.samples().collect::<Vec<_>>(), config.aggregation)?,
        };
        let (version, algorithm) = (self.backend.state().weight_version, config.algorithm.clone());
        let (pairs, scored) = (config.pairs.is_some(), config.scored);
        let mut prepared = TrainBatch { version, algorithm, pairs, scored, ..prepared };
        let distilled = config.distill.as_ref().map(|distill| distill.apply(&mut batch, &mut prepared)).transpose()?;
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
        let (forward, mixed, updates) = self.update(step, &config, &batch, Arc::new(prepared), valued.as_mut())?;
        Ok(Learned { batch, kl_cost, distilled, critic: valued.map(|valued| valued.step), forward, mixed, updates })
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
        let updated = !(step - 1).is_multiple_of(self.sync_every);
        let of_step = |diagnosis: GapDiagnosis| GapDiagnosis { updated, ..diagnosis };
        if let Some(diagnosis) = self.gap_limits.check(step, &forward.gap).map_err(of_step)? {
            tracing::warn!("{}", of_step(diagnosis));
        }
        Ok(())
    }

    /// Makes all updates of a step, the critic's included. The policy's first pass that is not skipped is
    /// checked before any weight changes (law N3).
    fn update(
        &self,
        step: u64,
        config: &StepConfig,
        batch: &Batch,
        policy: Arc<TrainBatch>,
        valued: Option<&mut Valued>,
    ) -> Result<Updates, StageError> {
        let samples: Vec<&Sample> = batch.samples().collect();
        let rests = self.critic.as_ref().is_some_and(|critic| critic.warms_up(step));
        let mut forward = if rests { Some(self.measure_gap(step, &policy)?) } else { None };
        let mut updates: Vec<_> = rests.then(|| self.no_update()).into_iter().collect();
        let (mut mixed, mut checked) = (None, rests);
        let mut critic = self.critic.as_ref().zip(valued).map(|(critic, valued)| {
            let whole = Arc::new(std::mem::take(&mut valued.critic));
            (critic, whole, &mut valued.step)
        });
        let passes = config.ppo_epochs.max(1);
        // Pairs are laid out over the batch, and are not cut.
        let minibatches = if config.pairs.is_some() { 1 } else { config.minibatches };
        let own_steps = step - 1 - self.critic.as_ref().map_or(0, |critic| critic.warm_up.min(step - 1));
        for pass in 0..passes {
            let stream = step.wrapping_mul(passes).wrapping_add(pass);
            let groups = batch.groups.iter().map(|group| group.samples.len());
            for (at, places) in (0..).zip(draw(minibatches, config.minibatch_seed, groups, stream)) {
                let at = pass * config.minibatches.max(1) as u64 + at;
                let part = |whole: &Arc<TrainBatch>| minibatch(whole, &samples, &places, config.aggregation);
                if !rests && let Some(part) = part(&policy)? {
                    let seen = self.backend.forward_backward(part).wait()?;
                    if !checked {
                        self.check_gap(step, &seen)?;
                        checked = seen.skipped.is_none();
                    }
                    match &mut forward {
                        None => forward = Some(seen),
                        Some(forward) => {
                            forward.metrics.merge(&seen.metrics);
                            // Later epochs see tokens again.
                            forward.scores.extend(seen.scores.into_iter().filter(|_| pass == 0));
                            forward.skipped = forward.skipped.take().or(seen.skipped);
                        }
                    }
                    mixed = self.mix_in(config, 1.0)?;
                    updates.push(self.backend.update(1.0, config.rate(config.schedule, own_steps, at)));
                }
                if let Some((critic, whole, seen)) = &mut critic
                    && let Some(part) = part(whole)?
                {
                    critic.learn(part, config.rate(config.critic_schedule, step - 1, at), seen)?;
                }
            }
        }
        let forward = forward.ok_or(TrainError::NothingToTrain(samples.len()))?;
        Ok((forward, mixed, updates))
    }

    /// Measures the gap of a batch that the policy is not trained on.
    fn measure_gap(&self, step: u64, batch: &Arc<TrainBatch>) -> Result<ForwardBackward, StageError> {
        let scores = self.backend.score(batch.clone()).wait()?;
        let gap = batch.gap(&batch.all(), &scores.concat());
        let seen = ForwardBackward { gap, ..ForwardBackward::default() };
        self.check_gap(step, &seen)?;
        Ok(seen)
    }

    fn no_update(&self) -> TrainFuture<OptimStep> {
        TrainFuture::ready(Ok(OptimStep { step: self.backend.state().step, ..OptimStep::default() }))
    }
}
