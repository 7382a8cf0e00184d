//! Direct preference optimization (Rafailov et al., 2023) and its family, on a data set of pairs.
//!
//! There is no generator, no reward and no weight sync. A frozen reference scores the pairs of later
//! steps while the trainer trains this one. [`grpo`](crate::grpo) with `[pairs]` is online DPO.

use anyhow::{Context, Result};
use rollflow::flow::{Flow, Report};
use rollflow::prelude::*;
use rollflow::recipe::{Plan, Timeline};
use rollflow::stages::evaluate::PairEvaluator;

use crate::assemble::policy::Reader;
use crate::assemble::{data, evaluation, origin, preferences, references, trainers};
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
    let Plan { model, train, .. } = plan;
    let reader = Reader::from(policy);
    let (pairs, state) = preferences::batches(&plan.task, &plan.chat, plan.seed, plan.batch.groups, train.steps, &reader)?;
    let backend = trainers::backend(plan, registry, policy).context("starting the trainer")?;
    let trainer = trainers::trainer(plan, Timeline::of(plan)?, registry, backend, None, None, outputs.checkpoints)?;
    let trainer = evaluation::publish_for_evaluation(trainer, plan);
    let trainer = data::resumable(trainer, from, state)?;
    let scoring = |threads| references::scoring(model, plan.generate.scoring_temperature(), &train.optimization, threads);

    let mut flow = Flow::new(&plan.name).metrics(&outputs.metrics);
    let done = from.map_or(0, |from| from.trainer.step);
    let mut batches = flow.source("pairs", pairs.after(done));
    if let Some(of) = &plan.reference {
        batches = flow.stage(
            "reference",
            batches,
            references::scorer("reference", &of.policy, &plan.net, policy, scoring(of.threads)?, None)?,
        );
    }
    let mut trained = flow.stage("train", batches, trainer);
    if let Some(eval) = evaluation::during(plan) {
        let (sources, pairs): (Vec<_>, Vec<_>) =
            preferences::evaluated(eval, &plan.task, &plan.chat, plan.seed, &reader)?.into_iter().unzip();
        let (config, loss) = (scoring(eval.threads)?, registry.loss_of(train, None)?);
        let mut evaluator = PairEvaluator::new(config.clone(), reader.config, loss, pairs.concat(), eval.every).sources(sources);
        if let Some(of) = &plan.reference {
            evaluator = evaluator.reference(references::scorer("reference", &of.policy, &plan.net, policy, config, None)?);
        }
        trained = flow.stage("evaluate", trained, evaluator.last(train.steps).report(done, outputs.answers));
    }
    flow.sink("log", trained, outputs.log);
    Ok(flow)
}
