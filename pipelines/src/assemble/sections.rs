//! Sections of a plan by the part of a run that is built from them. The other files of this folder take
//! these groups or single sections, never a whole plan.

use std::path::Path;

use anyhow::{Context, Result};
use rollflow::engine::settings::{Engine, Launch};
use rollflow::model::Dtype;
use rollflow::prelude::Aggregation;
use rollflow::ranks::Place;
use rollflow::recipe::{
    Chat, Checkpointing, Critic, DeviceName, Environment, Eval, FlowLimits, Generate, Lora, MemoryPlan, Model, Net, Pipeline,
    Plan, Reward, RewardRule, Task, Train,
};
use rollflow::stages::pairs::Pairing;
use rollflow::stages::train::Distill;
use rollflow::train::RouterReplay;
use rollflow::util::cores::processes_here;
use rollflow::weights::StoreRule;

/// The model that a run begins with.
#[derive(Clone, Copy)]
pub struct Start<'a> {
    /// Its source, and how it computes.
    pub model: &'a Model,
    /// Its chat template.
    pub chat: &'a Chat,
    /// Adapters over it.
    pub lora: Option<&'a Lora>,
    /// Seed of weights that are drawn.
    pub seed: u64,
    /// True if the source is a part of the same run, so that newer checkpoints there are not the run's own.
    pub is_own: bool,
}

impl<'a> Start<'a> {
    /// The start of a plan's run.
    pub fn of(plan: &'a Plan) -> Self {
        let Plan { model, chat, seed, .. } = plan;
        Start { model, chat, lora: plan.lora.as_ref(), seed: *seed, is_own: plan.pipeline == Pipeline::SftThenGrpo }
    }
}

/// What is asked, how it is answered, and what an answer earns.
#[derive(Clone, Copy)]
pub struct Rollouts<'a> {
    /// Prompts.
    pub task: &'a Task,
    /// Format of prompts.
    pub chat: &'a Chat,
    /// How models compute.
    pub model: &'a Model,
    /// Sampling.
    pub generate: &'a Generate,
    /// Environment of multi-turn rollouts.
    pub environment: Option<&'a Environment>,
    /// Reward of a completion.
    pub reward: &'a Reward,
    /// Connections to servers of rewards and environments.
    pub net: &'a Net,
    /// Seed of every draw.
    pub seed: u64,
}

impl<'a> Rollouts<'a> {
    /// The rollouts of a plan.
    pub fn of(plan: &'a Plan) -> Self {
        let Plan { task, chat, model, generate, reward, net, seed, .. } = plan;
        Rollouts { task, chat, model, generate, environment: plan.environment.as_ref(), reward, net, seed: *seed }
    }
}

/// An evaluation.
#[derive(Clone, Copy)]
pub struct Evaluation<'a> {
    /// Prompts, samples and steps of the evaluation.
    pub eval: &'a Eval,
    /// The run's rollouts, which it follows unless it says otherwise.
    pub rollouts: Rollouts<'a>,
    /// Last step of the run, which is evaluated too.
    pub last: u64,
    /// True if training waits for the evaluation.
    pub in_order: bool,
}

impl<'a> Evaluation<'a> {
    /// The evaluation during a plan's run; none if it is left to `rollflow eval`.
    pub fn during(plan: &'a Plan) -> Option<Self> {
        let eval = plan.eval.as_ref().filter(|eval| eval.every > 0)?;
        Some(Evaluation::of(plan, eval))
    }

    /// The evaluation of a plan's policy by `eval`.
    pub fn of(plan: &'a Plan, eval: &'a Eval) -> Self {
        Evaluation { eval, rollouts: Rollouts::of(plan), last: plan.steps(), in_order: plan.flow.max_staleness == 0 }
    }
}

/// Pace at which prompts are admitted, in groups.
#[derive(Clone, Copy)]
pub struct Pacing {
    /// Groups that are trained from one publish to the next.
    pub groups_per_version: u64,
    /// Groups in flight.
    pub window: u64,
    /// Groups of the whole run.
    pub all_groups: u64,
    /// Bound of staleness, in versions.
    pub max_staleness: u64,
}

impl Pacing {
    /// The pace of a plan.
    pub fn of(plan: &Plan) -> Self {
        Pacing {
            groups_per_version: plan.groups_per_publish() as u64,
            window: plan.admission_window() as u64,
            all_groups: plan.train.steps.saturating_mul(plan.batch.groups as u64),
            max_staleness: plan.flow.max_staleness,
        }
    }
}

/// Configuration of a training step.
pub struct Step<'a> {
    /// Loss, advantages and optimizer.
    pub train: &'a Train,
    /// Settings of distillation, if there is a teacher.
    pub distill: Option<&'a Distill>,
    /// True if samples have rewards to compare.
    pub rewarded: bool,
    /// The critic.
    pub critic: Option<&'a Critic>,
    /// Pairs that the loss compares.
    pub pairs: Option<Pairing>,
    /// Weights of tokens in the loss.
    pub aggregation: Aggregation,
    /// Steps that train the policy, without the critic's warm-up.
    pub own_steps: u64,
    /// Seed of the minibatches.
    pub seed: u64,
}

impl<'a> Step<'a> {
    /// The steps of a plan that never changes, or of one of its phases.
    pub fn of(plan: &'a Plan) -> Self {
        let warm_up = plan.critic.as_ref().map_or(0, |critic| critic.warmup_steps);
        Step {
            train: &plan.train,
            distill: plan.teacher.as_ref().map(|teacher| &teacher.distill),
            // Pairs of a data set have none.
            rewarded: plan.pipeline != Pipeline::Dpo && plan.reward.rule != RewardRule::None,
            critic: plan.critic.as_ref(),
            pairs: plan.pairing(),
            aggregation: plan.aggregation(),
            own_steps: plan.train.steps.saturating_sub(warm_up),
            seed: plan.seed,
        }
    }
}

/// Training of the policy and its critic.
#[derive(Clone, Copy)]
pub struct Training<'a> {
    /// Loss and optimizer of the policy.
    pub train: &'a Train,
    /// Settings of distillation, if there is a teacher.
    pub distill: Option<&'a Distill>,
    /// The critic.
    pub critic: Option<&'a Critic>,
    /// How models compute.
    pub model: &'a Model,
    /// Checkpoints.
    pub checkpoint: &'a Checkpointing,
    /// Adapters that are trained.
    pub lora: Option<&'a Lora>,
    /// What is done with samples that are too old.
    pub flow: &'a FlowLimits,
    /// Temperature at which completions are scored that don't have their own.
    pub temperature: f64,
    /// Steps between two publishes.
    pub sync_every: u64,
    /// True if weights are published in the compute format.
    pub publishes_rounded: bool,
    /// True if servers on the same GPU sleep while a step is trained.
    pub servers_sleep: bool,
    /// Steps that train the policy, without the critic's warm-up.
    pub own_steps: u64,
}

impl<'a> Training<'a> {
    /// The training of a plan.
    pub fn of(plan: &'a Plan) -> Self {
        let Plan { train, model, checkpoint, flow, .. } = plan;
        Training {
            train,
            distill: plan.teacher.as_ref().map(|teacher| &teacher.distill),
            critic: plan.critic.as_ref(),
            model,
            checkpoint,
            lora: plan.lora.as_ref(),
            flow,
            temperature: plan.generate.scoring_temperature(),
            sync_every: plan.sync.every,
            publishes_rounded: plan.publishes_rounded(),
            servers_sleep: plan.engine.sync.sleep,
            own_steps: Step::of(plan).own_steps,
        }
    }
}

/// Servers that generate for a run.
pub struct Serving<'a> {
    /// Servers, and how they get weights.
    pub engine: &'a Engine,
    /// Connections to them.
    pub net: &'a Net,
    /// Store that their weights go through.
    pub store: &'a StoreRule,
    /// Prompts, whose beginnings probe a sync.
    pub rollouts: Rollouts<'a>,
    /// Adapters that servers get in place of weights.
    pub adapters: Option<&'a Lora>,
    /// Format of tensors that servers take out of the trainer's memory, if they do.
    pub transfer_format: Option<Dtype>,
    /// Bound of staleness.
    pub max_staleness: u64,
    /// Whether the trainer needs the experts of tokens.
    pub routes: bool,
    /// Whether the trainer needs log-probabilities of another distribution than the model's.
    pub reshapes: bool,
    /// Memory of this process and of other ranks on the GPUs of this host, if servers that it starts share them.
    pub own: Vec<MemoryPlan>,
}

impl<'a> Serving<'a> {
    /// The servers of a plan.
    pub fn of(plan: &'a Plan) -> Result<Self> {
        // A run without a GPU leaves all of them to the servers, and its model need not be here.
        let shares = plan.devices().iter().any(|(_, device)| matches!(device, DeviceName::Cuda(_)));
        let mut own = if shares && plan.engine.launch != Launch::None { MemoryPlan::of(plan)? } else { Vec::new() };
        let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok();
        if let (DeviceName::Cuda(first), Some(place)) = (plan.model.device, Place::of_environment()?) {
            own = with_ranks(own, place.other_gpus(first, visible.as_deref(), processes_here()));
        }
        Ok(Serving {
            engine: &plan.engine,
            net: &plan.net,
            store: &plan.store,
            rollouts: Rollouts::of(plan),
            adapters: plan.lora.as_ref().filter(|_| plan.syncs_adapters()),
            transfer_format: plan.transfer_format(),
            max_staleness: plan.flow.max_staleness,
            routes: plan.pipeline.reinforces() && plan.train.router_replay != RouterReplay::Off,
            reshapes: plan.pipeline.reinforces() && !plan.generate.sampling().keeps_log_probs(),
            own,
        })
    }

    /// Folder of what servers load: `engine.folder`, or else `default`, as an absolute path.
    pub fn folder(&self, default: &Path) -> Result<std::path::PathBuf> {
        std::path::absolute(self.engine.folder.as_deref().unwrap_or(default)).context("the servers' folder (engine.folder)")
    }
}

/// With the plans of other ranks on these GPUs of this host, which take what the first does on its own.
fn with_ranks(mut own: Vec<MemoryPlan>, gpus: Vec<usize>) -> Vec<MemoryPlan> {
    let of = |gpu| Some(MemoryPlan { device: DeviceName::Cuda(gpu).word(), ..own.first()?.clone() });
    let others: Vec<MemoryPlan> = gpus.into_iter().filter_map(of).collect();
    own.extend(others);
    own
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_leave_the_gpus_of_other_ranks_to_them() {
        let plan = |gpu| MemoryPlan { device: DeviceName::Cuda(gpu).word(), parts: Vec::new(), has: None };
        let own = with_ranks(vec![plan(0)], vec![1, 2, 3]);
        let gpus: Vec<usize> = own.iter().filter_map(MemoryPlan::gpu).collect();
        let engine = Engine { launch: Launch::Vllm, replicas: 4, ..Engine::default() };
        assert_eq!((gpus.clone(), engine.gpus(8, &gpus)), (vec![0, 1, 2, 3], vec![4, 5, 6, 7]));
        assert!(with_ranks(Vec::new(), vec![1]).is_empty(), "a run without servers plans nothing");
    }

    #[test]
    fn the_groups_of_a_run_of_very_many_steps_are_counted_without_overflow() {
        let mut plan = Plan::default();
        plan.train.steps = u64::MAX;
        assert_eq!(Pacing::of(&plan).all_groups, u64::MAX);
    }
}
