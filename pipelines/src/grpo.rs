//! Group-relative policy optimization (Shao et al., DeepSeekMath, 2024), as a pipeline.
//!
//! Generation overlaps training: while a step trains, the generator samples the prompts of later steps,
//! up to the recipe's staleness. With `max_staleness = 0` the run is synchronous. PPO adds a critic.

use anyhow::{Context, Result};
use rollflow::flow::{Capacity, Flow, Interrupts, Report};
use rollflow::observe::logs::announce_training;
use rollflow::prelude::*;
use rollflow::recipe::{Pipeline, Plan, ReferencePolicy};

use crate::assemble::engines::Engines;
use crate::assemble::servers::Startup;
use crate::assemble::{data, origin, references, rollout, trainers};
use crate::components::Components;
use crate::registry::Registry;
use crate::run::folder::{Outputs, RunFolder, announce_end};
use crate::run::resume::ResumePoint;
use crate::sft::WarmUp;
use crate::{sft, sft_then_grpo};

/// Runs the supervised part if the recipe has one, starts the engines, then reinforces. `from` resumes
/// an interrupted run.
pub fn run(plan: &Plan, registry: &Registry, run: &RunFolder, from: Option<&ResumePoint>) -> Result<Report> {
    let mut policy = origin::policy(plan, run.path())?;
    // One listener for both flows, so that no Ctrl-C is lost between them.
    let interrupts = Interrupts::listen().context("listening for Ctrl-C")?;
    let supervised = match &plan.sft {
        Some(_) if plan.pipeline == Pipeline::SftThenGrpo => {
            Some(sft_then_grpo::learned(plan, registry, run, &policy, &interrupts)?)
        }
        Some(warm_up) if from.is_none() => Some(sft::warm_up(plan, warm_up, registry, &policy, &interrupts)?),
        _ => None,
    };
    match supervised {
        Some(WarmUp::Learned(learned)) => policy = learned,
        Some(WarmUp::Interrupted(report)) => return Ok(report),
        None => {}
    }
    let begins = plan.sft.is_some() && plan.pipeline != Pipeline::SftThenGrpo;
    let mut parts = plan.scoring_policies().flat_map(|(section, of)| of.parts(section));
    let frozen = parts.any(|(_, part)| part == ReferencePolicy::Frozen { path: None });
    let start = if begins && frozen { references::start(&policy, run.path(), from.is_some())? } else { policy.clone() };
    if !plan.engine.is_remote() {
        let observe = |generator| run.profiler().observes(generator);
        let components = Components::observed(plan, registry, &policy, &start, from, observe)?;
        return reinforce(plan, components, run, &policy, from, &interrupts);
    }
    // Dropping the engines ends the servers that were started, however the run ends.
    let startup = Startup { report: &|line| run.say(line), interrupted: &|| interrupts.pressed() };
    let Some(engines) = Engines::begin(plan, &policy, &run.path().join("engine"), startup)? else {
        return Ok(Report::before(&plan.name));
    };
    let components = Components::remote(plan, registry, &policy, &start, from, &engines)?;
    reinforce(plan, components, run, &policy, from, &interrupts)
}

fn reinforce(
    plan: &Plan,
    components: Components<LocalBackend>,
    run: &RunFolder,
    policy: &Policy,
    from: Option<&ResumePoint>,
    interrupts: &Interrupts,
) -> Result<Report> {
    match from {
        Some(from) => components.scorers.resume(policy, &from.checkpoint)?,
        None if plan.train.probe => {
            let prompts = data::first_prompts(plan, rollout::PROBED, &policy.into())?;
            rollout::probe(prompts, plan, policy, &components.backend)?;
        }
        None => {}
    }
    train(plan, components, run, from, interrupts)
}

/// Declares the graph and runs it.
pub fn train<B: TrainingBackend + 'static>(
    plan: &Plan,
    components: Components<B>,
    run: &RunFolder,
    from: Option<&ResumePoint>,
    interrupts: &Interrupts,
) -> Result<Report> {
    let mut flow = declare(plan, components, run.outputs(plan)?, from)?;
    let batch = format!("{} groups of {}", plan.batch.groups, plan.generate.group_size);
    announce_training("RL", &[("Steps", &plan.train.steps), ("Batch size", &batch)]);
    flow.interrupted_by(interrupts);
    let report = run.watch(&mut flow, plan.train.steps)?;
    announce_end(&report, "RL training complete!");
    Ok(report)
}

/// Declares the graph, from prompts to weights, for runs, `rollflow graph`, simulations and tests.
pub fn declare<B: TrainingBackend + 'static>(
    plan: &Plan,
    components: Components<B>,
    outputs: Outputs<B::Weights>,
    from: Option<&ResumePoint>,
) -> Result<Flow> {
    let Components { prompts, generator, reward, scorers, backend, critic, mixture, sleep, sync, evaluator, registry, timeline } =
        components;
    let (admission, traces) = (rollout::admission(plan), outputs.traces);
    let filter = Filter::by(rollout::filter(&plan.filter, &timeline, &registry)?).fallback(plan.filter_fallback);
    let mut trainer = trainers::trainer(plan, timeline, &registry, backend, critic, mixture, outputs.checkpoints)?;
    if let Some(from) = from {
        trainer = trainer.resume(&from.checkpoint, from.trainer.clone())?;
    }
    for files in scorers.iter().filter_map(Reference::checkpoint_files) {
        trainer = trainer.checkpoint_files(files);
    }

    let mut flow = Flow::new(&plan.name).admission(&admission).metrics(&outputs.metrics);
    flow.capacity(Capacity::items(plan.flow.edge_items).tokens(plan.flow.edge_tokens));
    let prompts = flow.source("prompts", prompts);
    traces.follow(&mut flow, &prompts, "prompts");
    let groups = flow.stage("generate", prompts, generator);
    traces.follow(&mut flow, &groups, "generate");
    let scored = flow.stage("reward", groups, reward.stage(&plan.reward, &plan.flow, outputs.dead_letters));
    traces.follow(&mut flow, &scored, "reward");
    let mut kept = flow.stage("filter", scored, filter);
    if let Some(pairing) = plan.pairing().filter(|_| !plan.changes("pairs")) {
        kept = flow.stage("pairs", kept, pairing);
    }
    if let Some(reference) = scorers.reference {
        kept = flow.stage("reference", kept, reference);
    }
    if let Some(teacher) = scorers.teacher {
        kept = flow.stage("teacher", kept, teacher);
    }
    traces.follow(&mut flow, &kept, "filter");
    let mut batches = flow.stage("batch", kept, rollout::batcher(&plan.batch, &plan.flow));
    if let Some(sleep) = sleep {
        batches = flow.stage("sleep", batches, sleep);
    }
    traces.follow(&mut flow, &batches, "batch");
    let trained = flow.stage("train", batches, trainer);
    traces.end(&mut flow, &trained);
    let mut steps = flow.stage("sync", trained, sync);
    if let Some(evaluator) = evaluator {
        steps = flow.stage("evaluate", steps, evaluator(from.map_or(0, |from| from.trainer.step), outputs.answers));
    }
    flow.sink("log", steps, outputs.log);
    Ok(flow)
}
