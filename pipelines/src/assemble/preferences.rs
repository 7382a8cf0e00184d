//! A task's pairs of completions as steps of preference training, and the held-out pairs of its `[eval]`.

use anyhow::{Context, Result, bail};
use rollflow::data::source::{Mixed, prepare_pair, too_long};
use rollflow::data::{BufferState, DataError, Pair, RankedPair, arithmetic};
use rollflow::flow::Port;
use rollflow::model::FrozenWeights;
use rollflow::prelude::*;
use rollflow::recipe::Plan;
use rollflow::recipe::chat::Chat;
use rollflow::recipe::task::{Task, TaskData};
use rollflow::stages::evaluate::PairEvaluator;

use crate::assemble::data::sums;
use crate::assemble::evaluation::EvalReports;
use crate::assemble::policy::Reader;
use crate::assemble::{conversations, data, references};
use crate::registry::Registry;

/// Wrong completions to each sum of an arithmetic task.
const WRONG: usize = 64;

/// Builds the pairs of `[task]`, `batch.groups` a step, and the state of their data for checkpoints.
/// Pairs longer than the model's context are dropped and counted.
pub fn batches(plan: &Plan, reader: &Reader) -> Result<(Supervised, Option<BufferState>)> {
    let (chat, tokenizer) = (conversations::chat(&plan.chat, &plan.model), reader.tokenizer.clone());
    let (size, steps) = (plan.batch.groups, plan.train.steps);
    let pairs = match &plan.task.data {
        TaskData::Data(_) => {
            let fits = fits(&chat, reader);
            let data = Mixed::<RankedPair>::open_if(&data::specs(&plan.task.data.sources()), plan.seed, plan.task.shuffle, fits)?;
            let state = data.state(0);
            let group = move |pair: RankedPair| Ok(samples(&chat, &pair, &tokenizer)?.to_vec());
            return Ok((Supervised::drawn("DPO", data, size, steps, group)?.called("Pairs"), Some(state)));
        }
        TaskData::Arithmetic { digits, count } => arithmetic::ranked(&sums(*digits, *count, plan.seed), WRONG, plan.seed),
        TaskData::Rollouts { .. } => bail!("recorded rollouts are no pairs of completions"),
    };
    let groups = pairs.iter().map(|pair| Ok(samples(&chat, pair, &tokenizer)?.to_vec())).collect::<Result<Vec<_>>>()?;
    Ok((Supervised::grouped("DPO", groups, size, steps)?.called("Pairs"), None))
}

/// Samples of the chosen and the rejected completion, each after the prompt as `[chat]` formats it.
fn samples(chat: &Chat, pair: &RankedPair, tokenizer: &Tokenizer) -> Result<[Sample; 2], DataError> {
    let prompt = conversations::asked(chat, pair.prompt.clone());
    let sample = |completion: &str| prepare_pair(&Pair { prompt: prompt.clone(), completion: completion.to_owned() }, tokenizer);
    Ok([sample(&pair.chosen)?, Sample { index: 1, ..sample(&pair.rejected)? }])
}

/// Returns a check that both completions fit the model's context.
pub fn fits(chat: &Chat, reader: &Reader) -> impl Fn(&RankedPair) -> Result<(), String> + Sync + use<> {
    let (chat, Reader { tokenizer, config }) = (chat.clone(), reader.clone());
    move |pair| match samples(&chat, pair, &tokenizer) {
        Ok(samples) if samples.iter().any(|sample| sample.tokens.len() > config.max_positions) => {
            Err(too_long(config.max_positions))
        }
        Ok(_) => Ok(()),
        Err(_) => Err("that the tokenizer or the chat template refuses".into()),
    }
}

/// Adds the evaluation on held-out pairs, if the recipe has one.
pub fn evaluated(
    flow: &mut Flow,
    plan: &Plan,
    registry: &Registry,
    policy: &Policy,
    trained: Port<Trained<FrozenWeights>>,
    reports: EvalReports,
) -> Result<Port<Trained<FrozenWeights>>> {
    let Some(eval) = plan.eval.as_ref().filter(|eval| eval.every > 0) else { return Ok(trained) };
    let (chat, reader) = (conversations::chat(&plan.chat, &plan.model), Reader::from(policy));
    let mut pairs = held_out(plan, eval.task.as_ref().unwrap_or(&plan.task))?;
    let fits = fits(&chat, &reader);
    pairs.retain(|pair| fits(pair).is_ok());
    pairs.truncate(eval.limit.unwrap_or(usize::MAX));
    let samples = pairs.iter().map(|pair| samples(&chat, pair, &reader.tokenizer)).collect::<Result<Vec<_>, _>>();
    let samples = samples.context("preparing the evaluation")?.concat();
    let config = references::scoring(plan, &plan.train.optimization, Some(eval.threads))?;
    let loss = registry.loss_of(&plan.train)?;
    let evaluator = PairEvaluator::new(config.clone(), policy.config().clone(), loss, samples, eval.every);
    let evaluator = match references::frozen(plan, policy, config)? {
        Some(reference) => evaluator.reference(reference),
        None => evaluator,
    };
    Ok(flow.stage("evaluate", trained, reports.of_pairs(evaluator, plan)))
}

/// Pairs of an evaluation: all of a data set, or one for each sum.
pub fn held_out(plan: &Plan, task: &Task) -> Result<Vec<RankedPair>> {
    let chat = conversations::chat(&plan.chat, &plan.model);
    let pairs: Vec<RankedPair> = match &task.data {
        // Other wrong completions than those that are trained on.
        TaskData::Arithmetic { digits, count } => arithmetic::ranked(&sums(*digits, *count, plan.seed), 1, !plan.seed),
        TaskData::Data(_) => data::all(&task.data.sources())?,
        TaskData::Rollouts { .. } => bail!("recorded rollouts are no pairs of completions"),
    };
    Ok(pairs.into_iter().map(|pair| conversations::asked_pair(&chat, pair)).collect())
}

/// Pairs to train a reward model on, and the share `held_out` of them that it is judged by in the end.
pub fn divided(plan: &Plan, held_out: f64) -> Result<[Vec<RankedPair>; 2]> {
    let (share, chat, seed) = (1.0 - held_out, conversations::chat(&plan.chat, &plan.model), plan.seed);
    let (trained, held_out) = match &plan.task.data {
        TaskData::Arithmetic { digits, count } => {
            let (trained, held_out) = arithmetic::split(&sums(*digits, *count, seed), share, seed);
            (arithmetic::ranked(&trained, WRONG, seed), arithmetic::ranked(&held_out, WRONG, seed))
        }
        TaskData::Data(_) => arithmetic::split(&data::all(&plan.task.data.sources())?, share, seed),
        TaskData::Rollouts { .. } => bail!("recorded rollouts are no pairs of answers"),
    };
    Ok([trained, held_out].map(|pairs| pairs.into_iter().map(|pair| conversations::asked_pair(&chat, pair)).collect()))
}
