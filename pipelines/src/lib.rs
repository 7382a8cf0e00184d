//! Prebuilt pipelines of rollflow and its command, on the library's public API only.
//!
//! Each pipeline is one file that reads as its algorithm: `sft`, `reward_model`, `grpo`, `sft_then_grpo`,
//! `grpo_offline`, `dpo`. [`assemble`] turns sections of a recipe into the library's parts, [`components`]
//! puts those of `grpo` together, [`mod@run`] keeps the files of a run, [`registry`] holds custom parts,
//! `command` is the `rollflow` command, `simulate` forecasts a recipe by a `profile`, `diagnose` looks for
//! what is unhealthy in a run, `monitor` writes what Prometheus and Grafana need, `page` serves runs as a
//! live page, and `top` shows one on a terminal. `tinker` runs `grpo` on a Tinker server.

pub mod assemble;
mod command;
pub mod components;
mod deploy;
mod diagnose;
mod dpo;
mod epochs;
pub mod grpo;
mod grpo_offline;
mod monitor;
mod page;
mod profile;
pub mod registry;
mod reward_model;
pub mod run;
mod section_file;
pub mod sft;
mod sft_then_grpo;
mod simulate;
mod survey;
mod tinker;
mod top;
mod validate;

use anyhow::Result;
use rollflow::flow::Report;
use rollflow::recipe::{Pipeline, Plan, TrainerBackend};

use crate::assemble::conversations;
pub use crate::command::{command, command_with};
pub use crate::registry::Registry;
use crate::run::folder::RunFolder;
use crate::run::resume::ResumePoint;
pub use crate::validate::complaints;

/// Runs or resumes the pipeline that the plan names, and writes its page and record.
pub fn run_plan(plan: &Plan, registry: &Registry, run: &RunFolder, from: Option<&ResumePoint>) -> Result<Report> {
    let mut plan = plan.clone();
    conversations::decide(&mut plan.chat, &plan.model.source);
    let settled = epochs::settle(&mut plan, registry);
    let plan = &plan;
    let result = settled.and_then(|_| match plan.pipeline {
        Pipeline::Grpo | Pipeline::Distill if plan.trainer.backend == TrainerBackend::Tinker => {
            tinker::run(plan, registry, run, from)
        }
        Pipeline::Grpo | Pipeline::SftThenGrpo | Pipeline::Distill => grpo::run(plan, registry, run, from),
        Pipeline::GrpoOffline => grpo_offline::run(plan, registry, run, from),
        Pipeline::Dpo => dpo::run(plan, registry, run, from),
        Pipeline::Sft => sft::run(plan, registry, run, from),
        Pipeline::RewardModel => reward_model::run(plan, registry, run, from),
    });
    run.end(result)
}

/// Compiles the Rust code of `docs/start/first_run.md` with the doc tests.
#[cfg(doctest)]
#[doc = include_str!("../../docs/start/first_run.md")]
pub struct Tutorial;
