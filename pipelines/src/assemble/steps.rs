//! Configuration of each training step, with `[[change]]` and `[[ramp]]`, and the data of `[mix]`.

use std::sync::Arc;

use anyhow::{Result, anyhow};
use parking_lot::Mutex;
use rollflow::algo::Proximal;
use rollflow::prelude::*;
use rollflow::recipe::{Mix, Optimization, Pipeline, Plan, RewardRule, Sft, Timeline};
use rollflow::stages::train::StepConfig;
use rollflow::train::{Algorithm, AlgorithmKey, TrainBatch, collate};

use crate::assemble::supervised::Imitation;
use crate::registry::Registry;

/// Configuration of the steps of a plan that never changes, or of one of its phases.
pub fn step_config(plan: &Plan, registry: &Registry) -> Result<StepConfig> {
    let Plan { train, critic, .. } = plan;
    let distill = plan.teacher.as_ref().map(|teacher| &teacher.distill);
    // Pairs of a data set have no rewards to compare.
    let rewarded = plan.pipeline != Pipeline::Dpo && plan.reward.rule != RewardRule::None;
    let (loss, off_policy, updates) = (registry.loss_of(train, distill)?, train.off_policy(), train.updates_a_step());
    Ok(StepConfig {
        advantages: rewarded.then(|| registry.estimator_of(&train.advantage)).transpose()?,
        reward_kl: train.reward_kl().map(Arc::new),
        distill: distill.cloned(),
        pairs: plan.pairing(),
        aggregation: plan.aggregation(),
        algorithm: Some(Arc::new(Algorithm { loss, off_policy, key: None })),
        schedule: Some(schedule(&train.optimization, train.lr, plan.policy_steps(), updates)?),
        critic_schedule: critic.as_ref().map(|of| schedule(&of.optimization, of.lr, train.steps, updates)).transpose()?,
        ppo_epochs: train.ppo_epochs,
        minibatches: train.minibatches,
        minibatch_seed: plan.seed,
        score_first: train.centre() == Proximal::Recompute,
        mixed: None,
        scored: false,
        settings: Default::default(),
    })
}

/// Supervised samples that are mixed into steps.
pub struct Mixture {
    samples: Mutex<Supervised>,
    algorithm: Arc<Algorithm>,
    weight: f64,
    every: u64,
}

impl Mixture {
    /// Opens the samples of `[mix]`, which are those of `[sft]`.
    pub fn of(mix: &Mix, imitation: Imitation, policy: &Policy) -> Result<Self> {
        let endless = Sft { batch: mix.batch, batch_tokens: None, steps: u64::MAX, ..imitation.sft.clone() };
        let (samples, _) = Imitation { sft: &endless, ..imitation }.batches(&policy.into())?;
        Ok(Mixture { samples: Mutex::new(samples), algorithm: mixed_algorithm(), weight: mix.weight, every: mix.every })
    }

    /// Batch of a step, which counts from 1.
    pub fn at(&self, step: u64) -> Result<Option<Arc<TrainBatch>>> {
        if !step.is_multiple_of(self.every) {
            return Ok(None);
        }
        let mut samples = self.samples.lock();
        let batch = samples.batch(step / self.every - 1).map_err(|error| anyhow!("{error}"))?;
        let samples: Vec<_> = batch.samples().collect();
        let mut batch = collate(&samples, Aggregation::TokenMean)?;
        // Not the temperature at which rollouts are sampled, which is the trainer's.
        batch.sequences.iter_mut().for_each(|sequence| sequence.temperature = sequence.temperature.or(Some(1.0)));
        let batch = TrainBatch { algorithm: Some(self.algorithm.clone()), ..batch };
        Ok(Some(Arc::new(batch.scaled(self.weight))))
    }
}

/// Configuration of a step, from the `config` of the `plan` that the timeline has for it. Logs where a step
/// changes it.
pub fn changed_at(
    timeline: &Timeline,
    plan: &Plan,
    step: u64,
    config: impl Fn(&Plan) -> Result<StepConfig>,
) -> Result<StepConfig> {
    let begins = timeline.begins(step);
    if !begins.is_empty() {
        tracing::info!("From step {step} on: {}", begins.join(", "));
    }
    Ok(StepConfig { settings: timeline.settings(step), ..keyed(config(plan)?, step) })
}

/// Lets other ranks find a step's algorithm.
pub fn keyed(config: StepConfig, step: u64) -> StepConfig {
    let keyed = |of: Arc<Algorithm>| Arc::new(Arc::unwrap_or_clone(of).keyed(AlgorithmKey::Step(step)));
    StepConfig { algorithm: config.algorithm.map(keyed), ..config }
}

/// The algorithm of mixed samples.
pub fn mixed_algorithm() -> Arc<Algorithm> {
    Arc::new(Algorithm::new(CrossEntropy).keyed(AlgorithmKey::Mixed))
}

/// Learning rate over optimizer updates, of which every step makes `updates`.
pub fn schedule(of: &Optimization, lr: f64, steps: u64, updates: u64) -> Result<Schedule> {
    let (warmup_steps, total_steps) = (of.schedule.warmup.saturating_mul(updates), steps.saturating_mul(updates));
    let schedule = Schedule { lr, decay: of.schedule.kind, warmup_steps, total_steps, floor: of.schedule.min_lr_ratio };
    schedule.validate()?;
    Ok(schedule)
}
