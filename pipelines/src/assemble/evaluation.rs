//! `[eval]`: prompts, sampling and judge of an evaluation, and the stage that runs it during training.

use std::sync::Arc;

use anyhow::{Context, Result, bail};
use rollflow::data::Prompt;
use rollflow::engine::remote::Fleet;
use rollflow::engine::{LocalEngine, SamplingParams, TokenEngine};
use rollflow::prelude::{Generator, Policy, Trainer, TrainingBackend};
use rollflow::recipe::{Environment, Task, TaskData};
use rollflow::rollout::EvalSpec;
use rollflow::stages::evaluate::Evaluator;
use rollflow::stages::sync::EvaluationHold;

use crate::assemble::policy::Reader;
use crate::assemble::rewards::Scoring;
use crate::assemble::sections::{Evaluation, Rollouts};
use crate::assemble::{conversations, data, environments};
use crate::registry::Registry;

/// Evaluation of a model with `positions` positions.
pub fn eval_spec(of: Evaluation, registry: &Registry, positions: usize) -> Result<EvalSpec> {
    let (eval, Rollouts { task, chat, model, generate, environment, reward, net, seed }) = (of.eval, of.rollouts);
    let mut prompts = prompts(eval.task.as_ref().unwrap_or(task), environment, seed, reward.rule.compares())?;
    prompts.truncate(eval.limit.unwrap_or(usize::MAX));
    for prompt in &mut prompts {
        prompt.text = conversations::asked(chat, std::mem::take(&mut prompt.text));
    }
    let scoring = Scoring::of(reward, model, net, generate.max_new_tokens, registry)?;
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
pub fn publish_for_evaluation<B: TrainingBackend>(trainer: Trainer<B>, of: Option<Evaluation>) -> Trainer<B> {
    match of {
        None => trainer.sync_every(u64::MAX),
        Some(of) => trainer.sync_every(of.eval.every).sync_last(),
    }
}

/// Stage that evaluates in this process during a run.
pub fn evaluator(of: Evaluation, registry: &Registry, policy: &Policy) -> Result<Evaluator<LocalEngine>> {
    let spec = prepared(of, registry, &policy.into())?;
    Ok(configured(Evaluator::new(sized(Generator::local(policy), of), spec, of.eval.every), of))
}

/// Stage that evaluates on the run's servers, which `hold` keeps at the evaluated version.
pub fn evaluator_of_servers<W: Send + Sync + 'static>(
    of: Evaluation,
    registry: &Registry,
    reader: &Reader,
    generator: Generator<Fleet>,
    hold: &EvaluationHold,
) -> Result<Evaluator<Fleet, W>> {
    let spec = prepared(of, registry, reader)?;
    Ok(configured(Evaluator::remote(sized(generator, of), spec, of.eval.every, hold), of))
}

/// Hold of the servers at the version of each step that [`evaluator_of_servers`] evaluates, the last among
/// them.
pub fn hold(of: Evaluation) -> EvaluationHold {
    let (every, last) = (of.eval.every, of.last);
    EvaluationHold::new(move |step| step.is_multiple_of(every) || step == last)
}

fn prepared(of: Evaluation, registry: &Registry, reader: &Reader) -> Result<EvalSpec> {
    eval_spec(of, registry, reader.config.max_positions).context("preparing the evaluation")
}

fn sized<E: TokenEngine>(generator: Generator<E>, of: Evaluation) -> Generator<E> {
    generator.slots(of.eval.max_num_seqs).threads(of.eval.threads).seed(of.rollouts.seed)
}

fn configured<E: TokenEngine, W: Send + Sync + 'static>(evaluator: Evaluator<E, W>, of: Evaluation) -> Evaluator<E, W> {
    evaluator.last(of.last).in_order(of.in_order)
}
