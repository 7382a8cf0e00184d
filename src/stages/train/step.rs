//! One optimizer step: advantages, gradient, gap check and update.
//!
//! If a batch arrives in parts, the trainer computes the gradient of the parts that are there
//! whenever it is free, and updates after the last part. Law N1: the step is the same. If the
//! step's settings do not allow this, parts are collected first. `updates.rs` makes the updates of
//! a whole batch.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::critic::CriticStep;
use super::kl_reward::KlCost;
use super::stale::within_bound;
use super::step_config::StepConfig;
use super::trainer::{Trained, Trainer};
use super::updates::Updated;
use crate::algo::{Aggregation, GapVerdict};
use crate::data::{Batch, Sample};
use crate::flow::{Io, StageError, TryRecv};
use crate::observe::Metric;
use crate::train::{
    CollateError, ForwardBackward, OptimStep, TrainBatch, TrainFuture, TrainingBackend, Update, assign_advantages,
    assign_advantages_of, collate, collate_part,
};

/// A whole batch, and the passes that were made over all but its last part.
pub(super) struct Gathered {
    step: u64,
    config: StepConfig,
    /// Parts already trained on.
    done: Batch,
    /// Parts not yet trained on.
    rest: Batch,
    passes: Option<Passes>,
    worked: Duration,
}

/// Passes over parts of a batch.
#[derive(Default)]
struct Passes {
    seen: ForwardBackward,
    weight_sum: f64,
}

/// A batch after its passes.
struct Learned {
    batch: Batch,
    kl_cost: Option<KlCost>,
    critic: Option<CriticStep>,
    forward: ForwardBackward,
    /// Loss of the mixed-in samples.
    mixed: Option<f64>,
    /// The last update, in progress.
    optim: TrainFuture<OptimStep>,
}

impl<B: TrainingBackend> Trainer<B> {
    /// Receives the next batch with trainable groups. `None` at the end of the input; an incomplete
    /// batch is dropped then.
    pub(super) fn gather(&self, step: u64, io: &mut Io<Batch, Trained<B::Weights>>) -> Result<Option<Gathered>, StageError> {
        let (config, worked) = (self.step_configs.of(step).map_err(StageError::new)?, Duration::ZERO);
        let mut gathered = Gathered { step, config, done: Batch::default(), rest: Batch::default(), passes: None, worked };
        loop {
            let Some(part) = io.recv()? else { return Ok(None) };
            gathered.rest.append(part);
            while gathered.rest.more
                && let TryRecv::Item(part) = io.try_recv()?
            {
                gathered.rest.append(part);
            }
            gathered.rest = self.fresh(std::mem::take(&mut gathered.rest))?;
            let nothing = gathered.done.groups.is_empty() && gathered.rest.groups.is_empty();
            if gathered.rest.more {
                self.learn_ahead(&mut gathered)?;
            } else if !nothing {
                return Ok(Some(gathered));
            }
        }
    }

    /// The batch as laws D4 and V2 let it be trained.
    fn fresh(&self, batch: Batch) -> Result<Batch, StageError> {
        let Some(admission) = &self.admission else { return Ok(batch) };
        admission.verify(&batch)?;
        let Some(bound) = admission.bound() else { return Ok(batch) };
        let (batch, given_up) = within_bound(batch, self.backend.state().weight_version, bound, self.on_stale)?;
        if given_up > 0 {
            admission.gave_up(given_up);
        }
        Ok(batch)
    }

    /// Estimates advantages, unless a critic does. `coef`: adaptive KL coefficient after the
    /// previous step.
    fn compare(&self, config: &StepConfig, batch: &mut Batch, coef: Option<f64>) -> Result<Option<KlCost>, StageError> {
        let Some(advantages) = config.advantages.as_deref().filter(|_| self.critic.is_none()) else { return Ok(None) };
        let Some(kl) = &config.reward_kl else {
            assign_advantages(batch, advantages)?;
            return Ok(None);
        };
        let (rewards, cost) = kl.charge(batch, coef)?;
        assign_advantages_of(rewards, batch, advantages)?;
        Ok(Some(cost))
    }

    fn learn_ahead(&self, gathered: &mut Gathered) -> Result<(), StageError> {
        if self.critic.is_none() && gathered.config.takes_parts(self.backend.takes_parts()) {
            let started = Instant::now();
            self.learn_rest(gathered)?;
            gathered.worked += started.elapsed();
        }
        Ok(())
    }

    /// Trains on the parts that are not yet trained on.
    fn learn_rest(&self, gathered: &mut Gathered) -> Result<(), StageError> {
        let (mut part, config) = (std::mem::take(&mut gathered.rest), &gathered.config);
        self.compare(config, &mut part, None)?;
        let samples: Vec<&Sample> = part.samples().collect();
        let (batch, weight_sum) = collate_part(&samples, config.aggregation)?;
        let passes = gathered.passes.get_or_insert_default();
        passes.weight_sum += weight_sum;
        if let Some(batch) = batch {
            let batch = batch.at_version(self.backend.state().weight_version).by(config.algorithm.clone());
            let batch = Arc::new(batch);
            passes.seen.merge(self.backend.forward_backward(batch).wait()?);
        }
        gathered.done.append(part);
        Ok(())
    }

    /// Trains on the batch, or its rest, and updates the weights.
    pub(super) fn step(&self, gathered: Gathered, kl_coef: Option<f64>) -> Result<Trained<B::Weights>, StageError> {
        let started = Instant::now();
        let (step, worked, mut settings) = (gathered.step, gathered.worked, gathered.config.settings.clone());
        let version = self.backend.state().weight_version;
        let Learned { batch, kl_cost, critic, forward, mixed, optim } = match gathered.passes {
            Some(_) => self.learn_parts(gathered)?,
            None => self.learn_whole(gathered, kl_coef)?,
        };
        let passed = Instant::now();
        settings.extend(mixed.map(|loss| (Metric::MixedLoss.key().to_owned(), loss)));
        let last = self.sync_last && self.steps == Some(step);
        let publish = (last || step.is_multiple_of(self.sync_every)).then(|| self.backend.snapshot());
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

    /// The last part's pass, and the update.
    fn learn_parts(&self, mut gathered: Gathered) -> Result<Learned, StageError> {
        self.learn_rest(&mut gathered)?;
        let Gathered { step, config, done: mut batch, passes, .. } = gathered;
        let Passes { seen, weight_sum } = passes.unwrap_or_default();
        if seen.tokens + seen.saved_tokens == 0 {
            return Err(CollateError::NothingToTrain { samples: batch.len() }.into());
        }
        batch.sort();
        let forward = seen.scaled(1.0 / weight_sum);
        self.judge(step, &forward)?;
        // The final scale divides it again.
        let mixed = self.mix_in(&config, weight_sum)?;
        let optim = self.backend.update(Update { scale: 1.0 / weight_sum, schedule: config.schedule });
        Ok(Learned { batch, kl_cost: None, critic: None, forward, mixed, optim })
    }

    /// All passes and updates over a batch.
    fn learn_whole(&self, gathered: Gathered, kl_coef: Option<f64>) -> Result<Learned, StageError> {
        let Gathered { step, config, rest: mut batch, .. } = gathered;
        batch.sort();
        let mut kl_cost = self.compare(&config, &mut batch, kl_coef)?;
        config.pairs.iter().for_each(|pairing| pairing.mask_others(&mut batch));
        let prepared = match &config.pairs {
            Some(pairing) => collate(&pairing.laid_out(&batch.groups), Aggregation::SeqMeanTokenMean)?.in_pairs(),
            None => collate(&batch.samples().collect::<Vec<_>>(), config.aggregation)?,
        };
        let mut prepared = prepared.at_version(self.backend.state().weight_version).by(config.algorithm.clone());
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
        let Updated { forward, mixed, optim } = self.update((step, &config), &batch, prepared, valued.as_mut())?;
        Ok(Learned { batch, kl_cost, critic: valued.map(|valued| valued.step), forward, mixed, optim })
    }

    /// Adds the gradient of the mixed-in samples, times `weight_sum`, to the next update. Returns
    /// their loss.
    pub(super) fn mix_in(&self, config: &StepConfig, weight_sum: f64) -> Result<Option<f64>, StageError> {
        let Some(mixed) = &config.mixed else { return Ok(None) };
        let batch = if weight_sum == 1.0 { mixed.clone() } else { Arc::new(TrainBatch::clone(mixed).scaled(weight_sum)) };
        let seen = self.backend.forward_backward(batch).wait()?;
        Ok(Some(seen.loss / weight_sum))
    }

    /// Law N3. The measurement of a skipped batch is incomplete.
    pub(super) fn judge(&self, step: u64, forward: &ForwardBackward) -> Result<(), StageError> {
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
}
