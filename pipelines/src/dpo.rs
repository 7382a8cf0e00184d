//! Direct preference optimization (Rafailov et al., 2023) and its family, on a data set of pairs.
//!
//! There is no generator, no reward and no weight sync. A frozen reference scores the pairs of later
//! steps while the trainer trains this one. [`grpo`](crate::grpo) with `[pairs]` is online DPO.

use anyhow::{Context, Result};
use rollflow::flow::{Flow, Report};
use rollflow::prelude::*;
use rollflow::recipe::Plan;

use crate::assemble::evaluation::{self, EvalReports};
use crate::assemble::{data, origin, preferences, references, trainers};
use crate::registry::Registry;
use crate::run::folder::{Outputs, RunFolder, announce_end};
use crate::run::resume::ResumePoint;

/// The pipeline `dpo`.
pub fn run(plan: &Plan, registry: &Registry, run: &RunFolder, from: Option<&ResumePoint>) -> Result<Report> {
    let mut flow = declare(plan, registry, &origin::policy(plan, run.path())?, run.outputs(plan)?, from)?;
    let report = run.watch(&mut flow, plan.train.steps)?;
    announce_end(&report, "Preference training complete!");
    Ok(report)
}

/// The graph, from pairs to checkpoints. `policy` is the one that the run begins with, and its reference.
pub fn declare(plan: &Plan, registry: &Registry, policy: &Policy, outputs: Outputs, from: Option<&ResumePoint>) -> Result<Flow> {
    let (pairs, state) = preferences::batches(plan, &policy.into())?;
    let backend = trainers::backend(plan, registry, policy).context("starting the trainer")?;
    let trainer = trainers::trainer(plan, registry, backend, None, None, outputs.checkpoints)?;
    let trainer = evaluation::publish_for_evaluation(trainer, plan);
    let trainer = data::resumable(trainer, from, state)?;

    let mut flow = Flow::new(&plan.name).metrics(&outputs.metrics);
    let done = from.map_or(0, |from| from.trainer.step);
    let batches = flow.source("pairs", pairs.after(done));
    let batches = references::scored(&mut flow, plan, policy, batches)?;
    let trained = flow.stage("train", batches, trainer);
    let reports = EvalReports { answers: outputs.answers, resumed_at: done };
    let trained = preferences::evaluated(&mut flow, plan, registry, policy, trained, reports)?;
    flow.sink("log", trained, outputs.log);
    Ok(flow)
}
