//! A recipe's trainers: backends with their losses, rates and optimizers, and the stage around them.

use std::sync::Arc;

use anyhow::{Context, Result};
use rollflow::algo::{BradleyTerry, ValueLoss};
use rollflow::model::load_hf;
use rollflow::prelude::*;
use rollflow::recipe::{Checkpointing, Lora, Model, Optimization, Plan, RewardModel, Sft, Timeline};
use rollflow::stages::train::{Critic, StepConfig};
use rollflow::train::{AdamW, ScoreModel};

use crate::assemble::steps::Mixture;
use crate::assemble::{models, policy, steps};
use crate::registry::Registry;
use crate::run::folder::Checkpoints;

/// The trainer of `[train]`.
pub fn backend(plan: &Plan, registry: &Registry, policy: &Policy) -> Result<LocalBackend> {
    let train = &plan.train;
    let schedule = steps::schedule(&train.optimization, train.lr, steps::own_steps(plan), train.updates_a_step())?;
    let config = local_config(&plan.model, &plan.checkpoint, &train.optimization, schedule, registry.loss_of(train)?)?;
    Ok(policy.backend(LocalConfig {
        temperature: plan.generate.temperature,
        merge: plan.lora.as_ref().is_none_or(Lora::merges),
        publish_rounded: plan.publishes_rounded(),
        off_policy: train.off_policy(),
        ..config
    })?)
}

/// The trainer of `[critic]`, of a run that begins as `policy`.
pub fn critic(plan: &Plan, policy: &Policy) -> Result<Option<LocalBackend>> {
    let Some(critic) = &plan.critic else { return Ok(None) };
    let loss = ValueLoss { clip: critic.value_clip.is_finite().then_some(critic.value_clip) };
    let schedule = steps::schedule(&critic.optimization, critic.lr, plan.train.steps, plan.train.updates_a_step())?;
    let config = local_config(&plan.model, &plan.checkpoint, &critic.optimization, schedule, Arc::new(loss))?;
    let Some(path) = &critic.path else { return Ok(Some(policy.critic(config)?)) };
    let (model, weights) =
        load_hf(&models::model_folder(path)?).with_context(|| format!("loading the critic from {}", path.display()))?;
    models::same_vocabulary("the critic", path, model.vocab_size, policy.config().vocab_size)?;
    Ok(Some(match model.scores {
        true => LocalBackend::new(config, model, weights)?,
        false => LocalBackend::new(config, model.scoring(), weights.scoring(&model, None))?,
    }))
}

/// The trainer of `[sft]`.
pub fn supervised_backend(sft: &Sft, model: &Model, checkpoint: &Checkpointing, policy: &Policy) -> Result<LocalBackend> {
    let schedule = steps::schedule(&sft.optimization, sft.lr, sft.steps, 1)?;
    let config = local_config(model, checkpoint, &sft.optimization, schedule, Arc::new(CrossEntropy))?;
    // No generator reads what it publishes, and adapters are trained further.
    Ok(policy.backend(LocalConfig { merge: false, ..config })?)
}

/// The trainer of `[reward_model]`.
pub fn reward_model_backend(
    of: &RewardModel,
    model: &Model,
    checkpoint: &Checkpointing,
    scorer: &ScoreModel,
) -> Result<LocalBackend> {
    let schedule = steps::schedule(&of.optimization, of.lr, of.steps, 1)?;
    let loss = Arc::new(BradleyTerry { center: of.center });
    let config = local_config(model, checkpoint, &of.optimization, schedule, loss)?;
    // Evaluations judge by adapters as they are.
    Ok(scorer.backend(LocalConfig { merge: false, ..config })?)
}

fn local_config(
    model: &Model,
    checkpoint: &Checkpointing,
    of: &Optimization,
    schedule: Schedule,
    loss: Arc<dyn Loss>,
) -> Result<LocalConfig> {
    let ([beta1, beta2], replicas) = (of.betas, policy::computes(model, "replica_devices", &of.replica_devices)?);
    Ok(LocalConfig {
        adamw: AdamW { beta1, beta2, epsilon: of.eps, weight_decay: of.weight_decay, ..AdamW::default() },
        decay: of.decay,
        lr_scale: of.lr_scale,
        max_grad_norm: Some(of.max_grad_norm),
        micro_batch_tokens: of.micro_batch_tokens,
        non_finite: of.on_nonfinite,
        threads: Some(of.threads),
        compute: policy::compute(model)?,
        replica_devices: replicas.iter().map(|compute| compute.device).collect(),
        gradient_checkpointing: of.gradient_checkpointing,
        save_dtype: checkpoint.dtype,
        loss,
        ..LocalConfig::new(CrossEntropy, schedule)
    })
}

/// The training stage of `grpo`.
pub fn trainer<B: TrainingBackend>(
    plan: &Plan,
    registry: &Registry,
    backend: B,
    critic: Option<B>,
    mixture: Option<Mixture>,
    checkpoints: Option<Checkpoints>,
) -> Result<Trainer<B>> {
    let (timeline, always) = (Timeline::of(plan)?, steps::step_config(plan, registry)?);
    let [warn, halt] = plan.train.gap_limits(plan.model.precision());
    let registry = registry.clone();
    let config = move |step| -> Result<StepConfig> {
        let config = match timeline.is_constant() {
            true => always.clone(),
            false => steps::changed_at(&timeline, step, |plan| steps::step_config(plan, &registry))?,
        };
        Ok(StepConfig { mixed: mixture.as_ref().map_or(Ok(None), |mixture| mixture.at(step))?, ..config })
    };
    let mut trainer = Trainer::new(backend)
        .per_step(move |step| config(step).map_err(Into::into))
        .steps(plan.train.steps)
        .sync_every(plan.sync.every)
        .gap_limits(warn, halt)
        .on_stale(plan.flow.on_stale)
        .threads(plan.train.optimization.threads);
    if let Some((of, critic)) = plan.critic.as_ref().zip(critic) {
        let critic = Critic { backend: critic, gamma: of.gamma, lambda: of.lambda, whiten: of.whiten, warm_up: of.warmup_steps };
        trainer = trainer.critic(critic).threads(plan.train.optimization.threads.max(of.optimization.threads));
    }
    if let Some(reward) = plan.train.target_reward {
        trainer = trainer.target_reward(reward);
    }
    Ok(checkpointed(trainer, &plan.checkpoint, checkpoints))
}

/// Applies changes and ramps to a supervised trainer. `config` builds a plan's step configuration.
pub fn changing<B: TrainingBackend>(
    trainer: Trainer<B>,
    timeline: Timeline,
    config: impl Fn(&Plan) -> Result<StepConfig> + Send + 'static,
) -> Trainer<B> {
    if timeline.is_constant() {
        return trainer;
    }
    trainer.per_step(move |step| Ok(steps::changed_at(&timeline, step, &config)?))
}

/// With the checkpoints of `[checkpoint]`, if there is a folder for them. The end is always saved.
pub fn checkpointed<B: TrainingBackend>(trainer: Trainer<B>, of: &Checkpointing, folder: Option<Checkpoints>) -> Trainer<B> {
    let Some(Checkpoints { run, gate }) = folder else { return trainer };
    trainer.checkpoints(run, (of.every > 0).then_some(of.every)).keep(of.keep).gate(&gate)
}
