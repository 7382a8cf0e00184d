//! `[chat]`, and the samples, rows and steps of `[sft]`.

use std::path::Path;

use anyhow::{Context, Result};
use rollflow::data::chat::{ChatError, ChatInput, ChatTemplate, tokenize_conversation};
use rollflow::data::packing::{PackedRows, Packing, TooLong, pack};
use rollflow::data::source::{Example, prepare_pair, prepare_sft_sample, prepare_sft_turns};
use rollflow::data::{BufferState, ChatMessage, Metadata, Pair, PromptText, arithmetic};
use rollflow::env::{Environment, ToolCall, ToolResult, ToolSpec};
use rollflow::prelude::*;
use rollflow::recipe::chat::{Ask, Chat, PLAIN};
use rollflow::recipe::data::Source;
use rollflow::recipe::environment::EnvironmentKind;
use rollflow::recipe::model::ModelSource;
use rollflow::recipe::task::{Sft, TaskData, Turns};
use rollflow::recipe::{Derived, Plan};
use rollflow::stages::tokenizer_folder;
use rollflow::util::reading;

use crate::assemble::environments::demonstrations::{CalculatorEnvironment, calculate};
use crate::assemble::parts::{Reader, sums};
use crate::assemble::{data, origin};
use crate::run::folder::RECIPE;

/// The tokenizer with the recipe's chat template, and with what the recipe tells it.
pub fn tokenizer(plan: &Plan, tokenizer: Tokenizer) -> Result<Tokenizer> {
    let chat = &plan.chat;
    if *chat == (Chat { ask: chat.ask, system: chat.system.clone(), ..Chat::default() }) {
        return Ok(tokenizer);
    }
    let template = match chat.template.as_deref() {
        None => tokenizer.chat().cloned().context("[chat]")?,
        Some(PLAIN) => ChatTemplate::plain(),
        Some(file) => ChatTemplate::from_file(file.as_ref())?,
    };
    let variables: Metadata = chat.variables.read().context("[chat] variables")?;
    let template = variables.into_iter().fold(template, |template, (name, value)| template.with(&name, value));
    Ok(tokenizer.with_chat(match &chat.date {
        Some(date) => template.dated(date)?,
        None => template,
    }))
}

/// `[chat]`, with `ask = "auto"` decided by the model: as the run asked that made it, or a user's turn where there is a chat template.
pub fn chat(plan: &Plan) -> Chat {
    let ask = match plan.chat.ask {
        Ask::Auto if plan.chat.template.is_some() => Ask::User,
        Ask::Auto => of_model(&plan.model.source).0,
        ask => ask,
    };
    Chat { ask, ..plan.chat.clone() }
}

/// How the model is asked, and why. A template that can't be read counts as one: using it reports why.
fn of_model(model: &ModelSource) -> (Ask, &'static str) {
    let folder = match model {
        ModelSource::Folder(folder) => origin::model_folder(&folder.name()).ok(),
        ModelSource::Tiny(_) => None,
    };
    match folder {
        Some(folder) => match asked_by_run(&folder) {
            Some(ask) => (ask, "so did the run that trained the model"),
            None if matches!(ChatTemplate::from_dir(&tokenizer_folder(folder)), Ok(None)) => NO_TEMPLATE,
            None => (Ask::User, "the model has a chat template"),
        },
        None => NO_TEMPLATE,
    }
}

const NO_TEMPLATE: (Ask, &str) = (Ask::AsWritten, "the model has no chat template");

/// What the run decided that saved this checkpoint: its `chat.ask`. `None` if no run did, or if its recipe decides nothing.
fn asked_by_run(checkpoint: &Path) -> Option<Ask> {
    let recipe = reading::read_text(&origin::run_of(checkpoint)?.join(RECIPE)).ok()?;
    let recipe: toml::Table = recipe.parse().ok()?;
    let word = recipe.get("chat")?.get("ask")?.as_str()?;
    [Ask::AsWritten, Ask::User].into_iter().find(|ask| ask.word() == word)
}

/// How `ask = "auto"` was decided, and why, for plans that ask for text of a data set.
pub fn derived(plan: &Plan) -> Option<Derived> {
    let data = matches!(plan.task.data, TaskData::Data(_)) || plan.sft.as_ref().is_some_and(|sft| !sft.sources().is_empty());
    if plan.chat.ask != Ask::Auto || !data {
        return None;
    }
    let (ask, reason) = match &plan.chat.template {
        Some(_) => (Ask::User, "chat.template names a chat template"),
        None => of_model(&plan.model.source),
    };
    Some(Derived { key: "chat.ask".to_owned(), value: format!("{:?}", ask.word()), reason: reason.to_owned() })
}

/// A prompt as `chat`, which was [decided](chat), has it asked.
pub fn asked(chat: &Chat, prompt: PromptText) -> PromptText {
    match prompt {
        PromptText::Text(text) if chat.ask != Ask::User => PromptText::Text(text),
        PromptText::Text(text) => opened(chat, vec![ChatMessage::new("user", text)]).into(),
        PromptText::Chat(turns) => opened(chat, turns).into(),
    }
}

/// The conversation with what the system says first, unless it says something of its own.
pub fn opened(chat: &Chat, turns: Vec<ChatMessage>) -> Vec<ChatMessage> {
    match &chat.system {
        Some(words) if turns.iter().all(|turn| turn.role != "system") => {
            [ChatMessage::new("system", words)].into_iter().chain(turns).collect()
        }
        _ => turns,
    }
}

/// An example likewise. Raw text is no conversation.
fn imitated(chat: &Chat, example: &Example) -> Example {
    match example.clone() {
        Example::Pair(pair) => Example::Pair(Pair { prompt: asked(chat, pair.prompt), ..pair }),
        Example::Chat { turns, tools } => Example::Chat { turns: opened(chat, turns), tools },
        text @ Example::Text(_) => text,
    }
}

/// What is imitated, the data sets of `[sft]` or the task's own pairs, as steps; and the name of its data for checkpoints, where it is read as it is
/// drawn.
pub fn batches(plan: &Plan, sft: &Sft, reader: &Reader) -> Result<(Supervised, Option<BufferState>)> {
    let sources = match &plan.task.data {
        _ if !sft.sources().is_empty() => sft.sources(),
        // What an environment shows is made of pairs, all at once.
        TaskData::Data(task) if !demonstrates(plan) => task.sources(),
        _ => Vec::new(),
    };
    // Where none is said, the longest sample is the longest that the model reads.
    let sft = &Sft { max_length: sft.max_length.or(Some(reader.config.max_positions)), ..sft.clone() };
    // Rows and steps by tokens are laid out before the run.
    let ahead = sft.packs() || sft.too_long == TooLong::Split;
    if !sources.is_empty() && !ahead {
        return data::supervised(plan, sft, &sources, reader);
    }
    Ok((rows(plan, sft, reader, samples(plan, sft, &sources, reader)?)?, None))
}

/// An example as samples, none longer than `sft.max_length`.
pub fn prepare(chat: &Chat, sft: &Sft, example: &Example, tokenizer: &Tokenizer) -> Result<Vec<Sample>, ChatError> {
    let example = imitated(chat, example);
    Ok(match sft.turns {
        Turns::Together => vec![prepare_sft_sample(&example, tokenizer)?],
        Turns::Apart => prepare_sft_turns(&example, tokenizer)?,
    })
}

/// Samples as they fit into `sft.max_length`.
pub fn fit(sft: &Sft, samples: Vec<Sample>) -> PackedRows {
    pack(samples, sft.max_length.unwrap_or(usize::MAX), sft.packing, sft.too_long).teaching()
}

/// All samples at once.
fn samples(plan: &Plan, sft: &Sft, sources: &[Source], reader: &Reader) -> Result<Vec<Sample>> {
    if !sources.is_empty() {
        let examples: Vec<Example> = data::all(sources)?;
        let chat = chat(plan);
        let samples = examples.iter().map(|example| prepare(&chat, sft, example, &reader.tokenizer));
        return Ok(samples.collect::<Result<Vec<_>, _>>()?.concat());
    }
    let pairs = match &plan.task.data {
        TaskData::Arithmetic(task) => sums(task, plan.seed),
        TaskData::Data(task) => data::pairs(&task.sources())?,
        TaskData::Rollouts(_) => Vec::new(),
    };
    let pairs = arithmetic::share(&pairs, sft.fraction, plan.seed);
    match demonstrations(plan, &pairs, &reader.tokenizer)? {
        Some(samples) => Ok(samples),
        None => {
            let chat = chat(plan);
            let asked = |pair: &Pair| Pair { prompt: asked(&chat, pair.prompt.clone()), ..pair.clone() };
            let samples = pairs.iter().map(|pair| prepare_pair(&asked(pair), &reader.tokenizer));
            Ok(samples.collect::<Result<_, _>>()?)
        }
    }
}

/// Steps over the samples, in rows if they are packed.
fn rows(plan: &Plan, sft: &Sft, reader: &Reader, samples: Vec<Sample>) -> Result<Supervised> {
    let count = samples.len();
    let packed = fit(sft, samples);
    say(sft, count, &packed);
    let rows = match sft.packing {
        // Best fit begins with the longest.
        Packing::BestFit => arithmetic::split(&packed.rows, 1.0, plan.seed).0,
        _ => packed.rows,
    };
    let batches = match sft.batch_tokens {
        Some(tokens) => Supervised::by_tokens("SFT", rows, tokens, |length| reader.config.cost_of(length), sft.steps)?,
        None => Supervised::grouped("SFT", rows, sft.batch, sft.steps)?,
    };
    Ok(if sft.packing == Packing::Apart { batches } else { batches.called("Rows") })
}

/// What is not as it was in the data.
fn say(sft: &Sft, samples: usize, packed: &PackedRows) {
    let PackedRows { rows, too_long, left_out, lost_tokens } = packed;
    let room = sft.max_length.unwrap_or_default();
    if *too_long > 0 && sft.packing != Packing::Wrapped {
        tracing::warn!(
            "{too_long} of {samples} samples are longer than {room} tokens (sft.max_length, or what the model reads): {}",
            match sft.too_long {
                TooLong::Truncate => "they keep their beginning",
                TooLong::Drop => "they are left out",
                TooLong::Split => "they are cut into pieces",
            }
        );
    }
    if *lost_tokens > 0 {
        tracing::warn!("{lost_tokens} tokens are not trained on, {left_out} samples or pieces among them as a whole");
    }
    if sft.packing != Packing::Apart {
        let tokens: usize = rows.iter().flatten().map(|sample| sample.tokens.len()).sum();
        let full = 100.0 * tokens as f64 / (rows.len() * room).max(1) as f64;
        tracing::info!("Packed {samples} samples into {} rows of at most {room} tokens, {full:.1}% full", rows.len());
    }
}

/// Returns true if the environment can generate demonstrations of its task.
pub fn demonstrates(plan: &Plan) -> bool {
    plan.environment.as_ref().is_some_and(|of| matches!(of.kind, EnvironmentKind::Calculator(_)))
}

/// Generates the conversations that `[sft]` trains on for `environment.kind = "calculator"`: each
/// sum is computed with the tool, then submitted.
pub fn demonstrations(plan: &Plan, pairs: &[Pair], tokenizer: &Tokenizer) -> Result<Option<Vec<Sample>>> {
    let Some(of) = plan.environment.as_ref().filter(|_| demonstrates(plan)) else { return Ok(None) };
    let tools: Vec<_> = CalculatorEnvironment::default().tools().iter().map(ToolSpec::to_json).collect();
    let sample = |pair: &Pair| -> Result<Sample> {
        let asked = pair.prompt.render();
        let expression = asked.trim_end_matches('=');
        let value = calculate(expression).map_err(|problem| anyhow::anyhow!("{expression}: {problem}"))?;
        let call =
            |tool: &str, key: &str, value: &str| ToolCall::new(tool, [(key.to_owned(), value.into())].into_iter().collect());
        let calculation = call("calculator", "expression", expression);
        let says = |call: &ToolCall| ChatMessage::new("assistant", of.parser.write(call));
        let result = ToolResult::of(&calculation, &*value).message();
        let answer = call("complete_task", "answer", &value);
        let turns = [ChatMessage::new("user", asked.clone()), says(&calculation), result, says(&answer)];
        let turns = opened(&plan.chat, turns.into());
        let tokens = tokenize_conversation(&ChatInput::new(&turns).tools(&tools), tokenizer)?;
        Ok(tokens.sample(&turns))
    };
    pairs.iter().map(sample).collect::<Result<_>>().map(Some)
}
