//! A task's pairs of completions as steps of preference training, and the held-out pairs of its `[eval]`.

use anyhow::{Context, Result, bail};
use rollflow::data::source::{Mixed, prepare_pair};
use rollflow::data::{BufferState, DataError, Pair, RankedPair, arithmetic};
use rollflow::prelude::*;
use rollflow::recipe::{Chat, Eval, Task, TaskData};

use crate::assemble::data::sums;
use crate::assemble::policy::Reader;
use crate::assemble::{conversations, data};

/// Wrong completions to each sum of an arithmetic task.
const WRONG: usize = 64;

/// Builds the pairs of `[task]`, `size` a step, and the state of their data for checkpoints. Pairs longer
/// than the model's context are dropped and counted.
pub fn batches(
    task: &Task,
    chat: &Chat,
    seed: u64,
    size: usize,
    steps: u64,
    reader: &Reader,
) -> Result<(Supervised, Option<BufferState>)> {
    let (tokenizer, chat) = (reader.tokenizer.clone(), chat.clone());
    let pairs = match &task.data {
        TaskData::Data(_) => {
            let fits = fits(&chat, reader);
            let data = Mixed::<RankedPair>::open_if(&data::specs(&task.data.sources()), seed, task.shuffle, fits)?;
            let state = data.state(0);
            let group = move |pair: RankedPair| Ok(samples(&chat, &pair, &tokenizer)?.to_vec());
            return Ok((Supervised::drawn("DPO", data, size, steps, group)?.called("Pairs"), Some(state)));
        }
        _ => all(task, seed, WRONG, seed)?,
    };
    let groups = pairs.iter().map(|pair| Ok(samples(&chat, pair, &tokenizer)?.to_vec())).collect::<Result<Vec<_>>>()?;
    Ok((Supervised::grouped("DPO", groups, size, steps)?.called("Pairs"), None))
}

/// Samples of the chosen and the rejected completion, each after the prompt as `[chat]` formats it.
fn samples(chat: &Chat, pair: &RankedPair, tokenizer: &Tokenizer) -> Result<[Sample; 2], DataError> {
    let prompt = conversations::asked(chat, pair.prompt.clone());
    let sample = |completion: &str| {
        let (prompt, completion, tools) = (prompt.clone(), completion.to_owned(), pair.tools.clone());
        prepare_pair(&Pair { prompt, completion, tools }, tokenizer)
    };
    Ok([sample(&pair.chosen)?, Sample { index: 1, ..sample(&pair.rejected)? }])
}

/// Returns a check that both completions fit the model's context.
pub fn fits(chat: &Chat, reader: &Reader) -> impl Fn(&RankedPair) -> Result<(), String> + Sync + use<> {
    let (chat, Reader { tokenizer, config }) = (chat.clone(), reader.clone());
    move |pair| data::within(samples(&chat, pair, &tokenizer), config.max_positions)
}

/// Samples of the held-out pairs of `[eval]` that fit the model's context, each pair with the name of its
/// data set.
pub fn evaluated(eval: &Eval, task: &Task, chat: &Chat, seed: u64, reader: &Reader) -> Result<Vec<(String, [Sample; 2])>> {
    let (task, fits) = (eval.task.as_ref().unwrap_or(task), fits(chat, reader));
    let mut pairs: Vec<(String, RankedPair)> = Vec::new();
    let sources = task.data.sources();
    if sources.is_empty() {
        pairs.extend(held_out(task, chat, seed)?.into_iter().map(|pair| (String::new(), pair)));
    }
    for source in &sources {
        let of_source: Vec<RankedPair> = data::all(std::slice::from_ref(source))?;
        pairs.extend(of_source.into_iter().map(|pair| (source.spec().name(), pair)));
    }
    pairs.retain(|(_, pair)| fits(pair).is_ok());
    pairs.truncate(eval.limit.unwrap_or(usize::MAX));
    let samples = |(source, pair)| Ok((source, samples(chat, &pair, &reader.tokenizer)?));
    pairs.into_iter().map(samples).collect::<Result<_, DataError>>().context("preparing the evaluation")
}

/// All pairs of a data set, or each sum against `wrong` completions that `drawn_by` draws.
fn all(task: &Task, seed: u64, wrong: usize, drawn_by: u64) -> Result<Vec<RankedPair>> {
    Ok(match &task.data {
        TaskData::Arithmetic { digits, count } => arithmetic::ranked(&sums(*digits, *count, seed), wrong, drawn_by),
        TaskData::Data(_) => data::all(&task.data.sources())?,
        TaskData::Environment { .. } => bail!("the prompts of an environment are no pairs of completions"),
        TaskData::Rollouts { .. } => bail!("recorded rollouts are no pairs of completions"),
    })
}

/// Pairs of an evaluation. Sums have other wrong completions than those that are trained on.
pub fn held_out(task: &Task, chat: &Chat, seed: u64) -> Result<Vec<RankedPair>> {
    Ok(all(task, seed, 1, !seed)?.into_iter().map(|pair| conversations::asked_pair(chat, pair)).collect())
}

/// Pairs to train a reward model on, and the share `held_out` of them that it is judged by in the end.
pub fn divided(task: &Task, chat: &Chat, seed: u64, held_out: f64) -> Result<[Vec<RankedPair>; 2]> {
    let share = 1.0 - held_out;
    let (trained, held_out) = match &task.data {
        TaskData::Arithmetic { digits, count } => {
            let (trained, held_out) = arithmetic::split(&sums(*digits, *count, seed), share, seed);
            (arithmetic::ranked(&trained, WRONG, seed), arithmetic::ranked(&held_out, WRONG, seed))
        }
        _ => arithmetic::split(&all(task, seed, WRONG, seed)?, share, seed),
    };
    Ok([trained, held_out].map(|pairs| pairs.into_iter().map(|pair| conversations::asked_pair(chat, pair)).collect()))
}
