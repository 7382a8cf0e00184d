//! `[eval]`: prompts, sampling and judge of an evaluation, and the stage that runs it during training.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use rollflow::data::Prompt;
use rollflow::engine::remote::Fleet;
use rollflow::engine::{LocalEngine, SamplingParams, TokenEngine};
use rollflow::flow::Port;
use rollflow::model::FrozenWeights;
use rollflow::prelude::{Flow, Policy, Trained, Trainer, TrainingBackend};
use rollflow::recipe::Plan;
use rollflow::recipe::eval::Eval;
use rollflow::recipe::task::{Task, TaskData};
use rollflow::rollout::EvalSpec;
use rollflow::stages::evaluate::{Evaluator, PairEvaluator};
use rollflow::stages::sync::EvaluationHold;

use crate::assemble::engines::Engines;
use crate::assemble::policy::Reader;
use crate::assemble::rewards::Scoring;
use crate::assemble::{conversations, data, environments};
use crate::registry::Registry;

/// Evaluation of a model with `positions` positions.
pub fn eval_spec(plan: &Plan, eval: &Eval, registry: &Registry, positions: usize) -> Result<EvalSpec> {
    let mut prompts = prompts(eval.task.as_ref().unwrap_or(&plan.task), plan.seed)?;
    prompts.truncate(eval.limit.unwrap_or(usize::MAX));
    let chat = conversations::chat(&plan.chat, &plan.model);
    for prompt in &mut prompts {
        prompt.text = conversations::asked(&chat, std::mem::take(&mut prompt.text));
    }
    let (scoring, retries) = (Scoring::of(plan, registry)?, plan.reward.retries);
    let agent = |of| environments::agent(of, &plan.net, plan.seed, positions);
    Ok(EvalSpec {
        prompts,
        samples: eval.samples,
        sampling: SamplingParams {
            temperature: eval.temperature as f32,
            top_p: eval.top_p as f32,
            max_new_tokens: eval.max_new_tokens.unwrap_or(plan.generate.max_new_tokens),
            stop: plan.generate.stop.clone(),
            ..SamplingParams::default()
        },
        agent: plan.environment.as_ref().map(agent).transpose()?,
        greedy: eval.greedy,
        success: eval.success,
        judge: Arc::new(move |group| scoring.score(group, retries).map_err(Into::into)),
    })
}

fn prompts(task: &Task, seed: u64) -> Result<Vec<Prompt>> {
    Ok(match &task.data {
        TaskData::Arithmetic { digits, count } => data::sums(*digits, *count, seed).iter().map(Prompt::from).collect(),
        TaskData::Data(_) => data::all(&task.data.sources())?,
        TaskData::Rollouts { .. } => {
            bail!("rollouts that were recorded are answered already; name a task of its own in [eval.task]")
        }
    })
}

/// Publishes the weights of the steps that are evaluated, and no others.
pub fn publish_for_evaluation<B: TrainingBackend>(trainer: Trainer<B>, plan: &Plan) -> Trainer<B> {
    match plan.eval.as_ref().map(|eval| eval.every) {
        None | Some(0) => trainer.sync_every(u64::MAX),
        Some(every) => trainer.sync_every(every).sync_last(),
    }
}

/// Reports of evaluations during a run.
pub struct EvalReports {
    /// Run folder, if evaluations are logged.
    pub answers: Option<PathBuf>,
    /// Step that the run is resumed at; 0 for a new run.
    pub resumed_at: u64,
}

impl EvalReports {
    /// Reports the evaluations of held-out pairs.
    pub fn of_pairs(self, evaluator: PairEvaluator, plan: &Plan) -> PairEvaluator {
        evaluator.last(plan.steps()).after(self.resumed_at).log(self.answers)
    }
}

/// Adds the recipe's evaluation, if any, after a trainer without a generator. Each step is logged
/// after its own evaluation.
pub fn evaluate_in_order(
    flow: &mut Flow,
    plan: &Plan,
    registry: &Registry,
    policy: &Policy,
    trained: Port<Trained<FrozenWeights>>,
    reports: EvalReports,
) -> Result<Port<Trained<FrozenWeights>>> {
    let Some(evaluator) = evaluator(plan, registry, policy)? else { return Ok(trained) };
    let evaluator = evaluator.in_order(true).after(reports.resumed_at).log(reports.answers);
    Ok(flow.stage("evaluate", trained, evaluator))
}

/// Stage that evaluates in this process during a run, if the recipe evaluates.
pub fn evaluator(plan: &Plan, registry: &Registry, policy: &Policy) -> Result<Option<Evaluator<LocalEngine>>> {
    let Some(eval) = during(plan) else { return Ok(None) };
    let spec = prepared(plan, eval, registry, &policy.into())?;
    Ok(Some(configured(Evaluator::local(policy, spec, eval.every), plan, eval)))
}

/// Stage that evaluates on the run's servers, which `hold` keeps at the evaluated version.
pub fn evaluator_of_servers(
    plan: &Plan,
    registry: &Registry,
    policy: &Policy,
    engines: &Engines,
    hold: &EvaluationHold,
) -> Result<Option<Evaluator<Fleet, FrozenWeights>>> {
    let Some(eval) = during(plan) else { return Ok(None) };
    let spec = prepared(plan, eval, registry, &engines.reader(policy))?;
    let (handle, config) = (engines.handle(), engines.fleet_config(plan, policy));
    Ok(Some(configured(Evaluator::remote(handle, config, policy.tokenizer(), spec, eval.every, hold), plan, eval)))
}

/// Hold of the servers at the version of each step that [`evaluator_of_servers`] evaluates.
pub fn hold(plan: &Plan) -> Option<EvaluationHold> {
    let (every, last) = (during(plan)?.every, plan.steps());
    Some(EvaluationHold::new(move |step| step.is_multiple_of(every) || step == last))
}

fn during(plan: &Plan) -> Option<&Eval> {
    plan.eval.as_ref().filter(|eval| eval.every > 0)
}

fn prepared(plan: &Plan, eval: &Eval, registry: &Registry, reader: &Reader) -> Result<EvalSpec> {
    eval_spec(plan, eval, registry, reader.config.max_positions).context("preparing the evaluation")
}

fn configured<E: TokenEngine, W: Send + Sync + 'static>(of: Evaluator<E, W>, plan: &Plan, eval: &Eval) -> Evaluator<E, W> {
    of.slots(eval.max_num_seqs).threads(eval.threads).seed(plan.seed).last(plan.steps()).in_order(plan.flow.max_staleness == 0)
}
