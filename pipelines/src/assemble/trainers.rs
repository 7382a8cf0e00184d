//! A recipe's trainers: backends with their losses, rates and optimizers, and the stage around them.

use std::sync::Arc;

use anyhow::{Context, Result};
use rollflow::algo::{BradleyTerry, ValueLoss};
use rollflow::model::load_hf;
use rollflow::observe::logs::Every;
use rollflow::prelude::*;
use rollflow::recipe::{self, Checkpointing, Lora, Model, Optimization, Plan, RewardModel, Sft, Timeline};
use rollflow::stages::train::{Critic, StepConfig};
use rollflow::train::{AdamW, TrainerRanks};

use crate::assemble::steps::Mixture;
use crate::assemble::{models, policy, steps};
use crate::registry::Registry;
use crate::run::folder::Checkpoints;

/// Name of the trainer of `[train]` among ranks.
pub const POLICY: &str = "policy";
/// Of `[critic]`.
pub const CRITIC: &str = "critic";
/// Of `[sft]`.
pub const SUPERVISED: &str = "supervised";
/// Of `[reward_model]`.
pub const REWARD_MODEL: &str = "reward model";

/// The trainer of `[train]`.
pub fn backend(plan: &Plan, registry: &Registry, policy: &Policy) -> Result<LocalBackend> {
    Ok(policy.backend(shared(policy_config(plan, registry)?, registry, POLICY))?)
}

/// Settings of the trainer of `[train]`.
pub fn policy_config(plan: &Plan, registry: &Registry) -> Result<LocalConfig> {
    let (train, distill) = (&plan.train, plan.teacher.as_ref().map(|teacher| &teacher.distill));
    let schedule = steps::schedule(&train.optimization, train.lr, plan.policy_steps(), train.updates_a_step())?;
    let loss = registry.loss_of(train, distill)?;
    let config = local_config(&plan.model, &plan.checkpoint, &train.optimization, schedule, loss)?;
    Ok(LocalConfig {
        temperature: plan.generate.scoring_temperature(),
        merge: plan.lora.as_ref().is_none_or(Lora::merges),
        publish_rounded: plan.publishes_rounded(),
        gives_back_memory: plan.engine.sync.sleep,
        off_policy: train.off_policy(),
        router_replay: train.router_replay,
        ..config
    })
}

/// The trainer of `[critic]`, of a run that begins as `policy`.
pub fn critic(plan: &Plan, registry: &Registry, policy: &Policy) -> Result<Option<LocalBackend>> {
    let Some(critic) = &plan.critic else { return Ok(None) };
    let config = shared(critic_config(plan, critic)?, registry, CRITIC);
    let Some(path) = &critic.path else { return Ok(Some(policy.critic(config)?)) };
    let (model, weights) =
        load_hf(&models::model_folder(path)?).with_context(|| format!("loading the critic from {}", path.display()))?;
    // LongRoPE turns by the same factors as in the policy.
    let long = policy.config().rotates_long() && model.contexts().is_some();
    let model = if long { model.within(Some(policy.config().max_positions))? } else { model };
    models::same_vocabulary("the critic", path, model.vocab_size, policy.config().vocab_size)?;
    Ok(Some(match model.scores {
        true => LocalBackend::new(config, model, weights)?,
        false => LocalBackend::new(config, model.scoring(), weights.scoring(&model, None))?,
    }))
}

/// Settings of the trainer of `[critic]`.
pub fn critic_config(plan: &Plan, critic: &recipe::Critic) -> Result<LocalConfig> {
    let loss = ValueLoss { clip: critic.value_clip.is_finite().then_some(critic.value_clip) };
    let schedule = steps::schedule(&critic.optimization, critic.lr, plan.train.steps, plan.train.updates_a_step())?;
    let config = local_config(&plan.model, &plan.checkpoint, &critic.optimization, schedule, Arc::new(loss))?;
    Ok(LocalConfig { gives_back_memory: plan.engine.sync.sleep, ..config })
}

/// Settings of the trainer of `[sft]`.
pub fn supervised_config(sft: &Sft, model: &Model, checkpoint: &Checkpointing) -> Result<LocalConfig> {
    let schedule = steps::schedule(&sft.optimization, sft.lr, sft.steps, 1)?;
    let config = local_config(model, checkpoint, &sft.optimization, schedule, Arc::new(CrossEntropy))?;
    // No generator reads what it publishes, and adapters are trained further.
    Ok(LocalConfig { merge: false, ..config })
}

/// Settings of the trainer of `[reward_model]`.
pub fn reward_model_config(of: &RewardModel, model: &Model, checkpoint: &Checkpointing) -> Result<LocalConfig> {
    let schedule = steps::schedule(&of.optimization, of.lr, of.steps, 1)?;
    let loss = Arc::new(BradleyTerry { center: of.center });
    let config = local_config(model, checkpoint, &of.optimization, schedule, loss)?;
    // Evaluations judge by adapters as they are.
    Ok(LocalConfig { merge: false, ..config })
}

/// Shares the work of the trainer `name` with the other ranks, if there are any.
pub fn shared(config: LocalConfig, registry: &Registry, name: &'static str) -> LocalConfig {
    let ranks = registry.ranks().map(|member| TrainerRanks { member: member.clone(), name, shard: member.settings().shard });
    LocalConfig { ranks, ..config }
}

/// The settings of AdamW.
pub fn adamw(of: &Optimization) -> AdamW {
    let [beta1, beta2] = of.betas;
    AdamW { beta1, beta2, epsilon: of.eps, weight_decay: of.weight_decay, ..AdamW::default() }
}

fn local_config(
    model: &Model,
    checkpoint: &Checkpointing,
    of: &Optimization,
    schedule: Schedule,
    loss: Arc<dyn Loss>,
) -> Result<LocalConfig> {
    let replicas = policy::computes(model, "replica_devices", &of.replica_devices)?;
    Ok(LocalConfig {
        adamw: adamw(of),
        decay: of.decay,
        lr_scale: of.lr_scale,
        max_grad_norm: Some(of.max_grad_norm),
        micro_batch_tokens: of.micro_batch_tokens,
        non_finite: of.on_nonfinite,
        threads: of.threads,
        compute: policy::compute(model)?,
        replica_devices: replicas.iter().map(|compute| compute.device).collect(),
        router_loss: of.router_aux_loss,
        gradient_checkpointing: of.gradient_checkpointing,
        masters: of.masters,
        moments: of.moments,
        activations_on_host: of.activations_on_host,
        save_dtype: checkpoint.dtype,
        loss,
        ..LocalConfig::new(CrossEntropy, schedule)
    })
}

/// The training stage of `grpo`, whose steps follow the `timeline`.
pub fn trainer<B: TrainingBackend>(
    plan: &Plan,
    timeline: Timeline,
    registry: &Registry,
    backend: B,
    critic: Option<B>,
    mixture: Option<Mixture>,
    checkpoints: Option<Checkpoints>,
) -> Result<Trainer<B>> {
    let always = steps::keyed(steps::step_config(&*timeline.at(1)?, registry)?, 1);
    let train = &plan.train;
    let [warn, halt] = train.gap_limits(plan.model.precision());
    if let Some(of) = &checkpoints {
        of.changes.follow(&timeline, registry);
    }
    let registry = registry.clone();
    let config = move |step| -> Result<StepConfig> {
        // First: a change that is ordered from now on begins at a later step.
        let plan = timeline.at(step)?;
        let config = match timeline.is_constant() {
            true => always.clone(),
            false => steps::changed_at(&timeline, &plan, step, |plan| steps::step_config(plan, &registry))?,
        };
        let mixed = mixture.as_ref().map_or(Ok(None), |mixture| mixture.at(step))?;
        Ok(StepConfig { mixed, scored: Every::from(plan.observe.rollouts_every).records(step), ..config })
    };
    let mut trainer = Trainer::new(backend)
        .per_step(move |step| config(step).map_err(Into::into))
        .steps(train.steps)
        .sync_every(plan.sync.every)
        .gap_limits(warn, halt)
        .on_stale(plan.flow.on_stale)
        .mask_truncated(train.mask_truncated)
        .threads(train.optimization.threads.unwrap_or(0));
    if let Some((section, backend)) = plan.critic.as_ref().zip(critic) {
        let recipe::Critic { gamma, lambda, whiten, warmup_steps, .. } = *section;
        let critic = Critic { backend, gamma, lambda, whiten, warm_up: warmup_steps };
        trainer = trainer.critic(critic).threads(train.optimization.threads.max(section.optimization.threads).unwrap_or(0));
    }
    if let Some(reward) = train.target_reward {
        trainer = trainer.target_reward(reward);
    }
    Ok(checkpointed(trainer, &plan.checkpoint, checkpoints))
}

/// Applies changes and ramps to a supervised trainer, and checkpoints. `config` builds a plan's step
/// configuration.
pub fn supervised<B: TrainingBackend>(
    trainer: Trainer<B>,
    plan: &Plan,
    registry: &Registry,
    config: impl Fn(&Plan) -> Result<StepConfig> + Send + 'static,
    checkpoints: Option<Checkpoints>,
) -> Result<Trainer<B>> {
    let timeline = Timeline::of(plan)?;
    if let Some(of) = &checkpoints {
        of.changes.follow(&timeline, registry);
    }
    let trainer = trainer.per_step(move |step| Ok(steps::changed_at(&timeline, &*timeline.at(step)?, step, &config)?));
    Ok(checkpointed(trainer, &plan.checkpoint, checkpoints))
}

/// With the checkpoints of `[checkpoint]`, if there is a folder for them. The end is always saved.
fn checkpointed<B: TrainingBackend>(trainer: Trainer<B>, of: &Checkpointing, folder: Option<Checkpoints>) -> Trainer<B> {
    let Some(Checkpoints { run, gate, orders, .. }) = folder else { return trainer };
    trainer.checkpoints(run, (of.every > 0).then_some(of.every)).keep(of.keep).gate(&gate).ordered_by(&orders)
}
