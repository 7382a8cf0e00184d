//! What each step of a recipe is learned by, `[[change]]` and `[[ramp]]` included.

use std::sync::Arc;

use anyhow::Result;
use rollflow::data::Version;
use rollflow::recipe::{Plan, Timeline, correction};
use rollflow::stages::train::{Lesson, Minibatches};
use rollflow::train::Algorithm;

use crate::registry::Registry;
use crate::{advantages, losses, trainers};

/// What every step of a plan that never changes is learned by.
pub fn lesson(plan: &Plan, registry: &Registry) -> Result<Lesson> {
    let train = &plan.train;
    let (loss, off_policy) = (registry.loss_of(train)?, losses::off_policy(train));
    Ok(Lesson {
        advantages: Some(advantages::estimator(train, registry)?),
        reward_kl: train.kl_reward.as_ref().map(|of| Arc::new(losses::reward_kl(of))),
        pairs: losses::pairing(plan),
        aggregation: trainers::aggregation(plan),
        algorithm: Some(Arc::new(Algorithm { loss, off_policy })),
        schedule: Some(trainers::schedule(&train.optimization, train.lr, trainers::own_steps(plan), train.updates_a_step())?),
        updates: train.updates,
        minibatches: Minibatches { count: train.minibatches, seed: plan.seed },
        score_first: train.centre() == correction::Proximal::Recompute,
        settings: Default::default(),
    })
}

/// The lesson of a step, which says so where it begins something new.
pub fn by_step(timeline: &Timeline, registry: &Registry, step: u64) -> Result<Lesson> {
    if let Some(set) = timeline.begins(step) {
        tracing::info!("From step {step} on: {}", set.join(", "));
    }
    Ok(Lesson { settings: timeline.settings(step), ..lesson(timeline.at(step)?.as_ref(), registry)? })
}

/// The temperature of prompts that enter under a version: that of the first step which trains it.
pub fn temperature(timeline: &Timeline, sync_every: u64, version: Version) -> f32 {
    let step = version.saturating_sub(1) * sync_every + 1;
    // A plan that can't be put together ends the run at the trainer, which says why.
    timeline.at(step).map_or(1.0, |plan| plan.generate.temperature as f32)
}
