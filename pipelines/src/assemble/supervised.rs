//! `[sft]`: data sets or the task's own pairs as the steps of supervised training.

use anyhow::Result;
use rollflow::data::chat::tokenize_conversation;
use rollflow::data::packing::{OverlongPolicy, PackedRows, Packing, pack};
use rollflow::data::source::{Example, Mixed, prepare_pair, prepare_sft_sample, prepare_sft_turns, rendered_bytes, too_long};
use rollflow::data::{BufferState, ChatMessage, DataError, Pair, arithmetic};
use rollflow::env::{Environment, ToolCall, ToolResult, ToolSpec};
use rollflow::prelude::*;
use rollflow::recipe::{self, Chat, EnvironmentKind, Plan, Sft, Source, Task, TaskData};

use crate::assemble::conversations::{asked, opened};
use crate::assemble::data::{self, sums};
use crate::assemble::environments::demonstrations::{CalculatorEnvironment, calculate};
use crate::assemble::policy::Reader;

/// Supervised training, and the sections that its samples follow from.
#[derive(Clone, Copy)]
pub struct Imitation<'a> {
    /// Length, data sets and layout.
    pub sft: &'a Sft,
    /// Pairs where `[sft]` has no data sets.
    pub task: &'a Task,
    /// Format of prompts.
    pub chat: &'a Chat,
    /// Environment, which may demonstrate its task.
    pub environment: Option<&'a recipe::Environment>,
    /// Seed of every draw.
    pub seed: u64,
}

impl<'a> Imitation<'a> {
    /// The imitation of `sft` in a plan.
    pub fn of(plan: &'a Plan, sft: &'a Sft) -> Self {
        Imitation { sft, task: &plan.task, chat: &plan.chat, environment: plan.environment.as_ref(), seed: plan.seed }
    }

    /// The data sets of `[sft]`, or else of the task.
    pub fn sources(self) -> Vec<Source> {
        match self.sft.sources() {
            // Demonstrations of an environment are made from all pairs before the run.
            own if own.is_empty() && !self.demonstrates() => self.task.data.sources(),
            own => own,
        }
    }

    /// Builds the supervised steps from the data sets of `[sft]` or the task's own pairs. The second value
    /// identifies data that is read while it is drawn, for checkpoints.
    pub fn batches(self, reader: &Reader) -> Result<(Supervised, Option<BufferState>)> {
        let sources = self.sources();
        let of = Imitation { sft: &bounded(self.sft, reader), ..self };
        if !sources.is_empty() && !is_laid_out(of.sft) {
            return of.drawn(&sources, reader);
        }
        Ok((of.rows(reader, of.samples(&sources, reader)?)?, None))
    }

    /// Reads all samples before the run.
    fn samples(self, sources: &[Source], reader: &Reader) -> Result<Vec<Sample>> {
        if !sources.is_empty() {
            let usable = |example: &Example| self.usable(example, &reader.tokenizer);
            let examples: Vec<Example> = data::all_if(sources, usable)?;
            let samples = examples.iter().map(|example| prepare(self.chat, self.sft, example, &reader.tokenizer));
            return Ok(samples.collect::<Result<Vec<_>, _>>()?.concat());
        }
        let pairs = match &self.task.data {
            TaskData::Arithmetic { digits, count } => sums(*digits, *count, self.seed),
            TaskData::Data(_) => data::pairs(&self.task.data.sources())?,
            TaskData::Environment { .. } | TaskData::Rollouts { .. } => Vec::new(),
        };
        let pairs = arithmetic::split(&pairs, self.sft.fraction, self.seed).0;
        if let Some(samples) = self.demonstrations(&pairs, &reader.tokenizer)? {
            return Ok(samples);
        }
        let asked = |pair: &Pair| Pair { prompt: asked(self.chat, pair.prompt.clone()), ..pair.clone() };
        let samples = pairs.iter().map(|pair| prepare_pair(&asked(pair), &reader.tokenizer));
        Ok(samples.collect::<Result<_, _>>()?)
    }

    /// Steps over the samples, in rows if they are packed.
    fn rows(self, reader: &Reader, samples: Vec<Sample>) -> Result<Supervised> {
        let (sft, count) = (self.sft, samples.len());
        let packed = fit(sft, samples);
        say(sft, count, &packed);
        let rows = match sft.packing {
            // Best fit begins with the longest.
            Packing::BestFit => arithmetic::split(&packed.rows, 1.0, self.seed).0,
            _ => packed.rows,
        };
        let batches = match sft.batch_tokens {
            Some(tokens) => Supervised::by_tokens("SFT", rows, tokens, |length| reader.config.cost_of(length), sft.steps)?,
            None => Supervised::grouped("SFT", rows, sft.batch, sft.steps)?,
        };
        Ok(batches.called(if sft.packing == Packing::Apart { "Samples" } else { "Rows" }))
    }

    /// Builds steps that draw samples as they are needed, and their state for checkpoints. Always shuffled:
    /// neighbours in a file are similar.
    fn drawn(self, sources: &[Source], reader: &Reader) -> Result<(Supervised, Option<BufferState>)> {
        let Imitation { sft, chat, seed, .. } = self;
        let (tokenizer, chat, of) = (reader.tokenizer.clone(), chat.clone(), sft.clone());
        let usable = |example: &Example| self.usable(example, &reader.tokenizer);
        let data = Mixed::<Example>::open_if(&data::specs(sources), seed, true, usable)?;
        let state = data.state(0);
        let group = move |example: Example| Ok(fit(&of, prepare(&chat, &of, &example, &tokenizer)?).rows.concat());
        Ok((Supervised::drawn("SFT", data, sft.batch, sft.steps, group)?, Some(state)))
    }

    /// [`judge`] while data is opened. Without a chat template all examples pass: the run reports the error.
    fn usable(self, example: &Example, tokenizer: &Tokenizer) -> Result<(), String> {
        judge(self.chat, self.sft, example, tokenizer).unwrap_or(Ok(()))
    }

    /// Returns true if the environment can generate demonstrations of its task.
    pub fn demonstrates(self) -> bool {
        self.environment.is_some_and(|of| of.kind == EnvironmentKind::Calculator)
    }

    /// Generates the conversations that `[sft]` trains on for `environment.kind = "calculator"`: each
    /// sum is computed with the tool, then submitted.
    pub fn demonstrations(self, pairs: &[Pair], tokenizer: &Tokenizer) -> Result<Option<Vec<Sample>>> {
        let Some(of) = self.environment.filter(|_| self.demonstrates()) else { return Ok(None) };
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
            let turns = opened(self.chat, turns.into());
            Ok(tokenize_conversation(&turns, &tools, tokenizer)?)
        };
        pairs.iter().map(sample).collect::<Result<_>>().map(Some)
    }
}

/// An example with its prompt as `chat` has it asked. Raw text is no conversation.
fn imitated(chat: &Chat, example: &Example) -> Example {
    match example.clone() {
        Example::Pair(pair) => Example::Pair(Pair { prompt: asked(chat, pair.prompt), ..pair }),
        Example::Chat { turns, tools, first } => {
            let (given, turns) = (turns.len(), opened(chat, turns));
            Example::Chat { first: first + turns.len() - given, turns, tools }
        }
        text @ Example::Text(_) => text,
    }
}

/// An example as samples, none longer than `sft.max_length`.
fn prepare(chat: &Chat, sft: &Sft, example: &Example, tokenizer: &Tokenizer) -> Result<Vec<Sample>, DataError> {
    let example = imitated(chat, example);
    Ok(if sft.turns_apart() { prepare_sft_turns(&example, tokenizer)? } else { vec![prepare_sft_sample(&example, tokenizer)?] })
}

/// `sft` with a length: without one, the longest sample is the longest that the model reads.
pub fn bounded(sft: &Sft, reader: &Reader) -> Sft {
    Sft { max_length: sft.max_length.or(Some(reader.config.max_positions)), ..sft.clone() }
}

/// Returns true if rows and steps are laid out before the run.
pub fn is_laid_out(sft: &Sft) -> bool {
    sft.packs() || sft.on_overlong == OverlongPolicy::Split
}

/// Checks that an example can be trained on within `sft.max_length`; the inner error is the reason to skip
/// it.
///
/// # Errors
/// Fails if there is no usable chat template.
pub fn judge(chat: &Chat, sft: &Sft, example: &Example, tokenizer: &Tokenizer) -> Result<Result<(), String>, DataError> {
    /// Most tokens that a tokenizer puts around a text. No token is shorter than a byte, so most examples
    /// need no tokenisation here.
    const AROUND_A_TEXT: usize = 16;
    let most = sft.max_length.unwrap_or(usize::MAX);
    let samples = match rendered_bytes(&imitated(chat, example), tokenizer, sft.turns_apart()) {
        // Samples that are laid out before the run are counted there.
        Ok(bytes) if is_laid_out(sft) || bytes + AROUND_A_TEXT <= most => return Ok(Ok(())),
        Ok(_) => prepare(chat, sft, example, tokenizer),
        Err(error) => Err(error),
    };
    let samples = match samples {
        Ok(samples) => samples,
        Err(error) => return data::refusal(error, tokenizer),
    };
    if sft.on_overlong == OverlongPolicy::Drop && samples.iter().any(|sample| sample.tokens.len() > most) {
        return Ok(Err(too_long(most)));
    }
    let trains = !fit(sft, samples).rows.is_empty();
    Ok(if trains { Ok(()) } else { Err(format!("with nothing to train in the first {most} tokens")) })
}

/// Samples as they fit into `sft.max_length`.
fn fit(sft: &Sft, samples: Vec<Sample>) -> PackedRows {
    pack(samples, sft.max_length.unwrap_or(usize::MAX), sft.packing, sft.on_overlong).teaching()
}

/// Logs which samples were truncated, dropped or packed.
fn say(sft: &Sft, samples: usize, packed: &PackedRows) {
    let PackedRows { rows, too_long, left_out, lost_tokens } = packed;
    let room = sft.max_length.unwrap_or_default();
    if *too_long > 0 && sft.packing != Packing::Wrapped {
        tracing::warn!(
            "{too_long} of {samples} samples are longer than {room} tokens (sft.max_length, or what the model reads): {}",
            match sft.on_overlong {
                OverlongPolicy::Truncate => "they keep their beginning",
                OverlongPolicy::Drop => "they are left out",
                OverlongPolicy::Split => "they are cut into pieces",
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
