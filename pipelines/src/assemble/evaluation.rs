//! `[eval]`: prompts, sampling and judge of an evaluation, and the stage that runs it during training.

use std::sync::Arc;

use anyhow::{Context, Result, bail};
use rollflow::data::Prompt;
use rollflow::engine::remote::Fleet;
use rollflow::engine::{LocalEngine, SamplingParams, TokenEngine};
use rollflow::prelude::{Generator, Policy, Trainer, TrainingBackend};
use rollflow::recipe::{Environment, Eval, Plan, Task, TaskData};
use rollflow::rollout::EvalSpec;
use rollflow::stages::evaluate::Evaluator;
use rollflow::stages::sync::EvaluationHold;

use crate::assemble::policy::Reader;
use crate::assemble::rewards::Scoring;
use crate::assemble::{conversations, data, environments};
use crate::registry::Registry;

/// The evaluation during a plan's run; none if it is left to `rollflow eval`.
pub fn during(plan: &Plan) -> Option<&Eval> {
    plan.eval.as_ref().filter(|eval| eval.every > 0)
}

/// Evaluation by `eval` of a model with `positions` positions. It follows the plan's rollouts unless
/// `eval` says otherwise.
pub fn eval_spec(plan: &Plan, eval: &Eval, registry: &Registry, positions: usize) -> Result<EvalSpec> {
    let Plan { task, chat, generate, reward, net, .. } = plan;
    let (environment, seed) = (plan.environment.as_ref(), plan.seed);
    let mut prompts = prompts(eval.task.as_ref().unwrap_or(task), environment, seed, reward.rule.compares())?;
    prompts.truncate(eval.limit.unwrap_or(usize::MAX));
    for prompt in &mut prompts {
        prompt.text = conversations::asked(chat, std::mem::take(&mut prompt.text));
    }
    let scoring = Scoring::of(plan, registry)?;
    let retries = reward.retries;
    let agent = |of| environments::agent(of, net, seed, positions);
    Ok(EvalSpec {
        prompts,
        samples: eval.samples,
        sampling: SamplingParams {
            temperature: eval.temperature as f32,
            top_p: eval.top_p as f32,
            max_new_tokens: eval.max_new_tokens.unwrap_or(generate.max_new_tokens),
            stop: generate.stop.clone(),
            ..SamplingParams::default()
        },
        agent: environment.map(agent).transpose()?,
        greedy: eval.greedy,
        success: eval.success,
        judge: Arc::new(move |group| scoring.score(group, retries).map_err(Into::into)),
    })
}

fn prompts(task: &Task, environment: Option<&Environment>, seed: u64, compares: bool) -> Result<Vec<Prompt>> {
    Ok(match &task.data {
        TaskData::Arithmetic { digits, count } => data::sums(*digits, *count, seed).iter().map(Prompt::from).collect(),
        TaskData::Data(_) => data::all_if(&task.data.sources(), |prompt| data::answered(compares, prompt))?,
        TaskData::Environment { limit } => environments::tasks(environment, *limit)?,
        TaskData::Rollouts { .. } => {
            bail!("rollouts that were recorded are answered already; name a task of its own in [eval.task]")
        }
    })
}

/// Publishes the weights of the steps that are evaluated, and no others.
pub fn publish_for_evaluation<B: TrainingBackend>(trainer: Trainer<B>, plan: &Plan) -> Trainer<B> {
    match during(plan) {
        None => trainer.sync_every(u64::MAX),
        Some(eval) => trainer.sync_every(eval.every).sync_last(),
    }
}

/// Stage that evaluates in this process during a run, if the run evaluates.
pub fn evaluator(plan: &Plan, registry: &Registry, policy: &Policy) -> Result<Option<Evaluator<LocalEngine>>> {
    let Some(eval) = during(plan) else { return Ok(None) };
    let spec = prepared(plan, eval, registry, &policy.into())?;
    Ok(Some(configured(Evaluator::new(sized(Generator::local(policy), plan, eval), spec, eval.every), plan)))
}

/// Stage that evaluates on the run's servers, which `hold` keeps at the evaluated version.
pub fn evaluator_of_servers<W: Send + Sync + 'static>(
    plan: &Plan,
    eval: &Eval,
    registry: &Registry,
    reader: &Reader,
    generator: Generator<Fleet>,
    hold: &EvaluationHold,
) -> Result<Evaluator<Fleet, W>> {
    let spec = prepared(plan, eval, registry, reader)?;
    Ok(configured(Evaluator::remote(sized(generator, plan, eval), spec, eval.every, hold), plan))
}

/// Hold of the servers at the version of each step that [`evaluator_of_servers`] evaluates, the last among
/// them.
pub fn hold(plan: &Plan, eval: &Eval) -> EvaluationHold {
    let (every, last) = (eval.every, plan.steps());
    EvaluationHold::new(move |step| step.is_multiple_of(every) || step == last)
}

fn prepared(plan: &Plan, eval: &Eval, registry: &Registry, reader: &Reader) -> Result<EvalSpec> {
    eval_spec(plan, eval, registry, reader.config.max_positions).context("preparing the evaluation")
}

fn sized<E: TokenEngine>(generator: Generator<E>, plan: &Plan, eval: &Eval) -> Generator<E> {
    generator.slots(eval.max_num_seqs).threads(eval.threads).seed(plan.seed)
}

fn configured<E: TokenEngine, W: Send + Sync + 'static>(evaluator: Evaluator<E, W>, plan: &Plan) -> Evaluator<E, W> {
    // Training waits for the evaluation in a synchronous run.
    evaluator.last(plan.steps()).in_order(plan.flow.max_staleness == 0)
}
