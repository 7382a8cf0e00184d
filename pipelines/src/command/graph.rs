//! `rollflow graph`.

use anyhow::Result;
use clap::{Args, ValueEnum};
use rollflow::flow;
use rollflow::recipe::{Pipeline, Plan, TrainerBackend};

use super::out;
use super::plans::{RecipeArgs, load};
use crate::assemble::policy;
use crate::assemble::sections::Start;
use crate::components::Components;
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
        let graph = graph_of(&load(&self.recipe, registry)?, registry)?;
        out::line(&match self.format {
            Format::Mermaid => graph.to_mermaid(),
            Format::Dot => graph.to_dot(),
            Format::Json => graph.to_json(),
        })
    }
}

/// Declares the graph of a plan's pipeline.
fn graph_of(plan: &Plan, registry: &Registry) -> Result<flow::Graph> {
    let outputs = Outputs::in_memory();
    let flow = match plan.pipeline {
        Pipeline::Grpo | Pipeline::SftThenGrpo | Pipeline::Distill => {
            let policy = match plan.trainer.backend {
                TrainerBackend::Local => policy::policy(Start::of(plan))?,
                TrainerBackend::Tinker => policy::outline(Start::of(plan))?,
            };
            grpo::declare(plan, Components::local(plan, registry, &policy, &policy)?, outputs, None)?
        }
        Pipeline::GrpoOffline => grpo_offline::declare(plan, registry, &policy::policy(Start::of(plan))?, outputs, None)?,
        Pipeline::Dpo => dpo::declare(plan, registry, &policy::policy(Start::of(plan))?, outputs, None)?,
        Pipeline::Sft => sft::declare(plan, registry, &policy::policy(Start::of(plan))?, outputs, None)?,
        Pipeline::RewardModel => reward_model::declare(plan, registry, &policy::score_model(Start::of(plan))?, outputs, None)?.0,
    };
    Ok(flow.graph())
}
