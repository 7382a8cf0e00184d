//! Group-relative policy optimization on recorded rollouts, without generator and weight sync.
//!
//! By default a policy continues from its own rollouts: importance ratios use the recorded
//! log-probabilities and are clipped. For rollouts of another policy, set
//! `train.proximal = "recompute"` and train on correct completions only
//! (`train.advantage = { kind = "constant" }`): lowering the probability of completions that the
//! policy would never sample has no limit.

use std::sync::Arc;

use anyhow::{Context, Result, anyhow, bail};
use rollflow::data::source::DataSpec;
use rollflow::flow::{Flow, Report};
use rollflow::prelude::*;
use rollflow::recipe::{self as section, Plan, TaskData, Timeline};
use rollflow::stages::reward::OnFailure;
use rollflow::stages::source::RecordedGroups;
use rollflow::util::causes::full_message;

use crate::assemble::references::Scorers;
use crate::assemble::rewards::Scoring;
use crate::assemble::steps::Mixture;
use crate::assemble::supervised::Imitation;
use crate::assemble::{conversations, data, evaluation, origin, rollout, trainers};
use crate::registry::Registry;
use crate::run::folder::{Outputs, RunFolder, announce_end};
use crate::run::resume::ResumePoint;

/// The pipeline `grpo_offline`.
pub fn run(plan: &Plan, registry: &Registry, run: &RunFolder, from: Option<&ResumePoint>) -> Result<Report> {
    let mut flow = declare(plan, registry, &origin::policy(plan, run.path())?, run.outputs(plan)?, from)?;
    let report = run.watch(&mut flow, plan.train.steps)?;
    announce_end(&report, "Offline RL training complete!");
    Ok(report)
}

/// The recorded groups of `[task]`, without those that a filter drops.
pub fn groups(plan: &Plan, registry: &Registry, tokenizer: &Arc<Tokenizer>) -> Result<RecordedGroups> {
    let TaskData::Rollouts { path, limit, .. } = &plan.task.data else {
        bail!("the pipeline grpo_offline needs a task of kind \"rollouts\"")
    };
    let spec = DataSpec { max_samples: *limit, ..DataSpec::new(path) };
    let filter = rollout::filter(&plan.filter, &Timeline::of(plan)?, registry)?;
    let scoring = plan.rescores().then(|| Scoring::of(plan, registry)).transpose()?;
    let score = |group: Group| match &scoring {
        Some(scoring) => rescored(scoring, &plan.reward, group),
        None => Ok(Ok(group)),
    };
    let chat = plan.chat.clone();
    let asked = move |prompt| conversations::asked(&chat, prompt);
    RecordedGroups::open(&spec, tokenizer, asked, score, &filter, plan.seed).map_err(|error| anyhow!("{error}"))
}

/// Scores the completions of a recorded group by `[reward]`. `reward.on_failure` decides whether a
/// failure gives 0, drops the group or ends the run.
fn rescored(scoring: &Scoring, of: &section::Reward, group: Group) -> Result<Result<Group, String>, StageError> {
    let scored = scoring.score(group, of.retries);
    let (mut group, failures) = scored.map_err(|error| StageError::new(full_message(error.as_ref())))?;
    match (of.on_failure, failures.first()) {
        (OnFailure::Fail, Some(failure)) => return Err(StageError::new(format!("the reward failed: {}", failure.text))),
        (OnFailure::Drop | OnFailure::DeadLetter, Some(_)) => return Ok(Err("whose reward failed".into())),
        _ => {}
    }
    group.samples.iter_mut().for_each(|sample| sample.reward = Some(sample.reward.unwrap_or_default()));
    Ok(Ok(group))
}

/// The graph, from recorded groups to checkpoints.
pub fn declare(plan: &Plan, registry: &Registry, policy: &Policy, outputs: Outputs, from: Option<&ResumePoint>) -> Result<Flow> {
    let groups = groups(plan, registry, policy.tokenizer())?;
    let state = groups.state();
    let backend = trainers::backend(plan, registry, policy).context("starting the trainer")?;
    let critic = trainers::critic(plan, registry, policy).context("starting the critic")?;
    let mix = plan.mix.as_ref().zip(plan.sft.as_ref());
    let mixture = mix.map(|(mix, sft)| Mixture::of(mix, Imitation::of(plan, sft), policy)).transpose()?;
    let trainer = trainers::trainer(plan, Timeline::of(plan)?, registry, backend, critic, mixture, outputs.checkpoints)?;
    let trainer = evaluation::publish_for_evaluation(trainer, plan);
    let trainer = data::resumable(trainer, from, Some(state))?;

    let mut flow = Flow::new(&plan.name).metrics(&outputs.metrics);
    let done = from.map_or(0, |from| from.trainer.step);
    let batches = groups.batches(plan.batch.groups, plan.train.steps)?.after(done);
    let mut batches = flow.source("rollouts", batches);
    let scorers = Scorers::of(plan, policy, None)?;
    if let Some(reference) = scorers.reference {
        batches = flow.stage("reference", batches, reference);
    }
    if let Some(teacher) = scorers.teacher {
        batches = flow.stage("teacher", batches, teacher);
    }
    let mut trained = flow.stage("train", batches, trainer);
    if let Some(evaluator) = evaluation::evaluator(plan, registry, policy)? {
        trained = flow.stage("evaluate", trained, evaluator.in_order(true).report(done, outputs.answers));
    }
    flow.sink("log", trained, outputs.log);
    Ok(flow)
}
