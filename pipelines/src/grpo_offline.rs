//! Group-relative policy optimization on rollouts that were recorded: no generator, no reward, no weights that go back.
//!
//! A policy goes on from its own rollouts by default: ratios are against the log-probabilities that were recorded, and clipped. Another policy
//! takes them against itself (`train.proximal = "recompute"`) and learns from right answers alone (`train.advantage = { kind = "constant" }`):
//! pushing down what it would never have said has no end.

use anyhow::{Context, Result, bail};
use rollflow::data::source::DataSpec;
use rollflow::flow::{Ended, Flow, Report, Until};
use rollflow::prelude::*;
use rollflow::recipe::Plan;
use rollflow::recipe::task::TaskData;
use rollflow::stages::source::RecordedGroups;

use crate::registry::Registry;
use crate::resume::ResumePoint;
use crate::run_folder::{Outputs, RunFolder};
use crate::{data, evaluation, origin, parts, trainers};

/// The pipeline `grpo_offline`.
pub fn run(plan: &Plan, registry: &Registry, run: &RunFolder, from: Option<&ResumePoint>) -> Result<Report> {
    let mut flow = declare(plan, registry, &origin::policy(plan, run.path())?, run.outputs(plan)?, from)?;
    let report = run.watch(&mut flow, plan.train.steps, |flow| flow.run(Until::finished()))?;
    if report.ended == Ended::Finished {
        tracing::info!("Offline RL training complete!");
    }
    Ok(report)
}

/// The graph, from recorded groups to checkpoints.
pub fn declare(plan: &Plan, registry: &Registry, policy: &Policy, outputs: Outputs, from: Option<&ResumePoint>) -> Result<Flow> {
    let TaskData::Rollouts(task) = &plan.task.data else { bail!("the pipeline grpo_offline needs a task of kind \"rollouts\"") };
    let spec = DataSpec { max_samples: task.limit, ..DataSpec::new(&task.path) };
    let filter = parts::filter(plan, registry)?;
    let groups =
        RecordedGroups::open(&spec, policy.tokenizer(), &filter, plan.seed).map_err(|error| anyhow::anyhow!("{error}"))?;
    let state = groups.state();
    let backend = trainers::backend(plan, registry, policy).context("starting the trainer")?;
    let trainer = trainers::trainer(plan, registry, backend, None, None, outputs.checkpoints)?;
    let trainer = evaluation::published(trainer, plan);
    let trainer = match from {
        Some(from) => {
            data::check(&from.checkpoint, Some(&state))?;
            trainer.resume(&from.checkpoint, from.trainer.clone())?
        }
        None => trainer,
    };

    let mut flow = Flow::new(&plan.name);
    let done = from.map_or(0, |from| from.trainer.step);
    let batches = groups.batches(plan.batch.groups, plan.train.steps)?.after(done).metrics(&outputs.metrics);
    let batches = flow.source("rollouts", batches);
    let trained = flow.stage("train", batches, data::remembered(trainer, Some(state)));
    let trained = evaluation::beside(&mut flow, plan, registry, policy, trained, (&outputs.metrics, outputs.answers, done))?;
    flow.sink("log", trained, outputs.log);
    Ok(flow)
}
