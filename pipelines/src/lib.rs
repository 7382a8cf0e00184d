//! The prebuilt pipelines of rollflow. They use the library's public API only: what they can't say, a user can't say either.
//!
//! Each pipeline is one file that reads from top to bottom as its algorithm: [`sft`], [`reward_model`], [`grpo`], [`sft_then_grpo`],
//! [`grpo_offline`], [`dpo`]. [`origin`] finds what a run begins from, [`parts`] turns a recipe's values into what stages take, [`data`] its data sets,
//! [`conversations`] its `[chat]` and the samples of `[sft]`, [`epochs`] its length in steps, [`trainers`] its trainers, [`losses`] its losses, [`lessons`] what each step is
//! learned by, [`preferences`] its pairs, [`rewards`] its rewards, [`environments`] its `[environment]`, [`registry`] holds parts of the user's own, [`run_folder`] keeps what
//! a run leaves behind, [`record`] and [`page`] what it was, [`replay`] tries again what a run gave up, [`evaluation`] asks weights what they know,
//! [`engines`] and [`servers`] are what generates elsewhere, and [`simulate`] tells what a recipe would do.

pub mod assemble;
mod command;
mod dpo;
mod epochs;
pub mod grpo;
mod grpo_offline;
pub mod registry;
mod replay;
mod reward_model;
pub mod run;
pub mod sft;
mod sft_then_grpo;
mod simulate;
mod survey;
mod validate;

use anyhow::Result;
use rollflow::flow::Report;
use rollflow::recipe::{Pipeline, Plan};

pub use crate::command::{command, command_with};
pub use crate::registry::Registry;
use crate::run::folder::RunFolder;
use crate::run::resume::ResumePoint;
pub use crate::validate::complaints;

/// Runs the pipeline that the plan names, from its beginning or from where it was interrupted, and writes its report.
pub fn run_plan(plan: &Plan, registry: &Registry, run: &RunFolder, from: Option<&ResumePoint>) -> Result<Report> {
    let mut plan = plan.clone();
    epochs::settle(&mut plan, registry)?;
    let plan = &plan;
    let result = match plan.pipeline {
        Pipeline::Grpo | Pipeline::SftThenGrpo => grpo::run(plan, registry, run, from),
        Pipeline::GrpoOffline => grpo_offline::run(plan, registry, run, from),
        Pipeline::Dpo => dpo::run(plan, registry, run, from),
        Pipeline::Sft => sft::run(plan, registry, run, from),
        Pipeline::RewardModel => reward_model::run(plan, run, from),
    };
    run.end(result)
}

/// Compiles the Rust code of `docs/start/first_run.md` with the doc tests.
#[cfg(doctest)]
#[doc = include_str!("../../docs/start/first_run.md")]
pub struct Tutorial;
