//! A recipe's data sets as what stages draw from.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail, ensure};
use rollflow::data::source::{DataSet, DataSpec, Example, Mixed, Shape, refused, too_long};
use rollflow::data::{BufferState, DataBuffer, DataError, Pair, PromptText, arithmetic};
use rollflow::prelude::*;
use rollflow::recipe::{Chat, Environment, Plan, Source as DataSource, Task, TaskData};
use serde_json::{Map, Value};

use crate::assemble::policy::Reader;
use crate::assemble::{conversations, environments};
use crate::run::resume::ResumePoint;

/// The file in a checkpoint that says which data a run draws from that has no admission to say so.
const DATA: &str = "data.json";

/// Opens the data sets of `[task]`, without prompts that `fits` or [`answered`] rejects.
///
/// # Errors
/// Fails if a data set has no other prompts.
pub fn prompt_dataset(
    task: &Task,
    seed: u64,
    compares: bool,
    fits: impl Fn(&Prompt) -> Result<(), String> + Sync,
) -> Result<Mixed<Prompt>> {
    let usable = |prompt: &Prompt| answered(compares, prompt).and_then(|()| fits(prompt));
    Ok(Mixed::open_if(&specs(&task.data.sources()), seed, task.shuffle, usable)?)
}

/// The reason to skip a prompt without the reference answer that the reward `compares` with as text.
pub fn answered(compares: bool, prompt: &Prompt) -> Result<(), String> {
    match prompt.answer().filter(|_| compares) {
        None if compares => Err("without a reference answer".to_owned()),
        Some(answer) if is_compound(answer, &prompt.metadata) => {
            Err("whose reference answer is a list or an object, which only functions and services compare with".to_owned())
        }
        _ => Ok(()),
    }
}

/// Returns true if a record has this answer as a list or as an object, and not as text.
fn is_compound(answer: &str, record: &Map<String, Value>) -> bool {
    let Ok(value @ (Value::Array(_) | Value::Object(_))) = serde_json::from_str(answer) else { return false };
    record.values().any(|field| *field == value || field.as_object().is_some_and(|inner| inner.values().any(|of| *of == value)))
}

/// Reads the first few prompts of `[task]`, from as few records of each source.
pub fn first_prompts(plan: &Plan, few: usize, reader: &Reader) -> Result<Vec<Prompt>> {
    let (mut task, chat, environment) = (plan.task.clone(), &plan.chat, plan.environment.as_ref());
    let fewer = |most: &mut Option<usize>| *most = Some(most.map_or(few, |most| most.min(few)));
    match &mut task.data {
        TaskData::Data(of) => of.sources.iter_mut().chain([&mut of.only]).for_each(|source| fewer(&mut source.max_samples)),
        TaskData::Environment { limit } => fewer(limit),
        TaskData::Arithmetic { .. } | TaskData::Rollouts { .. } => {}
    }
    let fits = fits(chat, environment, Some(reader), plan.generate.max_new_tokens);
    let mut prompts = prompts(&task, environment, chat, plan.seed, false, fits)?.limited(few as u64);
    let next = || prompts.next().map_err(|error| anyhow!("{error}")).transpose();
    std::iter::from_fn(next).collect()
}

/// Returns a check that the chat template renders a prompt, and that it fits the policy's context together
/// with the longest completion, of `answer` tokens. Without a chat template all prompts pass: the run reports
/// the error. Prompts that the template refuses pass if there is an environment, which opens the
/// conversation.
pub fn fits(
    chat: &Chat,
    environment: Option<&Environment>,
    reader: Option<&Reader>,
    answer: usize,
) -> impl Fn(&Prompt) -> Result<(), String> + Sync + use<> {
    /// Upper bound of the bytes that a chat template adds to a turn. No token is shorter than a byte, so
    /// most prompts need no tokenisation here.
    const AROUND_A_TURN: usize = 512;
    let (chat, is_opened, reader) =
        (chat.clone(), environment.is_some(), reader.map(|reader| (reader.tokenizer.clone(), reader.config.max_positions)));
    move |prompt| {
        let Some((tokenizer, positions)) = &reader else { return Ok(()) };
        let room = positions.saturating_sub(answer);
        let asked = conversations::asked(&chat, prompt.text.clone());
        let bytes: usize = match &asked {
            PromptText::Text(text) => AROUND_A_TURN + text.len(),
            PromptText::Chat(turns) => turns.iter().map(|turn| AROUND_A_TURN + turn.content.len()).sum(),
        };
        let is_short = bytes <= room && prompt.tools().is_empty();
        let tokens = match &asked {
            PromptText::Text(_) if is_short => Ok(0),
            PromptText::Chat(turns) if is_short => tokenizer.chat().and_then(|chat| chat.render_prompt(turns, &[])).map(|_| 0),
            _ => tokenizer.encode_prompt(&Prompt { text: asked, ..prompt.clone() }).map(|tokens| tokens.len()),
        };
        match tokens {
            Ok(tokens) if tokens > room => Err(format!(
                "longer than {room} tokens, which are what {answer} new ones leave of the {positions} that the model reads"
            )),
            Err(error) if !is_opened => refusal(error, tokenizer).unwrap_or(Ok(())),
            Ok(_) | Err(_) => Ok(()),
        }
    }
}

/// The reason to skip a record that the tokenizer or the chat template refuses; the error itself if there is
/// no usable chat template.
pub fn refusal(error: DataError, tokenizer: &Tokenizer) -> Result<Result<(), String>, DataError> {
    if tokenizer.chat().is_err() { Err(error) } else { Ok(Err(refused(error))) }
}

/// Checks that samples were made, and that none is longer than `most` tokens.
pub fn within<S: AsRef<[Sample]>>(samples: Result<S, DataError>, most: usize) -> Result<(), String> {
    match samples {
        Ok(samples) if samples.as_ref().iter().any(|sample| sample.tokens.len() > most) => Err(too_long(most)),
        Ok(_) => Ok(()),
        Err(error) => Err(refused(error)),
    }
}

/// All that the sources hold, such as pairs of answers, each as often as its source is repeated.
pub fn all<T: Shape + Clone>(sources: &[DataSource]) -> Result<Vec<T>> {
    all_if(sources, |_| Ok(()))
}

/// [`all`] that are usable: an error is the reason to skip a record.
pub fn all_if<T: Shape + Clone>(sources: &[DataSource], usable: impl Fn(&T) -> Result<(), String> + Sync) -> Result<Vec<T>> {
    let mut all = Vec::new();
    for source in sources {
        let data = DataSet::<T>::open_if(&source.spec(), &usable)?;
        let read = data.iter().collect::<Result<Vec<_>, _>>()?;
        (0..source.repeat).for_each(|_| all.extend(read.iter().cloned()));
        tracing::info!("Data: {}", data.describe());
    }
    Ok(all)
}

/// Reads the pairs of prompt and completion among the examples of `sources`.
pub fn pairs(sources: &[DataSource]) -> Result<Vec<Pair>> {
    let pair = |example: Example| if let Example::Pair(pair) = example { Some(pair) } else { None };
    Ok(all(sources)?.into_iter().filter_map(pair).collect())
}

/// The sources, and how much of each is drawn.
pub fn specs(sources: &[DataSource]) -> Vec<DataSpec> {
    sources.iter().map(DataSource::spec).collect()
}

/// Identifies the data in every checkpoint of the trainer, and resumes it at `from` if that checkpoint
/// has the same data.
pub fn resumable<B: TrainingBackend>(
    mut trainer: Trainer<B>,
    from: Option<&ResumePoint>,
    data: Option<BufferState>,
) -> Result<Trainer<B>> {
    if let Some(from) = from {
        check(&from.checkpoint, data.as_ref())?;
        trainer = trainer.resume(&from.checkpoint, from.trainer.clone())?;
    }
    Ok(match data {
        None => trainer,
        Some(data) => trainer.checkpoint_files(move || Ok(BTreeMap::from([(DATA.to_owned(), serde_json::to_vec(&data)?)]))),
    })
}

/// Rejects other data than the checkpoint's: some records would be trained twice, others never.
fn check(checkpoint: &Path, data: Option<&BufferState>) -> Result<()> {
    let (Some(data), path) = (data, checkpoint.join(DATA)) else { return Ok(()) };
    let text = std::fs::read(&path).with_context(|| format!("reading {}", path.display()))?;
    let saved: BufferState = serde_json::from_slice(&text).with_context(|| format!("reading {}", path.display()))?;
    ensure!(
        saved == *data,
        "the run was trained on other data: its records have the fingerprint {}, these {}; resume with the data set of the saved run, \
         or start over",
        saved.fingerprint,
        data.fingerprint
    );
    Ok(())
}

/// Builds the prompt source of a run: the prompts of `[task]` that fit `reader`, chosen by `[curriculum]`.
/// A run that `from` resumes keeps prompts without a reference answer if it was begun with them, by an
/// earlier version or under another reward: its position counts them.
pub fn training_prompts(plan: &Plan, reader: &Reader, from: Option<&ResumePoint>) -> Result<Prompts> {
    let fits = fits(&plan.chat, plan.environment.as_ref(), Some(reader), plan.generate.max_new_tokens);
    let open = |compares| prompts(&plan.task, plan.environment.as_ref(), &plan.chat, plan.seed, compares, &fits);
    let compares = plan.reward.rule.compares();
    let saved = from.and_then(|from| from.trainer.progress.data.as_ref()).filter(|_| compares);
    let begun = saved.map(|_| open(false)).transpose()?.filter(|all| saved.is_some_and(|saved| all.is_at(saved)));
    let prompts = begun.map_or_else(|| open(compares), Ok)?;
    Ok(match &plan.curriculum {
        Some(rule) => prompts.curriculum(rule.clone())?,
        None => prompts,
    })
}

/// Builds the prompt source of `[task]`, which `environment` may bring, formatted by `[chat]`. Records that
/// `fits` rejects are dropped; `compares` is as in [`prompt_dataset`].
pub fn prompts(
    task: &Task,
    environment: Option<&Environment>,
    chat: &Chat,
    seed: u64,
    compares: bool,
    fits: impl Fn(&Prompt) -> Result<(), String> + Sync,
) -> Result<Prompts> {
    let chat = chat.clone();
    let asked = move |prompt: Prompt| Prompt { text: conversations::asked(&chat, prompt.text), ..prompt };
    let buffer = match &task.data {
        TaskData::Data(_) => return Ok(Prompts::dataset(prompt_dataset(task, seed, compares, fits)?).map(asked)),
        TaskData::Rollouts { .. } => bail!("rollouts that were recorded are answered already: there is nothing to ask"),
        TaskData::Environment { limit } => DataBuffer::new(environments::tasks(environment, *limit)?, seed)?,
        TaskData::Arithmetic { digits, count } => DataBuffer::new(sums(*digits, *count, seed).iter().map(Prompt::from), seed)?,
    };
    Ok(Prompts::new(if task.shuffle { buffer.shuffled() } else { buffer }).map(asked))
}

/// The sums of an arithmetic task.
pub(crate) fn sums(digits: u32, count: Option<usize>, seed: u64) -> Vec<Pair> {
    match count {
        Some(count) => arithmetic::drawn_addition(digits, count, seed),
        None => arithmetic::addition(digits),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn prompts_whose_answer_is_no_text_are_skipped_where_texts_are_compared() {
        let reason = |record: Value| {
            let prompt = Prompt { metadata: record.as_object().cloned().unwrap(), ..Prompt::from("1+1=") };
            assert_eq!(answered(false, &prompt), Ok(()));
            answered(true, &prompt).err()
        };
        assert!(reason(json!({ "answer": "[1]", "answer_of_record": [1] })).unwrap().contains("a list"));
        assert!(reason(json!({ "answer": "{\"a\":1}", "reward_model": { "ground_truth": { "a": 1 } } })).is_some());
        assert_eq!(reason(json!({ "answer": "[1]", "level": 1 })), None, "a text that looks like a list");
        assert_eq!(reason(json!({ "question": "x" })).unwrap(), "without a reference answer");
    }
}
