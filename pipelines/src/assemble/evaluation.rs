//! `[eval]`: prompts, sampling and judge of an evaluation, and the stage that runs it during training.

use std::sync::Arc;

use anyhow::{Context, Result, bail};
use rollflow::data::Prompt;
use rollflow::engine::remote::Fleet;
use rollflow::engine::{LocalEngine, SamplingParams, TokenEngine};
use rollflow::model::FrozenWeights;
use rollflow::prelude::{Generator, Policy, Trainer, TrainingBackend};
use rollflow::recipe::{Eval, Plan, Task, TaskData};
use rollflow::rollout::EvalSpec;
use rollflow::stages::evaluate::Evaluator;
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
    for prompt in &mut prompts {
        prompt.text = conversations::asked(&plan.chat, std::mem::take(&mut prompt.text));
    }
    let scoring = Scoring::of(&plan.reward, &plan.model, &plan.net, plan.generate.max_new_tokens, registry)?;
    let retries = plan.reward.retries;
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
pub fn publish_for_evaluation<B: TrainingBackend>(trainer: Trainer<B>, eval: Option<&Eval>) -> Trainer<B> {
    match during(eval) {
        None => trainer.sync_every(u64::MAX),
        Some(eval) => trainer.sync_every(eval.every).sync_last(),
    }
}

/// Stage that evaluates in this process during a run, if the recipe evaluates.
pub fn evaluator(plan: &Plan, registry: &Registry, policy: &Policy) -> Result<Option<Evaluator<LocalEngine>>> {
    let Some(eval) = during(plan.eval.as_ref()) else { return Ok(None) };
    let spec = prepared(plan, eval, registry, &policy.into())?;
    Ok(Some(configured(Evaluator::new(sized(Generator::local(policy), plan, eval), spec, eval.every), plan)))
}

/// Stage that evaluates on the run's servers, which `hold` keeps at the evaluated version.
pub fn evaluator_of_servers(
    plan: &Plan,
    registry: &Registry,
    policy: &Policy,
    engines: &Engines,
    hold: &EvaluationHold,
) -> Result<Option<Evaluator<Fleet, FrozenWeights>>> {
    let Some(eval) = during(plan.eval.as_ref()) else { return Ok(None) };
    let spec = prepared(plan, eval, registry, &engines.reader(policy))?;
    let generator = Generator::remote(engines.handle(), engines.fleet_config(policy), policy.tokenizer());
    Ok(Some(configured(Evaluator::remote(sized(generator, plan, eval), spec, eval.every, hold), plan)))
}

/// Hold of the servers at the version of each step that [`evaluator_of_servers`] evaluates, `last` among
/// them.
pub fn hold(eval: Option<&Eval>, last: u64) -> Option<EvaluationHold> {
    let every = during(eval)?.every;
    Some(EvaluationHold::new(move |step| step.is_multiple_of(every) || step == last))
}

/// The evaluation of a run; none if it is left to `rollflow eval`.
pub fn during(eval: Option<&Eval>) -> Option<&Eval> {
    eval.filter(|eval| eval.every > 0)
}

fn prepared(plan: &Plan, eval: &Eval, registry: &Registry, reader: &Reader) -> Result<EvalSpec> {
    eval_spec(plan, eval, registry, reader.config.max_positions).context("preparing the evaluation")
}

fn sized<E: TokenEngine>(generator: Generator<E>, plan: &Plan, eval: &Eval) -> Generator<E> {
    generator.slots(eval.max_num_seqs).threads(eval.threads).seed(plan.seed)
}

fn configured<E: TokenEngine, W: Send + Sync + 'static>(of: Evaluator<E, W>, plan: &Plan) -> Evaluator<E, W> {
    of.last(plan.steps()).in_order(plan.flow.max_staleness == 0)
}
