//! `[chat]`, and the samples, rows and steps of `[sft]`.

use anyhow::{Context, Result};
use rollflow::data::chat::ChatTemplate;
use rollflow::data::packing::{self, PackedRows, pack};
use rollflow::data::{Metadata, arithmetic, jsonl};
use rollflow::prelude::*;
use rollflow::recipe::Plan;
use rollflow::recipe::chat::PLAIN;
use rollflow::recipe::task::{Packing, Sft, TaskData, TooLong, Turns};

use crate::parts::sums;

/// The tokenizer with the recipe's chat template, and with what the recipe tells it.
pub fn tokenizer(plan: &Plan, tokenizer: Tokenizer) -> Result<Tokenizer> {
    let chat = &plan.chat;
    if *chat == rollflow::recipe::chat::Chat::default() {
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

/// What is imitated: the pairs or conversations of `[sft] data`, or the task's own pairs.
pub fn samples(plan: &Plan, sft: &Sft, policy: &Policy) -> Result<Vec<Sample>> {
    let (file, limit) = match (&sft.data, &plan.task.data) {
        (Some(file), _) => (Some(file), None),
        (None, TaskData::Jsonl(task)) => (Some(&task.path), task.limit),
        (None, TaskData::Arithmetic(_)) => (None, None),
    };
    if let (Some(key), Some(file)) = (&sft.messages_key, file) {
        let conversations = jsonl::load_conversations(file, key, limit)?;
        let (seen, _) = arithmetic::split(&conversations, sft.fraction, plan.seed);
        return Ok(policy.supervised_conversations(&seen, sft.turns == Turns::Apart)?);
    }
    let pairs = match (&sft.data, &plan.task.data) {
        (Some(file), _) => jsonl::load_pairs(file, &sft.prompt_key, &sft.completion_key, None)?,
        (None, TaskData::Arithmetic(task)) => sums(task, plan.seed),
        (None, TaskData::Jsonl(task)) => jsonl::load_pairs(&task.path, &task.prompt_key, &task.answer_key, task.limit)?,
    };
    Ok(policy.supervised(&arithmetic::share(&pairs, sft.fraction, plan.seed))?)
}

/// Steps over the samples, in rows if they are packed.
pub fn batches(plan: &Plan, sft: &Sft, policy: &Policy) -> Result<Supervised> {
    let samples = samples(plan, sft, policy)?;
    let count = samples.len();
    let packing = match sft.packing {
        Packing::None => packing::Packing::Apart,
        Packing::BestFit => packing::Packing::BestFit,
        Packing::Wrapped => packing::Packing::Wrapped,
    };
    let too_long = match sft.too_long {
        TooLong::Truncate => packing::TooLong::Truncate,
        TooLong::Drop => packing::TooLong::Drop,
        TooLong::Split => packing::TooLong::Split,
    };
    let room = sft.max_length.unwrap_or(usize::MAX);
    let packed = pack(samples, room, packing, too_long).teaching();
    say(sft, count, &packed);
    let rows = match sft.packing {
        // Best fit begins with the longest.
        Packing::BestFit => arithmetic::split(&packed.rows, 1.0, plan.seed).0,
        _ => packed.rows,
    };
    let batches = match sft.batch_tokens {
        Some(tokens) => Supervised::by_tokens("SFT", rows, tokens, |length| policy.config().cost_of(length), sft.steps)?,
        None => Supervised::grouped("SFT", rows, sft.batch, sft.steps)?,
    };
    Ok(if sft.packing == Packing::None { batches } else { batches.called("Rows") })
}

/// What is not as it was in the data.
fn say(sft: &Sft, samples: usize, packed: &PackedRows) {
    let PackedRows { rows, too_long, left_out, lost_tokens } = packed;
    let room = sft.max_length.unwrap_or_default();
    if *too_long > 0 && sft.packing != Packing::Wrapped {
        tracing::warn!(
            "{too_long} of {samples} samples are longer than {room} tokens (sft.max_length): {}",
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
    if sft.packing != Packing::None {
        let tokens: usize = rows.iter().flatten().map(|sample| sample.tokens.len()).sum();
        let full = 100.0 * tokens as f64 / (rows.len() * room).max(1) as f64;
        tracing::info!("Packed {samples} samples into {} rows of at most {room} tokens, {full:.1}% full", rows.len());
    }
}
