//! Supervised fine-tuning: the model learns to continue prompts as the data does.

use std::sync::Arc;

use anyhow::{Context, Result};
use parking_lot::Mutex;
use rollflow::flow::{Ended, Flow, Interrupts, Report, Until};
use rollflow::model::FrozenWeights;
use rollflow::observe::MetricsLogger;
use rollflow::prelude::*;
use rollflow::recipe::{Plan, Sft};
use rollflow::stages::sink::step_row;
use rollflow::stages::train::StepConfig;

use crate::assemble::supervised::Imitation;
use crate::assemble::{data, evaluation, origin, steps, trainers};
use crate::registry::Registry;
use crate::run::folder::{Outputs, RunFolder, announce_end};
use crate::run::resume::ResumePoint;

/// The pipeline `sft`.
pub fn run(plan: &Plan, registry: &Registry, run: &RunFolder, from: Option<&ResumePoint>) -> Result<Report> {
    let interrupts = Interrupts::listen().context("listening for Ctrl-C")?;
    run_of(plan, registry, &origin::policy(plan, run.path())?, run, from, &interrupts)
}

/// Runs the pipeline on a loaded policy.
pub fn run_of(
    plan: &Plan,
    registry: &Registry,
    policy: &Policy,
    run: &RunFolder,
    from: Option<&ResumePoint>,
    interrupts: &Interrupts,
) -> Result<Report> {
    let mut flow = declare(plan, registry, policy, run.outputs(plan)?, from)?;
    flow.interrupted_by(interrupts);
    let report = run.watch(&mut flow, plan.steps())?;
    announce_end(&report, "Training complete!");
    Ok(report)
}

/// The graph, from samples to checkpoints.
pub fn declare(plan: &Plan, registry: &Registry, policy: &Policy, outputs: Outputs, from: Option<&ResumePoint>) -> Result<Flow> {
    let sft = plan.sft.as_ref().context("the pipeline sft needs a section [sft]")?;
    let mut flow = Flow::new(&plan.name).metrics(&outputs.metrics);
    let done = from.map_or(0, |from| from.trainer.step);
    let (samples, data) = Imitation::of(plan, sft).batches(&policy.into())?;
    let trainer = trainer(plan, sft, registry, policy)?;
    let trainer = trainers::supervised(trainer, plan, registry, step_config, outputs.checkpoints)?;
    let trainer = evaluation::publish_for_evaluation(trainer, plan);
    let samples = flow.source("samples", samples.after(done));
    let mut trained = flow.stage("train", samples, data::resumable(trainer, from, data)?);
    if let Some(evaluator) = evaluation::evaluator(plan, registry, policy)? {
        trained = flow.stage("evaluate", trained, evaluator.in_order(true).report(done, outputs.answers));
    }
    flow.sink("log", trained, outputs.log);
    Ok(flow)
}

/// Outcome of supervised training before reinforcement.
#[allow(clippy::large_enum_variant, reason = "a run has one, which is taken apart next")]
pub enum WarmUp {
    /// With a policy that learned.
    Learned(Policy),
    /// By Ctrl-C, so that the whole run is over.
    Interrupted(Report),
}

/// Trains supervised before reinforcement. Writes no files.
pub fn warm_up(plan: &Plan, sft: &Sft, registry: &Registry, policy: &Policy, interrupts: &Interrupts) -> Result<WarmUp> {
    let learned: Arc<Mutex<Option<Arc<FrozenWeights>>>> = Arc::default();
    let mut flow = Flow::new("warm-up");
    flow.interrupted_by(interrupts);
    let (samples, _) = Imitation::of(plan, sft).batches(&policy.into())?;
    let samples = flow.source("samples", samples);
    let trained = flow.stage("train", samples, trainer(plan, sft, registry, policy)?.sync_every(sft.steps));
    let (seen, mut console) = (learned.clone(), log_to_console(plan.observe.log_every, |line| tracing::info!("{line}")));
    flow.sink("learned", trained, move |step: Trained<FrozenWeights>| -> Result<(), StageError> {
        if step.step > 0 {
            console.log(step.step, &step_row(&step))?;
        }
        if let Some(publish) = step.publish {
            *seen.lock() = Some(publish.weights);
        }
        Ok(())
    });
    let report = flow.run(Until::finished())?;
    if report.ended != Ended::Finished {
        return Ok(WarmUp::Interrupted(report));
    }
    announce_end(&report, "Training complete!");
    let weights = learned.lock().take().context("the warm-up published no weights")?;
    Ok(WarmUp::Learned(policy.with_weights(weights)))
}

/// Schedule of a plan's steps, where the plan changes it.
fn step_config(plan: &Plan) -> Result<StepConfig> {
    let sft = plan.sft.as_ref().context("the pipeline sft needs a section [sft]")?;
    Ok(StepConfig { schedule: Some(steps::schedule(&sft.optimization, sft.lr, sft.steps, 1)?), ..StepConfig::default() })
}

fn trainer(plan: &Plan, sft: &Sft, registry: &Registry, policy: &Policy) -> Result<Trainer<LocalBackend>> {
    let config = trainers::supervised_config(sft, &plan.model, &plan.checkpoint)?;
    let backend = policy.backend(trainers::shared(config, registry, trainers::SUPERVISED)).context("starting the trainer")?;
    Ok(Trainer::new(backend).steps(sft.steps).threads(sft.optimization.threads.unwrap_or(0)))
}
