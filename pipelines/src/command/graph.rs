//! `rollflow graph`: the graph of a recipe, of a small model and stand-ins for servers and processes.

use std::convert::Infallible;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Result;
use clap::{Args, ValueEnum};
use rollflow::algo::rewards::IntoReward;
use rollflow::data::Version;
use rollflow::engine::remote::sync::{Update, WeightSyncManager};
use rollflow::engine::remote::{FleetConfig, FleetHandle};
use rollflow::flow::{self, BoxedStage, weights};
use rollflow::judge::HttpRule;
use rollflow::model::FrozenWeights;
use rollflow::net::Endpoint;
use rollflow::prelude::*;
use rollflow::recipe::{
    Computes, DeviceName, FixedPolicy, PartRule, Pipeline, Plan, ReferencePolicy, RewardRule, Task, Timeline, TrainerBackend,
};
use rollflow::stages::reward::RemoteReward;
use rollflow::stages::sync::{RemoteSync, SleepServers};
use rollflow::train::ScoreModel;

use super::plans::{RecipeArgs, load_for};
use super::{End, out};
use crate::assemble::policy::{self, Reader};
use crate::assemble::references::Scorers;
use crate::assemble::rewards::Scoring;
use crate::components::{Components, generator_of};
use crate::grpo;
use crate::registry::Registry;
use crate::run::folder::Outputs;
use crate::{dpo, grpo_offline, reward_model, sft};

/// Draw a recipe's pipeline.
#[derive(Args)]
#[command(after_help = "Example:\n  rollflow graph mine.toml --format dot | dot -Tsvg > mine.svg")]
pub struct Graph {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// The drawing's language.
    #[arg(long, value_enum, default_value = "mermaid")]
    format: Format,
}

#[derive(Clone, Copy, ValueEnum)]
enum Format {
    Mermaid,
    Dot,
    Json,
}

impl Graph {
    pub fn run(self, registry: &Registry) -> Result<()> {
        let (plan, _) = load_for(Computes::Elsewhere, &self.recipe, registry).map_err(End::Recipe)?;
        let graph = graph_of(&plan, registry)?;
        out::line(&match self.format {
            Format::Mermaid => graph.to_mermaid(),
            Format::Dot => graph.to_dot(),
            Format::Json => graph.to_json(),
        })
    }
}

/// Declares the graph of a plan's pipeline. No weights are read, no device is used, no server is asked
/// and no process starts.
fn graph_of(plan: &Plan, registry: &Registry) -> Result<flow::Graph> {
    let (outputs, small) = (Outputs::in_memory(), outlined(plan));
    let policy = policy::outline(&small)?;
    let flow = match plan.pipeline {
        Pipeline::Grpo | Pipeline::SftThenGrpo | Pipeline::Distill => {
            let local = Components::local(&small, registry, &policy, &policy)?;
            let components = match plan.engine.is_remote() || plan.trainer.backend == TrainerBackend::Tinker {
                true => on_servers(&small, &policy, local)?,
                false => local,
            };
            let (reward, timeline) = (reward(&plan.reward.rule)?, Timeline::of(plan)?);
            grpo::declare(plan, Components { reward, timeline, ..components }, outputs, None)?
        }
        Pipeline::GrpoOffline => grpo_offline::declare(&small, registry, &policy, outputs, None)?,
        Pipeline::Dpo => dpo::declare(&small, registry, &policy, outputs, None)?,
        Pipeline::Sft => sft::declare(&small, registry, &policy, outputs, None)?,
        Pipeline::RewardModel => {
            let model = ScoreModel::from_policy(&policy, Some(plan.seed));
            reward_model::declare(&small, registry, &model, outputs, None)?.0
        }
    };
    Ok(flow.graph())
}

/// The plan without devices, other models, rewards, environments and, where they are prompts, data:
/// the stages that it has are the same.
fn outlined(plan: &Plan) -> Plan {
    let mut plan = plan.clone();
    plan.model.device = DeviceName::Cpu;
    plan.generate.devices.clear();
    (plan.lora, plan.mix, plan.environment, plan.curriculum) = (None, None, None, None);
    (plan.change, plan.ramp, plan.filter) = (Vec::new(), Vec::new(), Vec::new());
    plan.reward.rule = RewardRule::None;
    let sections = [
        Some(&mut plan.train.optimization),
        plan.sft.as_mut().map(|of| &mut of.optimization),
        plan.reward_model.as_mut().map(|of| &mut of.optimization),
        plan.critic.as_mut().map(|of| &mut of.optimization),
    ];
    for of in sections.into_iter().flatten() {
        of.replica_devices.clear();
        // The model that is drawn has neither experts nor all tensors, and computes in f32.
        (of.router_aux_loss, of.lr_scale, of.masters) = (0.0, Default::default(), Default::default());
    }
    if let Some(critic) = &mut plan.critic {
        critic.path = None;
    }
    let reference = plan.reference.as_mut().map(|of| &mut of.policy);
    let teacher = plan.teacher.as_mut().map(|of| &mut of.policy);
    reference.into_iter().chain(teacher).for_each(without_others);
    if plan.pipeline.reinforces() {
        plan.task = Task::default();
    }
    if let Some(eval) = plan.eval.as_mut().filter(|_| !matches!(plan.pipeline, Pipeline::Dpo | Pipeline::RewardModel)) {
        eval.task = Some(Task::default());
    }
    plan
}

/// Takes the policy itself where a folder has another, and servers that need no token.
fn without_others(of: &mut ReferencePolicy) {
    match of {
        ReferencePolicy::Frozen { path } => *path = None,
        ReferencePolicy::Server(of) => of.token_env = None,
        ReferencePolicy::Tinker(of) => of.key_env = None,
        ReferencePolicy::BySource { part } => {
            for part in part {
                match &mut part.policy {
                    FixedPolicy::Frozen { path } => *path = None,
                    FixedPolicy::Server(of) => of.token_env = None,
                    FixedPolicy::Tinker(of) => of.key_env = None,
                }
            }
        }
        _ => {}
    }
}

/// The components of the same stages on servers, of which there are none.
fn on_servers(plan: &Plan, policy: &Policy, local: Components<LocalBackend>) -> Result<Components<LocalBackend>> {
    let ((publish, synced), (also, published)) = (weights(), weights());
    let (fleet, reader) = (FleetHandle::new(Vec::new()), Reader::from(policy));
    let generator = Generator::remote(&fleet, FleetConfig::default(), &reader.tokenizer).weights(synced);
    let (config, max_lag) = (plan.engine.sync.clone(), plan.flow.max_staleness);
    let sleeps = config.sleep;
    let manager = WeightSyncManager { fleet, config, max_lag };
    let export = |version: Version, _: &Arc<FrozenWeights>| Ok::<_, Infallible>(Update::unprobed(version, PathBuf::new()));
    Ok(Components {
        generator: BoxedStage::new(generator_of(plan, &local.timeline, &reader, generator)?),
        scorers: Scorers::of(plan, policy, Some(&published))?,
        sleep: sleeps.then(|| BoxedStage::new(SleepServers::new(manager.clone()))),
        sync: BoxedStage::new(RemoteSync::new(manager, export, publish).also(also)),
        ..local
    })
}

/// A reward with the workers and threads of this rule. Python functions count as not async.
fn reward(rule: &RewardRule) -> Result<Scoring> {
    let rules: Vec<PartRule> = match rule.alone() {
        Ok(None) => return Ok(Scoring::None),
        Ok(alone) => alone.into_iter().collect(),
        Err(of) => of.part.iter().map(|part| part.rule.clone()).collect(),
    };
    let concurrency = |rule: &PartRule| match rule {
        PartRule::Http(of) => Some(of.concurrency),
        PartRule::Judge(of) => Some(of.http.concurrency),
        PartRule::Python(of) => Some(of.processes.processes),
        _ => None,
    };
    Ok(match rules.iter().filter_map(concurrency).min() {
        Some(concurrency) => {
            let service = HttpRule::default().service(Endpoint::new("http://127.0.0.1"))?;
            Scoring::Remote(RemoteReward::new(service).concurrency(concurrency))
        }
        None => {
            let (models, threads) = (Vec::new(), rule.threads());
            Scoring::Local { reward: Box::new(|_: &Sample| 0.0.into_reward()), models, threads }
        }
    })
}
